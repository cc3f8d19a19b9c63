"""Attention over a paged cache on the CPU.

Pages are read in place, a tile of keys at a time, with a running (online) softmax in float32. A
tile is widened to float32 from any storage dtype. One *item* of work is a block of queries of one
row, with all query heads that share one KV head, so that each key is loaded and widened once for
all of them. Within an item the lanes of a vector are (query, head) pairs, here called *lanes*::

    scores  [keys, lanes]   =  K tile [keys, dim]  x  Q [dim, lanes]
    weights [keys, lanes]   =  exp2(scores - running maximum)
    result  [lanes, dim]   +=  weights transposed  x  V tile [keys, dim]

Neither K nor V is transposed, no sum runs across a vector, and both products are one routine,
`block_product`, that keeps a block of results in registers.

Items do not depend on the number of threads, and each is computed by one thread from start to end:
results are the same bits for any number of threads.
"""

import math
from typing import Any

import numpy as np

from kvpool.kernels.codes import codes_view
from kvpool.kernels.floats import bits_view, convert
from kvpool.kernels.jit import kernel
from kvpool.kernels.llvm import LANES, ROWS
from kvpool.kernels.threads import MAX_THREADS, available_cpus, run_shares
from kvpool.kernels.tiles import (
    REASSOCIATE,
    is_finite,
    load_tile,
    mask,
    product,
    round_up,
    weigh,
)

Array = np.ndarray[Any, Any]

# A multiple of ROWS, so that blocks of rows fit the scratch arrays. At head_dim 64 an item works
# on 140 KB, which stay in the second cache level.
KEYS_PER_TILE = 96
LANES_PER_ITEM = 96
# Waking a thread costs as much as this many multiply-adds.
MIN_WORK_PER_THREAD = 2_000_000


@kernel(fastmath=REASSOCIATE)
def _attend_item(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    pages: Any,
    page_size: Any,
    kv_head: Any,
    first_query: Any,
    num_queries: Any,
    first_visible: Any,
    visible_step: Any,
    scale: Any,
    k_scale: Any,
    v_scale: Any,
    out: Any,
) -> Any:
    """Attend with one block of queries and the heads of one group; see the top of the file.

    Query i of the block sees positions below ``first_visible + i * visible_step``.
    """
    dim, v_dim = k_cache.shape[2], v_cache.shape[2]
    group = q.shape[1] // k_cache.shape[1]
    num_lanes = num_queries * group
    # Lanes are columns of the scores and rows of the result: room for whole blocks of either.
    num_rows = round_up(num_lanes, ROWS)
    width = round_up(num_rows, LANES)
    v_width = round_up(v_dim, LANES)

    queries = np.zeros((dim, width), np.float32)
    keys = np.empty((KEYS_PER_TILE, dim), np.float32)
    values = np.zeros((KEYS_PER_TILE, v_width), np.float32)
    scores = np.empty((KEYS_PER_TILE, width), np.float32)
    result = np.zeros((num_rows, v_width), np.float32)
    peaks = np.full(width, -np.inf, np.float32)
    sums = np.zeros(width, np.float32)
    decay = np.empty(width, np.float32)
    shift = np.empty(width, np.float32)
    visible = np.empty(width, np.int64)

    last_visible = first_visible + (num_queries - 1) * visible_step
    # Lanes that only fill up the last vector see everything: it is finite work, thrown away.
    visible[:] = last_visible
    for i in range(num_queries):
        for g in range(group):
            lane = i * group + g
            visible[lane] = first_visible + i * visible_step
            for d in range(dim):
                value = convert(q[first_query + i, kv_head * group + g, d], np.float32(0.0))
                queries[d, lane] = value * scale

    for start in range(0, last_visible, KEYS_PER_TILE):
        end = min(start + KEYS_PER_TILE, last_visible)
        num_keys = end - start
        load_tile(keys, k_cache, kv_head, pages, page_size, start, end, k_scale)
        load_tile(values, v_cache, kv_head, pages, page_size, start, end, v_scale)
        product(scores, num_keys, keys, False, queries, dim, False)
        is_masked = end > first_visible
        if is_masked:
            mask(scores, num_keys, start, visible)
        weigh(scores, num_keys, peaks, sums, decay, shift)
        for lane in range(num_lanes):
            for d in range(v_width):
                result[lane, d] *= decay[lane]
        if not is_masked or is_finite(values, num_keys):
            product(result, num_lanes, scores, True, values, num_keys, True)
        else:
            # A weight of zero does not hide an infinity or NaN that lies behind the mask.
            for lane in range(num_lanes):
                for j in range(min(end, visible[lane]) - start):
                    for d in range(v_dim):
                        result[lane, d] += scores[j, lane] * values[j, d]

    for lane in range(num_lanes):
        i, g = first_query + lane // group, kv_head * group + lane % group
        total = sums[lane]
        for d in range(v_dim):
            value = np.float32(0.0) if visible[lane] <= 0 else result[lane, d] / total
            out[i, g, d] = convert(value, out[i, g, d])


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
    queries_per_item: Any,
    share: Any,
    num_shares: Any,
) -> Any:
    """Do every item whose number is `share` modulo `num_shares`."""
    num_kv_heads = k_cache.shape[1]
    item = 0
    for row in range(lengths.size):
        row_start, row_end = qo_indptr[row], qo_indptr[row + 1]
        hidden = lengths[row] - (row_end - row_start)
        pages = indices[indptr[row] : indptr[row + 1]]
        for first_query in range(row_start, row_end, queries_per_item):
            num_queries = min(queries_per_item, row_end - first_query)
            step = 1 if causal else 0
            first_visible = hidden + (first_query - row_start) + 1 if causal else lengths[row]
            for kv_head in range(num_kv_heads):
                if item % num_shares == share:
                    _attend_item(
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
    queries_per_item = max(1, LANES_PER_ITEM // group)
    if num_threads is None:
        work = 2 * dim * num_q_heads * int(np.dot(lengths, qo_indptr[1:] - qo_indptr[:-1]))
        num_threads = min(available_cpus(), work // MIN_WORK_PER_THREAD)
    num_items = (nnz // queries_per_item + batch_size) * num_kv_heads
    num_threads = max(1, min(num_threads, num_items, MAX_THREADS))

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
        queries_per_item,
    )
    run_shares(lambda share: _attend(*arguments, share, num_threads), num_threads)
    return out
