"""Attention over a paged cache in plain array code, for any device with an array namespace.

Simple and right, not fast: for each row of the batch it gathers the row's pages into dense
float32 keys and values, and multiplies. It allocates, and launches a dozen kernels a row, so it
cannot be captured in a graph. It is what a CUDA pool attends with where nothing better is
installed, and what better kernels are tested against.

16-bit floats and FP8 codes are widened from their bits, so that the namespace needs no arithmetic
in them: NumPy, and CuPy of any version, will do.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import numpy as np

from kvpool.kernels import fp8

Array = Any  # of one namespace

_NEGATIVE_INFINITY = np.float32(-np.inf)


def namespace_of(array: Array) -> Any:
    """The module that an array belongs to: NumPy for an ndarray, CuPy for a CuPy array."""
    return sys.modules[type(array).__module__.partition(".")[0]]


def paged_attention(
    q: Array,
    k_cache: Array,
    v_cache: Array,
    indptr: Any,
    indices: Array,
    lengths: Any,
    page_size: int,
    qo_indptr: Any = None,
    causal: bool = True,
    scale: float | None = None,
    out: Array | None = None,
    *,
    fp8_format: str | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> Array:
    """Attend with ragged queries over a paged cache layer.

    Parameters
    ----------
    q : array ``[nnz, num_q_heads, dim]``, float32, float16, bfloat16 or float64
        Queries of all rows, one after the other.
    k_cache, v_cache : array ``[total_slots, num_kv_heads, dim]``
        One layer of the cache, a whole number of pages; float32, float16, bfloat16, or uint8 with
        `fp8_format`.
    indptr : sequence of int ``[batch + 1]``, host
        Where each row starts in `indices`.
    indices : array int32
        Page ids of all rows, on the device.
    lengths : sequence of int ``[batch]``, host
        Positions of each row that can be read, its queries' own included.
    page_size : int
        Slots per page.
    qo_indptr : sequence of int ``[batch + 1]``, host, optional
        Where the queries of each row start in `q`. Default: one query per row.
    causal : bool
        Query i of the Lq of a row with length L sees positions up to and including L - Lq + i.
    scale : float, optional
        Factor of the scores. Default: ``dim ** -0.5``.
    out : array ``[nnz, num_q_heads, dim]``, optional
        Where to write the result.
    fp8_format : str, optional
        What the bytes of the caches are: ``"float8_e4m3fn"`` or ``"float8_e5m2"``.
    k_scale, v_scale : float
        What FP8 values are multiplied by.

    Returns
    -------
    array ``[nnz, num_q_heads, dim]``
        `out`, or a new array in the dtype of `q`. A query that sees no position gives zeros.
    """
    xp = namespace_of(q)
    nnz, num_q_heads, dim = q.shape
    num_kv_heads, v_dim = v_cache.shape[1:]
    group = num_q_heads // num_kv_heads
    if out is None:
        out = xp.empty((nnz, num_q_heads, v_dim), q.dtype)
    if qo_indptr is None:
        qo_indptr = range(len(lengths) + 1)
    factor = np.float32(dim**-0.5 if scale is None else scale)
    k_table = None if fp8_format is None else decoded(xp, fp8_format, k_scale)
    v_table = None if fp8_format is None else decoded(xp, fp8_format, v_scale)
    k_pages = k_cache.reshape(-1, page_size, num_kv_heads, dim)
    v_pages = v_cache.reshape(-1, page_size, num_kv_heads, v_dim)

    for row, length in enumerate(lengths):
        first, last = int(qo_indptr[row]), int(qo_indptr[row + 1])
        if first == last:
            continue
        length = int(length)
        pages = indices[int(indptr[row]) : int(indptr[row + 1])]
        k = _positions(xp, k_pages, pages, length, k_table)
        v = _positions(xp, v_pages, pages, length, v_table)
        queries = widened(xp, q[first:last]) * factor
        # [kv_heads, queries * group, dim]: the query heads of one KV head go through one product.
        queries = queries.reshape(last - first, num_kv_heads, group, dim).transpose(1, 0, 2, 3)
        scores = queries.reshape(num_kv_heads, -1, dim) @ k.transpose(1, 2, 0)
        if causal:
            scores = _masked(xp, scores, last - first, group, length)
        attended = _softmax(xp, scores) @ v.transpose(1, 0, 2)
        attended = attended.reshape(num_kv_heads, last - first, group, v_dim)
        attended = attended.transpose(1, 0, 2, 3).reshape(last - first, num_q_heads, v_dim)
        store(xp, out[first:last], attended)
    return out


def _positions(xp: Any, paged: Array, pages: Array, length: int, table: Array | None) -> Array:
    """The first `length` positions of some pages, float32 ``[length, heads, dim]``."""
    rows = bits(paged)[pages].reshape(-1, *paged.shape[2:])[:length]
    if table is not None:
        return table[rows.astype(np.int32)]
    return widened(xp, rows.view(paged.dtype))


def _masked(xp: Any, scores: Array, num_queries: int, group: int, length: int) -> Array:
    query = xp.arange(num_queries * group) // group
    sees_up_to = (length - num_queries) + query
    hidden = xp.arange(length)[None, :] > sees_up_to[:, None]
    return xp.where(hidden[None], _NEGATIVE_INFINITY, scores)


def _softmax(xp: Any, scores: Array) -> Array:
    """Softmax over the last axis, zeros where everything is masked or there is nothing."""
    if scores.shape[-1] == 0:
        return scores
    largest = scores.max(axis=-1, keepdims=True)
    # A row without any position has no largest score; 0 makes its weights exp(-inf) = 0.
    largest = xp.where(largest == _NEGATIVE_INFINITY, np.float32(0), largest)
    weights = xp.exp(scores - largest)
    total = weights.sum(axis=-1, keepdims=True)
    return weights / xp.where(total == 0, np.float32(1), total)


def bits(array: Array) -> Array:
    """The same bytes as unsigned integers."""
    return array.view(np.dtype(f"u{array.dtype.itemsize}"))


def widened(xp: Any, array: Array) -> Array:
    """Floats of any dtype as float32."""
    if array.dtype.name == "bfloat16":
        return (bits(array).astype(np.uint32) << np.uint32(16)).view(np.float32)
    return array.astype(np.float32)


def store(xp: Any, target: Array, values: Array) -> None:
    """Write float32 `values` to `target` in its dtype, to nearest, ties to even."""
    if target.dtype.name != "bfloat16":
        target[...] = values.astype(target.dtype)
        return
    word = bits(xp.ascontiguousarray(values))
    odd = (word >> np.uint32(16)) & np.uint32(1)
    rounded = (word + np.uint32(0x7FFF) + odd) >> np.uint32(16)
    # Rounding could carry a NaN to infinity, so it is cut and made quiet instead.
    quiet = (word >> np.uint32(16)) | np.uint32(0x0040)
    is_nan = (word & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    bits(target)[...] = xp.where(is_nan, quiet, rounded).astype(np.uint16)


def decoded(xp: Any, fp8_format: str, scale: float) -> Array:
    """The value of each of the 256 codes, times `scale`, float32 on the device."""
    with np.errstate(invalid="ignore", over="ignore"):
        return xp.asarray(_values_of_codes(fp8_format) * np.float32(scale))


@functools.cache
def _values_of_codes(fp8_format: str) -> np.ndarray[Any, Any]:
    decode = fp8.make_decode(fp8.FORMATS[fp8_format])
    return np.array([decode(np.uint8(code)) for code in range(256)], np.float32)
