"""Round trips through tiny pools, each for a process of its own: what is installed is tried."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvpool.attention import PagedAttention
from kvpool.interop.torch import pool_tensors
from kvpool.pool import KVCachePool

# A CPU kernel takes seconds to compile, once a machine: one dtype shows whether that works.
_CPU_DTYPES = ("float32",)
_CUDA_DTYPES = ("float32", "float16", "bfloat16", "float8_e4m3fn")
_NUM_HEADS, _HEAD_DIM, _PAGE_SIZE = 2, 64, 16
_PROMPT = range(1, 41)  # two pages and a half


def cpu_pool() -> dict[str, Any]:
    """Put, cache, find and get on the CPU; returns ``seconds``, the first time with compiling."""
    start = time.perf_counter()
    for dtype in _CPU_DTYPES:
        _round_trip("cpu", dtype)
    return {"seconds": time.perf_counter() - start}


def cuda_pool() -> dict[str, Any]:
    """The same on the current GPU, and attention in array code; returns ``seconds``."""
    start = time.perf_counter()
    for dtype in _CUDA_DTYPES:
        _round_trip("cuda", dtype)
    with _pool("cuda", "float32") as pool:
        _attend(pool, _written(pool))
    return {"seconds": time.perf_counter() - start}


def torch_border() -> dict[str, Any]:
    """Write through a tensor over a CPU pool, and read its array; returns ``seconds``."""
    start = time.perf_counter()
    with _pool("cpu", "bfloat16") as pool:
        rows, _ = _rows(_PAGE_SIZE)
        tensor = pool_tensors(pool).key_layer(0)
        tensor[:_PAGE_SIZE] = tensor.new_tensor(rows.tolist())
        _compare("K written through a tensor", pool.key_layer(0)[:_PAGE_SIZE], rows)
    return {"seconds": time.perf_counter() - start}


def flashinfer_attention() -> dict[str, Any]:
    """Decode by FlashInfer on the first GPU; its kernels are compiled if they never were.

    Returns
    -------
    dict
        ``seconds``, and ``backend``: who attended.
    """
    start = time.perf_counter()
    with _pool("cuda", "bfloat16") as pool:
        backend = _attend(pool, _written(pool))
    return {"seconds": time.perf_counter() - start, "backend": backend}


def _pool(device: str, dtype: str) -> KVCachePool:
    return KVCachePool(
        1, 8 * _PAGE_SIZE, _NUM_HEADS, _HEAD_DIM, page_size=_PAGE_SIZE, device=device, dtype=dtype
    )


def _rows(num_tokens: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """K and V ``[num_tokens, heads, dim]`` of small whole numbers, which every dtype holds."""
    rng = np.random.default_rng(0)
    shape = (2, num_tokens, _NUM_HEADS, _HEAD_DIM)
    k, v = rng.integers(-8, 9, shape).astype(np.float32)
    return k, v


def _written(pool: KVCachePool) -> int:
    """A request whose tokens are written."""
    request = pool.bind_request(_PROMPT, len(_PROMPT))
    k, v = _rows(len(_PROMPT))
    upload = pool.array_namespace.asarray
    pool.activate_step(request).put(0, 0, upload(k[None]), upload(v[None]))
    return request


def _round_trip(device: str, dtype: str) -> None:
    rows = _rows(len(_PROMPT))
    with _pool(device, dtype) as pool:
        pool.finish_request(_written(pool), _PROMPT)
        request = pool.bind_request(_PROMPT, len(_PROMPT))
        matched = pool.matched_prefix_len(request)
        if matched != 2 * _PAGE_SIZE:
            raise RuntimeError(f"{matched} tokens were found in the cache, not {2 * _PAGE_SIZE}")
        seen = pool.activate_step(request).get(0, matched)
        for name, found, expected in zip("KV", seen, rows, strict=True):
            _compare(f"{name} in {dtype}", pool.device.to_host(found)[0], expected[:matched])
        pool.check()


def _compare(what: str, found: NDArray[Any], expected: NDArray[np.float32]) -> None:
    if not np.array_equal(found.astype(np.float32), expected):
        raise RuntimeError(f"{what} came back different from what was put")


def _attend(pool: KVCachePool, request: int) -> str:
    """One query over the written tokens, against the same in float64; who attended."""
    k, v = _rows(len(_PROMPT))
    query = np.random.default_rng(1).integers(-2, 3, (1, _NUM_HEADS, _HEAD_DIM)) / 8
    scores = np.einsum("qhd,thd->ht", query, k.astype(np.float64)) * _HEAD_DIM**-0.5
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    weights /= weights.sum(axis=1, keepdims=True)
    expected = np.einsum("ht,thd->hd", weights, v.astype(np.float64))
    dtype = pool.key_layer(0).dtype
    table = pool.activate_step(request).page_table([len(_PROMPT)])
    attention = PagedAttention(pool, table)
    out = attention.run(0, pool.array_namespace.asarray(query.astype(dtype)))
    seen = pool.device.to_host(out).astype(np.float64)[0]
    # Values up to 8, and bfloat16 for the weights at the coarsest.
    worst = float(np.abs(seen - expected).max())
    if not worst < 0.125:
        raise RuntimeError(f"attention is off by {worst:.3g} from the same in float64")
    return attention.backend or ""
