"""Setting: what a person chooses about a deployment, and the budget that follows from it."""

from __future__ import annotations

from dataclasses import dataclass

from kvpool.budget import StaticKVBudget, check_mem_fraction, compute_static_kv_budget
from kvpool.dtypes import FLOAT_DTYPES, FP8_DTYPES
from kvpool.numbers import INT64_MAX, whole_number
from kvpool.sizing.errors import SizingError
from kvpool.sizing.model import Model

KV_DTYPES: tuple[str, ...] = (*FLOAT_DTYPES, *FP8_DTYPES)
DEFAULT_MEM_FRACTION = 0.88
# What a CUDA context, handles and workspaces of libraries take on a data-centre GPU, roughly.
DEFAULT_CONTEXT_BYTES = 2**29


@dataclass(frozen=True)
class Setting:
    """One deployment; memory is that of each rank.

    Attributes
    ----------
    total : int
        Bytes of memory of one GPU.
    mem_fraction : float
        Static region as a fraction of `total`.
    page_size : int
        Tokens per page.
    context : int
        Bytes taken before the pool besides the weights: CUDA context, libraries, communication.
    tp_size : int
        Tensor-parallel ranks.
    max_batch_size, max_seq_len : int or None
        Cap of the pool: that many requests of that many tokens. No batch size: no cap; no length:
        that of the model.
    """

    total: int
    mem_fraction: float = DEFAULT_MEM_FRACTION
    page_size: int = 16
    context: int = DEFAULT_CONTEXT_BYTES
    tp_size: int = 1
    max_batch_size: int | None = None
    max_seq_len: int | None = None

    def __post_init__(self) -> None:
        try:
            check_mem_fraction(self.mem_fraction)
        except (TypeError, ValueError) as error:
            raise SizingError(str(error)) from None
        for name, value, least in (
            ("memory", self.total, 1),
            ("page_size", self.page_size, 1),
            ("context", self.context, 0),
            ("tp", self.tp_size, 1),
            ("max_batch_size", self.max_batch_size, 1),
            ("max_seq_len", self.max_seq_len, 1),
        ):
            if value is not None:
                try:
                    whole_number(value, name, least, INT64_MAX)
                except (TypeError, ValueError) as error:
                    raise SizingError(str(error)) from None
        if self.max_seq_len is not None and self.max_batch_size is None:
            raise SizingError(
                "max_seq_len caps the pool only together with max_batch_size: give both"
            )

    @property
    def static_budget(self) -> int:
        """Bytes of the static region, by the rule itself."""
        total = self.total
        return compute_static_kv_budget(total, total, self.mem_fraction, 1, 1, 1, 1).static_budget

    def used(self, model: Model) -> int:
        """Bytes that are taken on each rank before the pool is made."""
        return model.weights_of_rank(self.tp_size) + self.context


def budget_of(model: Model, setting: Setting, dtype: str) -> StaticKVBudget:
    """The pool of one rank, by `KVCacheLayout.from_config` and `compute_static_kv_budget`.

    Raises
    ------
    SizingError
        Weights and context are larger than the memory, or the model does not divide among the
        ranks.
    """
    if dtype not in KV_DTYPES:
        raise SizingError(f"KV dtype must be one of {', '.join(KV_DTYPES)}, got {dtype!r}")
    used = setting.used(model)
    if used > setting.total:
        raise SizingError(
            f"weights and context take {used} bytes on each rank, more than its memory of "
            f"{setting.total}"
        )
    layout = model.layout(setting.tp_size, setting.max_batch_size or 1, setting.max_seq_len)
    return compute_static_kv_budget(
        setting.total,
        setting.total - used,
        setting.mem_fraction,
        layout.bytes_per_token(dtype),
        setting.page_size,
        # Without a batch size nothing but memory shall bind: no pool has as many pages as bytes.
        layout.max_batch_size if setting.max_batch_size else setting.total,
        layout.max_seq_len,
    )
