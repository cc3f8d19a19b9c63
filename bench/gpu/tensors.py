"""Tensors of torch over a pool's arrays: the same memory, both ways, under the right dtype."""

from __future__ import annotations

import gc

import numpy as np

from bench.gpu.guests import why_no_torch
from bench.gpu.report import download
from kvpool.dtypes import FLOAT_DTYPES, FP8_DTYPES

LAYERS, SLOTS, HEADS, HEAD_DIM, PAGE_SIZE = 2, 64, 2, 64, 16
DEVICE_TYPE = "cuda"


def run(cupy, report):
    """Add a row per stored dtype, and one for what outlives a pool."""
    why = why_no_torch()
    if why:
        report.skip("tensors", "views of a pool", why)
        return
    import torch

    for dtype in (*FLOAT_DTYPES, *FP8_DTYPES):
        with report.attempt("tensors", f"{dtype}: same memory"):
            shared(cupy, report, torch, dtype)
    with report.attempt("tensors", "a tensor outlives its pool"):
        outlives(cupy, report, torch)


def pool_of(dtype):
    from kvpool import KVCachePool

    return KVCachePool(
        LAYERS, SLOTS, HEADS, HEAD_DIM, page_size=PAGE_SIZE, device="cuda", dtype=dtype
    )


def shared(cupy, report, torch, dtype):
    """Pointers, strides, dtypes, and bytes that are written on one side and read on the other."""
    from kvpool.interop.torch import pool_tensors, tensor_of

    with pool_of(dtype) as pool:
        tensors, wrong = pool_tensors(pool), []
        pairs = {
            "key_cache": (tensors.key_cache, pool.key_cache),
            "value_cache": (tensors.value_cache, pool.value_cache),
        }
        for layer in range(LAYERS):
            k, v = pool.layer_with_scratch(layer)
            paged_k, paged_v = tensors.paged_layer(layer)
            shape = (pool.num_pages + 1, PAGE_SIZE, HEADS, HEAD_DIM)
            pairs |= {
                f"key_layer {layer}": (tensors.key_layer(layer), pool.key_layer(layer)),
                f"value_layer {layer}": (tensors.value_layer(layer), pool.value_layer(layer)),
                f"pages of K {layer}": (paged_k, k.reshape(shape)),
                f"pages of V {layer}": (paged_v, v.reshape(shape)),
            }
        for name, (tensor, array) in pairs.items():
            strides = [stride // array.itemsize for stride in array.strides]
            if tensor.data_ptr() != array.data.ptr:
                wrong.append(f"{name}: address")
            if list(tensor.shape) != list(array.shape) or list(tensor.stride()) != strides:
                wrong.append(f"{name}: shape or strides")
            if tensor.dtype != getattr(torch, dtype) or tensor.device.type != DEVICE_TYPE:
                wrong.append(f"{name}: {tensor.dtype} on {tensor.device}")
        wrong += written_both_ways(cupy, torch, pool, tensors)
        slots = cupy.arange(5)
        if tensor_of(slots).data_ptr() != slots.data.ptr:
            wrong.append("int64 slots: address")
    count = f"{len(pairs) + 1} views"
    note = "; ".join(wrong)[:300] or count
    report.add("tensors", f"{dtype}: same memory", len(wrong), "wrong", ok=not wrong, note=note)


def written_both_ways(cupy, torch, pool, tensors):
    """What differs of 1.5, written by torch and read by CuPy, and the other way round."""
    integers = np.dtype(f"u{pool.key_cache.dtype.itemsize}")
    signed = (
        getattr(torch, f"int{8 * integers.itemsize}") if integers.itemsize > 1 else torch.uint8
    )
    wrong = []
    one_and_a_half = torch.full((HEAD_DIM,), 1.5, device=tensors.key_cache.device)
    # 1.5 is exact in every dtype, and no conversion of FP8 is the same in all releases of torch.
    tensors.key_layer(1)[3, 1].copy_(one_and_a_half.to(tensors.key_cache.dtype))
    torch.cuda.synchronize()
    code = bits_of_one_and_a_half(pool.dtype)
    if not (download(pool.key_layer(1))[3, 1] == code).all():
        wrong.append("torch wrote 1.5, CuPy reads another")
    pool.value_layer(0).view(integers)[5, 0] = int(code)
    cupy.cuda.Device().synchronize()
    found = tensors.value_layer(0)[5, 0]
    if not bool((found.float() == 1.5).all()):
        wrong.append("CuPy wrote 1.5, torch reads another")
    if not bool((found.view(signed) == int(code)).all()):
        wrong.append("CuPy wrote 1.5, torch reads other bits")
    return wrong


def bits_of_one_and_a_half(dtype):
    import ml_dtypes

    value = np.full(1, 1.5).astype(np.dtype(getattr(ml_dtypes, dtype, dtype)))
    return value.view(f"u{value.dtype.itemsize}")[0]


def outlives(cupy, report, torch):
    """A view keeps the memory until it is gone, whatever becomes of the pool."""
    from kvpool.interop.torch import pool_tensors

    pool = pool_of("bfloat16")
    layer = pool_tensors(pool).key_layer(0)
    layer.fill_(1.5)
    pool.close()
    del pool
    gc.collect()
    # Would be handed out again if it were free.
    others = [cupy.zeros(LAYERS * (SLOTS + PAGE_SIZE) * HEADS * HEAD_DIM, np.uint16) for _ in "ab"]
    torch.cuda.synchronize()
    ok = bool((layer == 1.5).all())
    report.add("tensors", "a tensor outlives its pool", len(others), "arrays since", ok=ok)
