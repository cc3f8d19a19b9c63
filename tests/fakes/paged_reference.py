"""Attention in float64 over pages, as the stand-in for FlashInfer computes it."""

import numpy as np


def attend(plan, indptr, indices, last_page_len, q, keys, values, out):
    """Write the attention of all rows to a tensor.

    The page table is what the device has when a kernel runs; `plan` is what the host planned for.
    `keys` and `values` are a cache and its scale.
    """
    for row, planned_length in enumerate(plan.lengths):
        pages = indices[indptr[row] : indptr[row + 1]]
        length = (len(pages) - 1) * plan.page_size + last_page_len[row] if len(pages) else 0
        assert length == planned_length, f"row {row} was planned for {planned_length} positions"
        own = slice(int(plan.qo_indptr[row]), int(plan.qo_indptr[row + 1]))
        k, v = (positions(plan, *cache, pages, length) for cache in (keys, values))
        out.host[own] = attend_row(plan, q[own], k, v)


def positions(plan, cache, scale, pages, length):
    """The values of one row, ``[length, num_q_heads, head_dim]``."""
    rows = cache[pages].numpy_float().reshape(-1, plan.kv_heads, plan.dim)[:length] * scale
    return np.repeat(rows, plan.heads // plan.kv_heads, axis=1)


def attend_row(plan, q, k, v):
    """The queries of one row over its positions; zeros where there are none."""
    if not len(k):
        return np.zeros_like(q)
    scores = np.einsum("qhd,khd->hqk", q, k) * plan.sm_scale
    if plan.causal:
        seen = np.arange(len(k)) <= np.arange(len(k) - len(q), len(k))[:, None]
        scores = np.where(seen, scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return np.einsum("hqk,khd->qhd", weights, v)
