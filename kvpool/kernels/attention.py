"""Attention over a paged cache on the CPU.

Pages are read in place, with a running (online) softmax in float32. Work is cut into *items*:

- a chunk of keys of a row that has one query, where few heads share a KV head
  (`kvpool.kernels.attention_few`);
- else a block of queries of one row, with the heads of one KV head
  (`kvpool.kernels.attention_wide`).

Items do not depend on the number of threads, each is computed by one thread from start to end, and
those of one query are joined in their order: results are the same bits for any number of threads.
"""

import math
from typing import Any

import numpy as np

from kvpool.kernels.attention_few import KEYS_PER_CHUNK, MAX_GROUP, attend_chunk, join_parts
from kvpool.kernels.attention_wide import LANES_PER_ITEM, attend_block
from kvpool.kernels.codes import codes_view
from kvpool.kernels.floats import bits_view
from kvpool.kernels.jit import kernel
from kvpool.kernels.products import FEW, LANES
from kvpool.kernels.threads import SHARES_PER_THREAD, available_cpus, run_shares
from kvpool.kernels.tiles import round_up

Array = np.ndarray[Any, Any]

# Waking a thread costs as much as this many multiply-adds.
MIN_WORK_PER_THREAD = 2_000_000


@kernel()
def _attend(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    indptr: Any,
    indices: Any,
    lengths: Any,
    page_size: Any,
    qo_indptr: Any,
    causal: Any,
    scale: Any,
    k_scale: Any,
    v_scale: Any,
    out: Any,
    is_few: Any,
    parts_indptr: Any,
    results: Any,
    peaks: Any,
    sums: Any,
    share: Any,
    num_shares: Any,
) -> Any:
    """Do every item whose number is `share` modulo `num_shares`."""
    num_kv_heads = k_cache.shape[1]
    queries_per_item = max(1, LANES_PER_ITEM // (q.shape[1] // num_kv_heads))
    item = 0
    for row in range(lengths.size):
        row_start, row_end = qo_indptr[row], qo_indptr[row + 1]
        hidden = lengths[row] - (row_end - row_start)
        pages = indices[indptr[row] : indptr[row + 1]]
        if is_few[row]:
            for part in range(parts_indptr[row], parts_indptr[row + 1]):
                if item % num_shares == share:
                    start = (part - parts_indptr[row]) * KEYS_PER_CHUNK
                    attend_chunk(
                        q[row_start],
                        k_cache,
                        v_cache,
                        pages,
                        page_size,
                        start,
                        min(start + KEYS_PER_CHUNK, lengths[row]),
                        scale,
                        k_scale,
                        v_scale,
                        results[part],
                        peaks[part],
                        sums[part],
                    )
                item += 1
            continue
        for first_query in range(row_start, row_end, queries_per_item):
            num_queries = min(queries_per_item, row_end - first_query)
            step = 1 if causal else 0
            first_visible = hidden + (first_query - row_start) + 1 if causal else lengths[row]
            for kv_head in range(num_kv_heads):
                if item % num_shares == share:
                    attend_block(
                        q,
                        k_cache,
                        v_cache,
                        pages,
                        page_size,
                        kv_head,
                        first_query,
                        num_queries,
                        first_visible,
                        step,
                        scale,
                        k_scale,
                        v_scale,
                        out,
                    )
                item += 1


@kernel()
def _join(
    results: Any,
    peaks: Any,
    sums: Any,
    is_few: Any,
    parts_indptr: Any,
    qo_indptr: Any,
    group: Any,
    out: Any,
) -> Any:
    for row in range(is_few.size):
        if is_few[row]:
            first, end = parts_indptr[row], parts_indptr[row + 1]
            join_parts(
                results[first:end], peaks[first:end], sums[first:end], group, out[qo_indptr[row]]
            )


def paged_attention(
    q: Array,
    k_cache: Array,
    v_cache: Array,
    indptr: Array,
    indices: Array,
    lengths: Array,
    page_size: int,
    qo_indptr: Array | None = None,
    causal: bool = True,
    scale: float | None = None,
    out: Array | None = None,
    *,
    num_threads: int | None = None,
    fp8_format: str | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> Array:
    """Attend with ragged queries over a paged cache layer.

    Parameters
    ----------
    q : ndarray ``[nnz, num_q_heads, dim]``, float32, float16 or bfloat16
        Queries of all rows, one after the other, with any strides.
    k_cache, v_cache : ndarray ``[total_slots, num_kv_heads, dim]``
        One layer of the cache, C-contiguous, float32, float16 or bfloat16, or uint8 if it holds
        FP8 codes; `num_q_heads` is a multiple of `num_kv_heads`. V may have a dim of its own.
    indptr : ndarray ``[batch + 1]``, integer
        Where each row starts in `indices`.
    indices : ndarray int32
        Page ids of all rows; position p of a row is slot ``page * page_size + p % page_size``.
    lengths : ndarray ``[batch]``, integer
        Positions of each row that can be read, its queries' own included. Nothing past them is.
    page_size : int
        Slots per page.
    qo_indptr : ndarray ``[batch + 1]``, integer, optional
        Where the queries of each row start in `q`. Default: one query per row.
    causal : bool
        Query i of the Lq of a row with length L sees positions up to and including L - Lq + i.
    scale : float, optional
        Factor of the scores. Default: ``dim ** -0.5``.
    out : ndarray ``[nnz, num_q_heads, dim]``, optional
        Where to write the result, in any of the dtypes above, with any strides.
    num_threads : int, optional
        Threads to split the work over. Default: as many as pay off on the available CPUs. The
        result does not depend on it.
    fp8_format : str, optional
        Format of the codes in uint8 caches, ``"float8_e4m3fn"`` or ``"float8_e5m2"``.
    k_scale, v_scale : float
        What decoded K and V are multiplied by; without `fp8_format` they are not used.

    Returns
    -------
    ndarray ``[nnz, num_q_heads, dim]``
        `out`, or a new array in the dtype of `q`. A query that sees no position gives zeros.
    """
    batch_size = len(lengths)
    nnz, num_q_heads, dim = q.shape
    num_kv_heads, v_dim = v_cache.shape[1:]
    assert num_q_heads % num_kv_heads == 0
    assert (fp8_format is not None) == (k_cache.dtype == np.uint8) == (v_cache.dtype == np.uint8)
    if out is None:
        out = np.empty((nnz, num_q_heads, v_dim), q.dtype)
    if nnz == 0 or batch_size == 0:
        return out
    if qo_indptr is None:
        qo_indptr = np.arange(batch_size + 1)
    # One integer type each, so that a first call with another one compiles nothing.
    lengths = np.asarray(lengths, np.int64)
    qo_indptr = np.asarray(qo_indptr, np.int64)
    assert len(qo_indptr) == len(indptr) == batch_size + 1
    assert qo_indptr[-1] == nnz

    group = num_q_heads // num_kv_heads
    num_queries = qo_indptr[1:] - qo_indptr[:-1]
    is_few = (num_queries == 1) & (group <= MAX_GROUP)
    parts_indptr = np.zeros(batch_size + 1, np.int64)
    np.cumsum(is_few * -(-lengths // KEYS_PER_CHUNK), out=parts_indptr[1:])
    shape = int(parts_indptr[-1]), num_kv_heads * round_up(group, FEW)
    parts = (
        np.empty((*shape, round_up(v_dim, LANES)), np.float32),
        np.empty(shape, np.float32),
        np.empty(shape, np.float32),
    )
    if num_threads is None:
        work = 2 * dim * num_q_heads * int(np.dot(lengths, num_queries))
        num_threads = min(available_cpus(), work // MIN_WORK_PER_THREAD)
    most_items = shape[0] + (nnz * group // LANES_PER_ITEM + batch_size) * num_kv_heads
    num_shares = min(num_threads * SHARES_PER_THREAD, most_items) if num_threads > 1 else 1

    factor = np.float32((dim**-0.5 if scale is None else scale) * math.log2(math.e))
    arguments = (
        bits_view(q),
        codes_view(k_cache, fp8_format) if fp8_format else bits_view(k_cache),
        codes_view(v_cache, fp8_format) if fp8_format else bits_view(v_cache),
        np.asarray(indptr, np.int32),
        np.asarray(indices, np.int32),
        lengths,
        page_size,
        qo_indptr,
        bool(causal),
        factor,
        np.float32(k_scale),
        np.float32(v_scale),
        bits_view(out),
        is_few,
        parts_indptr,
        *parts,
    )
    run_shares(lambda share: _attend(*arguments, share, num_shares), num_shares, num_threads)
    if shape[0] or is_few.any():
        _join(*parts, is_few, parts_indptr, qo_indptr, group, bits_view(out))
    return out
