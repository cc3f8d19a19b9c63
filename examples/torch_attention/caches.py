"""Three ways to attend: over the pages of a pool, over gathered slots of it, without a cache."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from kvpool import KVCachePool
from kvpool.attention import PagedAttention
from kvpool.interop.torch import pool_tensors, tensor_of


class PagedCache:
    """K and V go into the pool, and attention reads its pages: FlashInfer on a GPU, numba here.

    Parameters
    ----------
    pool : KVCachePool
        The pool.
    request_ids, starts, seqlens : list of int
        Rows of the step: the position of each row's first new token, and their number.
    """

    def __init__(
        self, pool: KVCachePool, request_ids: list[int], starts: list[int], seqlens: list[int]
    ) -> None:
        self._starts, self._qo_indptr = starts, [0]
        for seqlen in seqlens:
            self._qo_indptr.append(self._qo_indptr[-1] + seqlen)
        lengths = [start + seqlen for start, seqlen in zip(starts, seqlens, strict=True)]
        # Once a step, for all layers.
        self._step = pool.activate_step(request_ids)
        self._slots = self._step.window_slot_indices(starts, seqlens)
        self._prepare(pool, lengths)

    def _prepare(self, pool: KVCachePool, lengths: list[int]) -> None:
        table = self._step.page_table(lengths)
        self._attention = PagedAttention(pool, table, qo_indptr=self._qo_indptr)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Write K and V of the new tokens, then attend over all tokens so far."""
        self._step.put(layer, self._starts, k, v, qo_indptr=self._qo_indptr, slots=self._slots)
        return self._attend(layer, q)

    def _attend(self, layer: int, q: Tensor) -> Tensor:
        found: Tensor = self._attention.run(layer, q)
        return found


class GatheredCache(PagedCache):
    """The same with torch alone: each row's K and V are gathered by their slots for torch's SDPA.

    It copies all that it reads, so it is no way to serve; but any torch code can read a pool so.
    """

    def _prepare(self, pool: KVCachePool, lengths: list[int]) -> None:
        self._tensors = pool_tensors(pool)
        self._scales = [pool.layer_scales(layer) for layer in range(pool.num_layers)]
        slots = tensor_of(self._step.slot_indices(max(lengths)))
        # One line of slots a row; short rows repeat their last slot, which is cut off.
        rows = zip(slots.view(len(lengths), -1), lengths, strict=True)
        self._row_slots = [row_slots[:length] for row_slots, length in rows]

    def _attend(self, layer: int, q: Tensor) -> Tensor:
        k_scale, v_scale = self._scales[layer]  # 1.0 unless the pool is FP8
        out = torch.empty_like(q)
        for i, slots in enumerate(self._row_slots):
            k = gather(self._tensors.key_layer(layer), slots).to(q.dtype) * k_scale
            v = gather(self._tensors.value_layer(layer), slots).to(q.dtype) * v_scale
            row = slice(self._qo_indptr[i], self._qo_indptr[i + 1])
            out[row] = causal_attention(q[row], k, v)
        return out


def no_cache(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention of one whole sequence, computed from the start: what a cache must not change."""
    return causal_attention(q, k, v)


def gather(cache: Tensor, slots: Tensor) -> Tensor:
    """Rows of a cache by their slots, ``[n, num_kv_heads, head_dim]``."""
    if cache.element_size() == 1:  # torch indexes FP8 on some devices only, bytes on all of them
        return cache.view(torch.uint8)[slots].view(cache.dtype)
    return cache[slots]


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """SDPA of one row: the last query sees all keys, the one before it all but one, and so on."""
    num_queries, num_keys = len(q), len(k)
    seen = torch.ones(num_queries, num_keys, dtype=torch.bool, device=q.device)
    seen = seen.tril(num_keys - num_queries)
    group = q.shape[1] // k.shape[1]
    q, k, v = (heads.transpose(0, 1) for heads in (q, k, v))
    k, v = k.repeat_interleave(group, dim=0), v.repeat_interleave(group, dim=0)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen).transpose(0, 1)


def on_torch_stream(device: torch.device) -> AbstractContextManager[Any]:
    """A context in which CuPy, and so a pool, works on torch's current stream of a device."""
    if device.type != "cuda":
        return nullcontext()
    import cupy

    stream: AbstractContextManager[Any] = cupy.cuda.ExternalStream(
        torch.cuda.current_stream(device).cuda_stream
    )
    return stream
