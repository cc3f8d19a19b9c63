"""CUDA kernels that quantise rows to FP8 and back. The contract is in `kvpool.kernels`.

Threads, offsets and guards are those of `kvpool.kernels.cuda_rows`. Elements are converted by
`kvpool.kernels.cuda_convert`, with the rule of `kvpool.kernels.fp8`.
"""

from typing import Any

import numpy as np
from numba import cuda

from kvpool.kernels import cuda_access
from kvpool.kernels.cuda_convert import dequantisation, quantisation
from kvpool.kernels.cuda_units import ITEMSIZES


def make_scatter_fp8(rows: str, cache: str, slot_bytes: int, unit: int, hardware: bool) -> Any:
    """Return the kernel that quantises rows of a dtype, `unit` elements at a time."""
    quantise = quantisation(rows, cache, unit, hardware)
    row_unit, cache_unit = unit * ITEMSIZES[rows], unit
    load_slot = cuda_access.load_integer(slot_bytes, early=True)
    load, store = cuda_access.load_early(row_unit), cuda_access.store(cache_unit)
    slot_size, row_size, cache_size = map(np.uint64, (slot_bytes, row_unit, cache_unit))

    def scatter_fp8(
        k_rows: Any,
        v_rows: Any,
        k_row_stride: Any,
        v_row_stride: Any,
        k_head_stride: Any,
        v_head_stride: Any,
        k_cache: Any,
        v_cache: Any,
        slot_stride: Any,
        head_bytes: Any,
        slots: Any,
        num_rows: Any,
        num_slots: Any,
        units: Any,
        k_divisor: Any,
        k_power: Any,
        v_divisor: Any,
        v_power: Any,
    ) -> None:
        first_row = np.uint32(np.uint32(cuda.blockIdx.x) * np.uint32(cuda.blockDim.y))
        row = np.uint64(np.uint32(first_row + np.uint32(cuda.threadIdx.y)))
        if row >= num_rows:
            return
        head = np.uint64(cuda.blockIdx.y)
        k_source = k_rows + row * k_row_stride + head * k_head_stride
        v_source = v_rows + row * v_row_stride + head * v_head_stride
        u = np.uint64(cuda.threadIdx.x)
        while u < units:
            k_words = load(k_source + u * row_size)
            v_words = load(v_source + u * row_size)
            slot = np.uint64(load_slot(slots + row * slot_size))
            if slot < num_slots:
                target = slot * slot_stride + head * head_bytes + u * cache_size
                store(k_cache + target, quantise(k_words, k_divisor, k_power))
                store(v_cache + target, quantise(v_words, v_divisor, v_power))
            u += np.uint64(cuda.blockDim.x)

    return scatter_fp8


def make_gather_fp8(cache: str, rows: str, slot_bytes: int, unit: int, hardware: bool) -> Any:
    """Return the kernel that reads FP8 rows into a dtype, `unit` elements at a time."""
    dequantise = dequantisation(cache, rows, unit, hardware)
    row_unit, cache_unit = unit * ITEMSIZES[rows], unit
    load_slot = cuda_access.load_integer(slot_bytes)
    load, store = cuda_access.load_if(cache_unit), cuda_access.store(row_unit)
    slot_size, row_size, cache_size = map(np.uint64, (slot_bytes, row_unit, cache_unit))

    def gather_fp8(
        k_rows: Any,
        v_rows: Any,
        k_row_stride: Any,
        v_row_stride: Any,
        k_head_stride: Any,
        v_head_stride: Any,
        k_cache: Any,
        v_cache: Any,
        slot_stride: Any,
        head_bytes: Any,
        slots: Any,
        num_rows: Any,
        num_slots: Any,
        units: Any,
        k_scale: Any,
        v_scale: Any,
    ) -> None:
        first_row = np.uint32(np.uint32(cuda.blockIdx.x) * np.uint32(cuda.blockDim.y))
        row = np.uint64(np.uint32(first_row + np.uint32(cuda.threadIdx.y)))
        if row >= num_rows:
            return
        head = np.uint64(cuda.blockIdx.y)
        k_target = k_rows + row * k_row_stride + head * k_head_stride
        v_target = v_rows + row * v_row_stride + head * v_head_stride
        slot = np.uint64(load_slot(slots + row * slot_size))
        is_there = slot < num_slots
        source = slot * slot_stride + head * head_bytes
        u = np.uint64(cuda.threadIdx.x)
        while u < units:
            # The code of zero is zero, so a slot that is not there needs no other path.
            k_words = load(k_cache + source + u * cache_size, is_there)
            v_words = load(v_cache + source + u * cache_size, is_there)
            store(k_target + u * row_size, dequantise(k_words, k_scale))
            store(v_target + u * row_size, dequantise(v_words, v_scale))
            u += np.uint64(cuda.blockDim.x)

    return gather_fp8
