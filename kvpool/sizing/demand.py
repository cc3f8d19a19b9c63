"""Reverse: requests of a length to the memory that they need, and to the GPUs that have it."""

from __future__ import annotations

import sys
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvpool.numbers import INT32_MAX, whole_number
from kvpool.paging import num_pages_for_length
from kvpool.sizing.errors import SizingError
from kvpool.sizing.gpus import GPU, GPUS, known_gpu
from kvpool.sizing.model import Model
from kvpool.sizing.setting import KV_DTYPES, Setting, budget_of

RANKS = (1, 2, 4, 8)
MOST_BYTES = 2**60  # the search for the least memory ends above


@dataclass(frozen=True)
class DTypeDemand:
    """What the load needs with K and V in one dtype.

    Attributes
    ----------
    dtype : str
        Storage dtype of K and V.
    num_pages : int
        Pages of the pool; on each rank as many, of its own heads.
    kv_bytes : dict of int to int
        For each number of ranks, bytes of K and V on one of them.
    memory : dict of int to int
        For each number of ranks, the least memory of one GPU, in bytes.
    """

    dtype: str
    num_pages: int
    kv_bytes: dict[int, int]
    memory: dict[int, int]


@dataclass(frozen=True)
class GPUFit:
    """The smallest number of ranks at which a GPU holds the load, by KV dtype; None: none does."""

    gpu: GPU
    ranks: dict[str, int | None]


@dataclass(frozen=True)
class Demand:
    """What memory a load needs, and which GPUs have it.

    Attributes
    ----------
    model, setting, num_requests, length
        What was asked.
    by_dtype : tuple of DTypeDemand
        One for each KV dtype.
    fits : tuple of GPUFit
        One for each GPU, small ones first.
    """

    model: Model
    setting: Setting
    num_requests: int
    length: int
    by_dtype: tuple[DTypeDemand, ...]
    fits: tuple[GPUFit, ...]


def plan_demand(
    model: Model,
    setting: Setting,
    num_requests: int,
    length: int,
    *,
    dtypes: Sequence[str] = KV_DTYPES,
    ranks: Sequence[int] = RANKS,
    gpus: Sequence[GPU] | None = None,
) -> Demand:
    """Size the memory for a number of requests that share no prefix.

    Parameters
    ----------
    model : Model
        From `read_model`.
    setting : Setting
        Fraction, page size and context; its memory, ranks and cap are not looked at.
    num_requests, length : int
        Requests at once, and tokens of each, answer included.
    dtypes : sequence of str
        KV dtypes to compare.
    ranks : sequence of int
        Numbers of tensor-parallel ranks to try; those that do not divide the model are left out.
    gpus : sequence of GPU, optional
        GPUs to look at; by default all that are known, with their nominal memory.

    Raises
    ------
    SizingError
        Less than one request or token, or no number of ranks divides the model.
    """
    for name, value in (("requests", num_requests), ("length", length)):
        try:
            whole_number(value, name, 1, INT32_MAX)
        except (TypeError, ValueError) as error:
            raise SizingError(str(error)) from None
    possible = _possible_ranks(model, ranks)
    load = replace(setting, max_batch_size=num_requests, max_seq_len=length)
    rows = []
    for dtype in dtypes:
        kv_bytes, memory = {}, {}
        num_pages = num_requests * num_pages_for_length(length, setting.page_size)
        for tp_size in possible:
            per_token = model.layout(tp_size).bytes_per_token(dtype)
            kv_bytes[tp_size] = num_pages * setting.page_size * per_token
            if kv_bytes[tp_size] > MOST_BYTES:
                raise SizingError(
                    f"{num_requests:,} requests of {length:,} tokens take {kv_bytes[tp_size]:,} "
                    "bytes of K and V, more than any machine has: ask for less"
                )
            memory[tp_size] = _least_memory(model, replace(load, tp_size=tp_size), dtype)
        rows.append(DTypeDemand(dtype, num_pages, kv_bytes, memory))
    gpus = [known_gpu(name) for name in GPUS] if gpus is None else gpus
    fits = tuple(
        GPUFit(gpu, {row.dtype: _fewest_ranks(row, gpu.memory) for row in rows})
        for gpu in sorted(gpus, key=lambda gpu: (gpu.memory, gpu.name))
    )
    return Demand(model, setting, num_requests, length, tuple(rows), fits)


def _possible_ranks(model: Model, ranks: Sequence[int]) -> list[int]:
    possible, reasons = [], []
    for tp_size in ranks:
        try:
            model.layout(tp_size)
        except SizingError as error:
            reasons.append(error)
        else:
            possible.append(tp_size)
    if not possible:
        raise reasons[0]
    return possible


def _least_memory(model: Model, load: Setting, dtype: str) -> int:
    """The least memory whose budget holds the load: asked of the rule, never turned round."""
    num_pages = num_pages_for_length(load.max_seq_len or 1, load.page_size) * (
        load.max_batch_size or 1
    )

    def holds(total: int) -> bool:
        return budget_of(model, replace(load, total=total), dtype).num_pages == num_pages

    used = max(1, load.used(model))
    return bisect_left(range(sys.maxsize), True, lo=used, key=holds)


def _fewest_ranks(row: DTypeDemand, total: int) -> int | None:
    return next((tp_size for tp_size, least in row.memory.items() if least <= total), None)
