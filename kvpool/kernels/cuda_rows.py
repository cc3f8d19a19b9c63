"""CUDA kernels that move rows: scatter, gather, zero, copy. The contract is in `kvpool.kernels`.

One thread moves one unit (16 bytes, where all goes well) of K and the same unit of V::

    threadIdx.x            unit of the row, or of one head of it
    blockIdx.x, threadIdx.y    row
    blockIdx.y             head, or layer for zero and copy_slots

A row whose heads follow each other without gaps is one head to these kernels. Offsets are 64-bit:
slot times stride passes 2^31 in real pools. The row is counted in 32 bits, each step cast back, as
numba would widen it. A slot is compared as an unsigned number, so that one comparison finds the
negative ones too.

Addresses, strides and counts are the parameters, in the order of `kvpool.kernels.cuda_kernels`.
"""

from typing import Any

import numpy as np
from numba import cuda

from kvpool.kernels import cuda_access
from kvpool.kernels.cuda_convert import conversion
from kvpool.kernels.cuda_units import ITEMSIZES

# A gather has nothing to load before it knows the slot, so two rows at once hide that latency.
ROWS_PER_THREAD = {"scatter": 1, "gather": 2}


def _moves(source: str | None, target: str | None, unit: int) -> tuple[int, int, Any]:
    """Return the bytes of a unit at its source and target, and its conversion.

    Without dtypes, `unit` is in bytes and nothing is converted.
    """
    if source is None or target is None:
        return unit, unit, cuda_access.unchanged(unit)
    convert = conversion(source, target, unit)
    return unit * ITEMSIZES[source], unit * ITEMSIZES[target], convert


def make_scatter(rows: str | None, cache: str | None, slot_bytes: int, unit: int) -> Any:
    """Return the scatter kernel from a dtype to a dtype, or for copies of `unit` bytes."""
    row_unit, cache_unit, convert = _moves(rows, cache, unit)
    load_slot = cuda_access.load_integer(slot_bytes, early=True)
    load, store = cuda_access.load_early(row_unit), cuda_access.store(cache_unit)
    slot_size, row_size, cache_size = map(np.uint64, (slot_bytes, row_unit, cache_unit))

    def scatter(
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
            # Here and not before the loop, from where its comparison would be moved up, for the
            # others to wait for: now all three are under way at once. Few rows take a second turn.
            slot = np.uint64(load_slot(slots + row * slot_size))
            if slot < num_slots:
                target = slot * slot_stride + head * head_bytes + u * cache_size
                store(k_cache + target, convert(k_words))
                store(v_cache + target, convert(v_words))
            u += np.uint64(cuda.blockDim.x)

    return scatter


def make_gather(cache: str | None, rows: str | None, slot_bytes: int, unit: int) -> Any:
    """Return the gather kernel from a dtype to a dtype, or for copies of `unit` bytes."""
    cache_unit, row_unit, convert = _moves(cache, rows, unit)
    load_slot = cuda_access.load_integer(slot_bytes)
    load, store = cuda_access.load_if(cache_unit), cuda_access.store(row_unit)
    slot_size, row_size, cache_size = map(np.uint64, (slot_bytes, row_unit, cache_unit))

    def gather(
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
    ) -> None:
        rows_per_block = np.uint32(np.uint32(2) * np.uint32(cuda.blockDim.y))
        first_row = np.uint32(np.uint32(cuda.blockIdx.x) * rows_per_block)
        row = np.uint64(np.uint32(first_row + np.uint32(cuda.threadIdx.y)))
        if row >= num_rows:
            return
        # At the end, the last row is read and written twice, with the same bytes: no branch.
        other_row = min(row + np.uint64(cuda.blockDim.y), num_rows - np.uint64(1))
        head = np.uint64(cuda.blockIdx.y)
        slot = np.uint64(load_slot(slots + row * slot_size))
        other_slot = np.uint64(load_slot(slots + other_row * slot_size))
        is_there, other_is_there = slot < num_slots, other_slot < num_slots
        source = slot * slot_stride + head * head_bytes
        other_source = other_slot * slot_stride + head * head_bytes
        k_target = k_rows + head * k_head_stride
        v_target = v_rows + head * v_head_stride
        u = np.uint64(cuda.threadIdx.x)
        while u < units:
            k_words = load(k_cache + source + u * cache_size, is_there)
            v_words = load(v_cache + source + u * cache_size, is_there)
            k_other = load(k_cache + other_source + u * cache_size, other_is_there)
            v_other = load(v_cache + other_source + u * cache_size, other_is_there)
            offset = u * row_size
            store(k_target + row * k_row_stride + offset, convert(k_words))
            store(v_target + row * v_row_stride + offset, convert(v_words))
            store(k_target + other_row * k_row_stride + offset, convert(k_other))
            store(v_target + other_row * v_row_stride + offset, convert(v_other))
            u += np.uint64(cuda.blockDim.x)

    return gather


def make_zero(slot_bytes: int, width: int) -> Any:
    """Return the kernel that zeroes slots on all layers, `width` bytes at a time."""
    zeros = (np.uint32(0),) * cuda_access.num_words(width)
    load_slot, store = cuda_access.load_integer(slot_bytes), cuda_access.store(width)
    slot_size, size = np.uint64(slot_bytes), np.uint64(width)

    def zero(
        k_caches: Any,
        v_caches: Any,
        layer_stride: Any,
        slot_stride: Any,
        slots: Any,
        num_rows: Any,
        num_slots: Any,
        units: Any,
    ) -> None:
        first_row = np.uint32(np.uint32(cuda.blockIdx.x) * np.uint32(cuda.blockDim.y))
        row = np.uint64(np.uint32(first_row + np.uint32(cuda.threadIdx.y)))
        if row >= num_rows:
            return
        slot = np.uint64(load_slot(slots + row * slot_size))
        if slot >= num_slots:
            return
        start = np.uint64(cuda.blockIdx.y) * layer_stride + slot * slot_stride
        u = np.uint64(cuda.threadIdx.x)
        while u < units:
            store(k_caches + start + u * size, zeros)
            store(v_caches + start + u * size, zeros)
            u += np.uint64(cuda.blockDim.x)

    return zero


def make_copy_slots(slot_bytes: int, width: int) -> Any:
    """Return the kernel that copies slots on all layers, `width` bytes at a time."""
    load_slot = cuda_access.load_integer(slot_bytes)
    load, store = cuda_access.load_once(width), cuda_access.store(width)
    slot_size, size = np.uint64(slot_bytes), np.uint64(width)

    def copy_slots(
        k_caches: Any,
        v_caches: Any,
        layer_stride: Any,
        slot_stride: Any,
        source_slots: Any,
        target_slots: Any,
        num_rows: Any,
        num_slots: Any,
        units: Any,
    ) -> None:
        first_row = np.uint32(np.uint32(cuda.blockIdx.x) * np.uint32(cuda.blockDim.y))
        row = np.uint64(np.uint32(first_row + np.uint32(cuda.threadIdx.y)))
        if row >= num_rows:
            return
        source_slot = np.uint64(load_slot(source_slots + row * slot_size))
        target_slot = np.uint64(load_slot(target_slots + row * slot_size))
        if source_slot >= num_slots or target_slot >= num_slots:
            return
        layer = np.uint64(cuda.blockIdx.y) * layer_stride
        source, target = layer + source_slot * slot_stride, layer + target_slot * slot_stride
        u = np.uint64(cuda.threadIdx.x)
        while u < units:
            k_words = load(k_caches + source + u * size)
            v_words = load(v_caches + source + u * size)
            store(k_caches + target + u * size, k_words)
            store(v_caches + target + u * size, v_words)
            u += np.uint64(cuda.blockDim.x)

    return copy_slots
