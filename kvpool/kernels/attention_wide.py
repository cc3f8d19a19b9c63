"""Attention of many lanes at once: a block of queries, and all heads of one KV head.

A lane is one (query, head) pair. A tile of keys is widened to float32 and loaded once for all
lanes, which are columns of the scores and rows of the result::

    scores  [keys, lanes]   =  K tile [keys, dim]  x  Q [dim, lanes]
    weights [keys, lanes]   =  exp2(scores - running maximum)
    result  [lanes, dim]   +=  weights transposed  x  V tile [keys, dim]

Neither K nor V is transposed, and no sum runs across a vector.
"""

from typing import Any

import numpy as np

from kvpool.kernels.floats import convert
from kvpool.kernels.jit import kernel
from kvpool.kernels.products import LANES, ROWS
from kvpool.kernels.tiles import (
    REASSOCIATE,
    is_finite,
    load_tile,
    mask,
    product,
    round_up,
    weigh,
)

# A multiple of ROWS, so that blocks of rows fit the scratch arrays. At head_dim 64 an item works
# on 140 KB, which stay in the second cache level.
KEYS_PER_TILE = 96
LANES_PER_ITEM = 96


@kernel(fastmath=REASSOCIATE)
def attend_block(
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
    """Attend with one block of queries and the heads of one group.

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
