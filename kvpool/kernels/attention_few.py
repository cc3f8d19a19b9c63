"""Attention of one query a row: all heads of a chunk of keys, and what joins the chunks.

A decode step reads each key for the few heads of one group, so that loading it is what costs. A
vector is a part of one key here, and not of many lanes: no lane is there only to fill it up::

    scores  [heads, keys]   =  Q [heads, dim]  x  K [keys, dim] transposed
    weights [heads, keys]   =  exp2(scores - running maximum)
    result  [heads, dim]   +=  weights  x  V [keys, dim]

Keys of one chunk are read block by block, all KV heads of a block before the next one: that is the
order in which they lie in memory. float32 is read in place; other dtypes are widened to a tile
that stays in the first cache level.

Long rows are split into chunks, so that threads share one row too. A *part* is the result of a
chunk before it is divided by its sum of weights; parts are joined in the order of the chunks.
"""

from typing import Any

import numpy as np

from kvpool.kernels.floats import convert
from kvpool.kernels.jit import kernel
from kvpool.kernels.llvm import head_rows
from kvpool.kernels.products import FEW, LANES, block_dots, few_rows_product, few_rows_thin_product
from kvpool.kernels.tiles import REASSOCIATE, exp2, load_tile, prefetch_ahead, round_up

# Up to here a group of heads is few: past it, `kvpool.kernels.attention_wide` wins.
MAX_GROUP = 16
KEYS_PER_CHUNK = 512
# K and V of a block are read head by head while those of the next block are on their way: both
# should fit the second cache level.
KEYS_PER_BLOCK = 64
KEYS_PER_TILE = 32


@kernel()
def _is_in_place(cache: Any, page_size: Any) -> Any:
    """Whether rows are whole vectors of float32, and pages whole blocks of keys."""
    return cache.itemsize == 4 and cache.shape[2] % LANES == 0 and page_size % FEW == 0


@kernel()
def _rows_at(
    cache: Any,
    head: Any,
    pages: Any,
    page_size: Any,
    position: Any,
    end: Any,
    scale: Any,
    tile: Any,
) -> Any:
    """Return rows of `cache` from `position` on, and the end of those that are there."""
    if _is_in_place(cache, page_size):
        page = position // page_size
        slot = np.int64(pages[page]) * page_size + position - page * page_size
        end = min(end, (page + 1) * page_size)
        prefetch_ahead(cache, head, pages, page_size, position, end, KEYS_PER_BLOCK)
        return head_rows(cache, slot, head), end
    end = min(end, position + KEYS_PER_TILE)
    prefetch_ahead(cache, head, pages, page_size, position, end, KEYS_PER_BLOCK)
    load_tile(tile, cache, head, pages, page_size, position, end, scale)
    return tile[:, :], end


@kernel()
def _ordered(word: Any) -> Any:
    """Return bits of a float32 as an int32 of the same order, and back."""
    return np.int32(word ^ np.int32(np.int32(word >> np.int32(31)) & np.int32(0x7FFFFFFF)))


@kernel(fastmath=REASSOCIATE)
def _weigh(
    scores: Any, num_keys: Any, lane: Any, head: Any, peaks: Any, sums: Any, result: Any
) -> Any:
    """Turn scores of one lane into weights, and scale what it has so far to their peak."""
    # As integers of the same order: LLVM does not vectorise the maximum of floats that may be NaN.
    highest = np.int32(-(2**31))
    for j in range(num_keys):
        highest = max(highest, _ordered(np.float32(scores[lane, j]).view(np.int32)))
    peak = np.int32(_ordered(highest)).view(np.float32)
    before = peaks[head]
    peak = max(before, peak)
    # A head that has seen nothing yet must not subtract infinity from infinity.
    shift = peak if peak > np.float32(-np.inf) else np.float32(0.0)
    decay = exp2(before - shift)
    total = np.float32(0.0)
    for j in range(num_keys):
        weight = exp2(scores[lane, j] - shift)
        scores[lane, j] = weight
        total += weight
    peaks[head] = peak
    sums[head] = sums[head] * decay + total
    for d in range(result.shape[1]):
        result[head, d] *= decay


@kernel()
def _add_values(
    result: Any,
    first_head: Any,
    num_lanes: Any,
    scores: Any,
    first_key: Any,
    rows: Any,
    num_keys: Any,
) -> Any:
    """Add the weights from `first_key` on, times `rows`, to the results of one group."""
    for row in range(0, num_lanes, FEW):
        target = first_head + row
        whole = result.shape[1] // (FEW * LANES) * (FEW * LANES)
        for lane in range(0, whole, FEW * LANES):
            few_rows_product(
                result, target, lane, scores, row, first_key, False, rows, num_keys, True
            )
        for lane in range(whole, result.shape[1], LANES):
            few_rows_thin_product(
                result, target, lane, scores, row, first_key, False, rows, num_keys, True
            )


@kernel()
def attend_chunk(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    pages: Any,
    page_size: Any,
    start: Any,
    end: Any,
    scale: Any,
    k_scale: Any,
    v_scale: Any,
    result: Any,
    peaks: Any,
    sums: Any,
) -> Any:
    """Attend with `q` ``[heads, dim]`` to positions [start, end), and make a part.

    That is ``result [heads, v_width]``, ``peaks [heads]`` and ``sums [heads]``, whose heads are in
    groups of a multiple of FEW; the last ones of a group only fill it up.
    """
    dim, num_kv_heads = k_cache.shape[2], k_cache.shape[1]
    group = q.shape[0] // num_kv_heads
    num_lanes = round_up(group, FEW)
    queries = np.zeros((num_kv_heads * num_lanes, round_up(dim, LANES)), np.float32)
    k_tile = np.zeros((KEYS_PER_TILE, queries.shape[1]), np.float32)
    v_tile = np.zeros((KEYS_PER_TILE, result.shape[1]), np.float32)
    scores = np.empty((num_lanes, KEYS_PER_BLOCK), np.float32)
    for head in range(q.shape[0]):
        row = head // group * num_lanes + head % group
        for d in range(dim):
            queries[row, d] = convert(q[head, d], np.float32(0.0)) * scale
    result[:] = 0
    peaks[:] = -np.inf
    sums[:] = 0
    for first in range(start, end, KEYS_PER_BLOCK):
        last = min(first + KEYS_PER_BLOCK, end)
        for head in range(num_kv_heads):
            first_lane = head * num_lanes
            position = first
            while position < last:
                rows, rows_end = _rows_at(
                    k_cache, head, pages, page_size, position, last, k_scale, k_tile
                )
                for j in range(0, rows_end - position, FEW):
                    for lane in range(0, num_lanes, FEW):
                        block_dots(
                            scores, lane, position - first + j, queries, first_lane + lane, rows, j
                        )
                position = rows_end
            for lane in range(group):
                _weigh(scores, last - first, lane, first_lane + lane, peaks, sums, result)
            position = first
            while position < last:
                rows, rows_end = _rows_at(
                    v_cache, head, pages, page_size, position, last, v_scale, v_tile
                )
                _add_values(
                    result,
                    first_lane,
                    num_lanes,
                    scores,
                    position - first,
                    rows,
                    rows_end - position,
                )
                position = rows_end


@kernel(fastmath=REASSOCIATE)
def join_parts(results: Any, peaks: Any, sums: Any, group: Any, out: Any) -> Any:
    """Write the result of one query to `out` ``[heads, v_dim]``; without parts, zeros."""
    num_parts, _, v_width = results.shape
    total = np.empty(v_width, np.float32)
    for head in range(out.shape[0]):
        lane = head // group * round_up(group, FEW) + head % group
        peak = np.float32(-np.inf)
        for part in range(num_parts):
            peak = max(peak, peaks[part, lane])
        shift = peak if peak > np.float32(-np.inf) else np.float32(0.0)
        weights = np.float32(0.0)
        total[:] = 0
        for part in range(num_parts):
            factor = exp2(peaks[part, lane] - shift)
            weights += factor * sums[part, lane]
            for d in range(v_width):
                total[d] += factor * results[part, lane, d]
        for d in range(out.shape[1]):
            value = total[d] / weights if num_parts > 0 else np.float32(0.0)
            out[head, d] = convert(value, out[head, d])
