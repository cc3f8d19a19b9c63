"""Dense attention in float64 on the host, from the bytes that a pool stores.

Pages come from `RequestInfo`, bytes from `key_layer` and `value_layer`, values from ml_dtypes: of
kvpool's kernels, page tables and attention nothing is used. Beside the result it gives what an
honest kernel may be away from it, element by element.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np

from bench.gpu.report import download
from kvpool.dtypes import FP8_DTYPES

# Roundings of a kernel, relative: probabilities are rounded before they meet V, and the result is
# rounded once. Tensor cores take both as bfloat16: 8 bits, so half a unit is 2**-8. The plain
# array code is float32 throughout, where a sum of some hundred terms loses 7 of 24 bits at most.
HALF_UNITS = {"bfloat16": 2.0**-8, "float32": 2.0**-17}
# For the float32 that is in all of them: sums, exponentials, and parts that are merged.
SLACK = 1.25


def stored(pool, layer):
    """K and V of all slots of a layer, float64, with their scales."""
    values = np.dtype(getattr(ml_dtypes, pool.dtype, pool.dtype))
    caches = pool.key_layer(layer), pool.value_layer(layer)
    return [
        download(cache).view(values).astype(np.float64) * float(scale)
        for cache, scale in zip(caches, pool.layer_scales(layer), strict=True)
    ]


def slots_of(pool, request, length):
    """The slots of the first `length` positions of a request."""
    positions, page_ids = np.arange(length), np.asarray(pool.request(request).page_ids)
    return page_ids[positions // pool.page_size] * pool.page_size + positions % pool.page_size


def attend(q, k, v, scale, causal=True):
    """Attention of one row of a batch, and the sum of ``p * |v|`` in place of ``p * v``.

    Parameters
    ----------
    q : ndarray ``[num_queries, num_q_heads, head_dim]``, float64
        Queries at the last positions.
    k, v : ndarray ``[length, num_kv_heads, head_dim]``, float64
        All positions.
    scale : float
        Of the scores.
    causal : bool
        Query i of n sees the positions up to ``length - n + i``.

    Returns
    -------
    tuple of ndarray
        Both ``[num_queries, num_q_heads, head_dim]``.
    """
    group = q.shape[1] // k.shape[1]
    q, k, v = (array.swapaxes(0, 1) for array in (q, k, v))
    k, v = np.repeat(k, group, axis=0), np.repeat(v, group, axis=0)
    scores = q @ k.swapaxes(1, 2) * scale
    if causal:
        num_queries, length = scores.shape[1:]
        last = length - num_queries + np.arange(num_queries)
        scores[:, np.arange(length) > last[:, None]] = -np.inf
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return (weights @ v).swapaxes(0, 1), (weights @ np.abs(v)).swapaxes(0, 1)


def error(pool, caches, requests, lengths, q, found, qo_indptr=None):
    """How far `found` is from the reference, the worst element, in units of its tolerance.

    Parameters
    ----------
    pool : KVCachePool
        Whose pages are read.
    caches : tuple of ndarray
        K and V of a layer, from `stored`.
    requests, lengths : sequence of int
        The batch, and the positions that each row reads.
    q, found : ndarray ``[nnz, num_q_heads, head_dim]``
        On the host, in the dtype that the kernel took and gave.
    qo_indptr : sequence of int, optional
        CSR of each row's queries. Default: one query a row.
    """
    half_unit = HALF_UNITS[found.dtype.name]
    # The scale of V multiplies the rounded result, which is rounded once more.
    roundings = 2 if pool.dtype in FP8_DTYPES else 1
    if qo_indptr is None:
        qo_indptr = range(len(lengths) + 1)
    worst = 0.0
    for row, (request, length) in enumerate(zip(requests, lengths, strict=True)):
        queries = slice(qo_indptr[row], qo_indptr[row + 1])
        slots = slots_of(pool, request, int(length))
        k, v = (cache[slots] for cache in caches)
        expected, most = attend(q[queries].astype(np.float64), k, v, pool.head_dim**-0.5)
        tolerance = SLACK * half_unit * (roundings * np.abs(expected) + most)
        away = np.abs(found[queries].astype(np.float64) - expected)
        # A NaN is infinitely far away, not nowhere.
        away = np.where(np.isnan(away), np.inf, away)
        worst = max(worst, float((away / np.maximum(tolerance, 1e-30)).max(initial=0.0)))
    return worst


def same_bytes(pool, other):
    """How many elements of K and V, on all layers, differ between two pools."""
    differing = 0
    for name in ("key_cache", "value_cache"):
        differing += int((download(getattr(pool, name)) != download(getattr(other, name))).sum())
    return differing


def snapshot(pool):
    """The bytes of K and V on all layers."""
    return [download(cache) for cache in (pool.key_cache, pool.value_cache)]
