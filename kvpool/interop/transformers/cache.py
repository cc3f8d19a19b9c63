"""PoolCache: a Cache of transformers whose K and V lie in the pages of a pool."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from kvpool.errors import KVCacheStateError
from kvpool.interop.torch import Tensor
from kvpool.interop.transformers.batch import PoolBatch
from kvpool.interop.transformers.fetching import fetch_prefixes
from kvpool.interop.transformers.guest import Cache
from kvpool.interop.transformers.layers import PoolLayer
from kvpool.interop.transformers.leftovers import sweep
from kvpool.interop.transformers.models import check_model
from kvpool.interop.transformers.prompts import Prompts, host_array
from kvpool.interop.transformers.rows import BatchRows
from kvpool.interop.transformers.weights import check_weights
from kvpool.numbers import whole_number

if TYPE_CHECKING:
    from kvpool.pool import KVCachePool
    from kvpool.request import ExtraKey


class PoolCache(Cache):  # type: ignore[misc]
    """K and V of one batch of prompts in the pages of a pool, for ``model.generate``.

    Making it binds the prompts, and what the pool has of them already is its first content:
    `generate` computes the rest only. As a context manager it inserts what was computed when its
    block ends well, so that the next prompt that begins the same way finds it; after an exception
    it only gives its pages back, as does one that is dropped: if another thread drops it than the
    one that made the pool's last cache, its pages come back with the pool's next cache.

    ::

        with PoolCache(model, pool, input_ids, max_new_tokens=64) as cache:
            output = model.generate(input_ids, past_key_values=cache, max_new_tokens=64)

    Invariants: column ``c`` of a row is position ``c - pad`` of its request; between forwards all
    layers have the same columns; what is inserted was computed from exactly the tokens that it is
    inserted under (a hook on the model's decoder looks at what each forward is given).

    Parameters
    ----------
    model : transformers.PreTrainedModel
        A decoder for text, all of whose layers have full or sliding attention.
    pool : KVCachePool
        Of the model's layers, KV heads and head_dim, on its device. If its compute dtype is not
        the model's, K and V are converted, and if it is FP8 they are rounded.
    input_ids : torch.Tensor
        ``[batch, length]``, as for ``generate``.
    attention_mask : torch.Tensor, optional
        ``[batch, length]``, 0 where a row is padded, at the left. Padding is not stored. All rows
        go on from one column, so as much is reused as the row with the shortest match has.
    max_new_tokens : int
        Tokens to reserve pages for beyond the prompt. What goes beyond it takes pages as it comes,
        and may find none.
    rows_per_prompt : int
        Rows that ``generate`` will make of each prompt: its `num_beams` or
        `num_return_sequences`. By default they are made when it comes with them.
    extra_key : str, bytes, int or None
        Namespace: give one to each model, adapter or tenant that uses the same pool. A model with
        other weights than those that a namespace is for is refused.
    priority : int
        Of what will be inserted; lower is evicted first.
    prefetch_timeout_s : float
        If the pool has tiers: seconds to wait for what they have of the prompts; 0: not at all.

    Attributes
    ----------
    matched_lens : list of int
        Tokens of each prompt that the pool had.

    Raises
    ------
    KVCacheExhaustedError
        The pages cannot be had; then nothing is bound.
    ValueError
        A model or a batch that this cache cannot serve; the message says why.
    """

    def __init__(
        self,
        model: Any,
        pool: KVCachePool,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        *,
        max_new_tokens: int = 0,
        rows_per_prompt: int = 1,
        extra_key: ExtraKey = None,
        priority: int = 0,
        prefetch_timeout_s: float = 1.0,
    ) -> None:
        if pool.closed:
            raise KVCacheStateError("the pool is closed")
        check_model(model, pool)
        decoder = model.get_decoder()
        names = [*inspect.signature(decoder.forward).parameters]
        defaults = model.generation_config
        eos_token_ids = _ids(defaults.eos_token_id)
        # `generate` makes a mask of these where it is given none.
        pad_token_ids = _ids(defaults.pad_token_id) - eos_token_ids
        prompts = Prompts.of(input_ids, attention_mask, pad_token_ids)
        sweep(pool)
        check_weights(model, pool, extra_key)
        fetch_prefixes(pool, prompts.tokens, extra_key, prefetch_timeout_s)
        self._make_rows: Callable[[], BatchRows] = lambda: BatchRows(
            pool,
            prompts,
            whole_number(max_new_tokens, "max_new_tokens"),
            whole_number(rows_per_prompt, "rows_per_prompt", at_least=1),
            extra_key,
            priority,
        )
        self._batch = PoolBatch(pool, self._make_rows(), eos_token_ids)
        self.matched_lens: list[int] = self._batch.rows.matched_lens
        super().__init__(layers=[PoolLayer(self._batch, i) for i in range(pool.num_layers)])
        this = weakref.ref(self)

        def look(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> Any:
            mine = this()
            if mine is None:  # dropped without an end
                hook.remove()
            # Without kwargs: the hook comes or goes by another thread in this moment.
            if mine is None or kwargs is None:
                return None
            batch: PoolBatch = mine._batch
            if kwargs.get("cache", kwargs.get("past_key_values")) is not mine:
                return None
            kwargs.update(zip(names, args, strict=False))
            num_known = batch.begin(kwargs)
            for name in ("input_ids", "position_ids"):
                if num_known:
                    kwargs[name] = kwargs[name][:, num_known:]
            return (), kwargs

        self._hook = hook = decoder.register_forward_pre_hook(look, with_kwargs=True)

    def __enter__(self) -> PoolCache:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.finish()
        else:
            self.close()

    def __repr__(self) -> str:
        rows = self._batch.rows
        state = "closed" if self._batch.is_closed else f"rows={len(rows)}"
        return f"PoolCache({state}, columns={self.get_seq_length()})"

    def __reduce__(self) -> str:
        raise TypeError(
            "a PoolCache is not copied: make one for each prompt, they share what they have in "
            "common through the pool"
        )

    # ---- reading it

    @property
    def pool(self) -> KVCachePool:
        """The pool."""
        return self._batch.pool

    @property
    def request_ids(self) -> list[int]:
        """Requests of the rows, in their order; empty when it is closed."""
        return [*self._batch.rows.request_ids]

    @property
    def num_forwarded(self) -> int:
        """Tokens that the model has computed with this cache, padding and beams included."""
        return self._batch.num_forwarded

    @property
    def is_croppable(self) -> bool:
        """Whether `crop` puts the cache back as it was."""
        return True

    # ---- what transformers calls

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Have row ``i`` go on from row ``beam_idx[i]``, by forks of its request."""
        self._batch.select(host_array(beam_idx).tolist())

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows of `indices`, int or bool ``[n]``, in this order."""
        found = host_array(indices)
        self._batch.select((found.nonzero()[0] if found.dtype == bool else found).tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Have `repeats` rows for each row, side by side."""
        self._batch.repeat(repeats)

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the last ``-tokens_to_remove`` columns, which must have been generated."""
        if tokens_to_remove > 0:
            raise ValueError(
                f"crop expects minus the number of tokens to take back, got {tokens_to_remove}"
            )
        self._batch.crop(-tokens_to_remove)

    def reset(self) -> None:
        """Give back what the rows hold and bind the prompts again; nothing is inserted."""
        self._batch.restart(self._make_rows)
        self.matched_lens = self._batch.rows.matched_lens

    def offload(self, layer_idx: int, only_non_sliding: bool = True) -> None:
        """Not possible: pages stay where the pool is."""
        raise NotImplementedError("pages stay on the device of the pool: make the pool on 'cpu'")

    prefetch = offload

    def early_initialization(self, *args: Any, **options: Any) -> None:
        """Nothing to do: the pool has its memory already."""

    # ---- the end

    def finish(self) -> int:
        """Insert what was computed, and end; the block of a ``with`` does it.

        Each row is inserted up to the first end of text that was generated. Once it is finished,
        or closed, this does nothing.

        Returns
        -------
        int
            Tokens newly inserted.
        """
        try:
            return self._batch.finish()
        finally:
            self.close()

    def close(self) -> None:
        """Give the pages back without inserting anything, and leave the model alone."""
        self._hook.remove()
        self._batch.close()


def _ids(given: int | Iterable[int] | None) -> set[int]:
    """Token ids of a generation config: none, one, or several."""
    if given is None:
        return set()
    return {given} if isinstance(given, int) else {int(each) for each in given}
