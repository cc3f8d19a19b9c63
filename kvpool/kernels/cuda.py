"""CUDA kernels on CuPy arrays. The contract is in `kvpool.kernels`.

A call turns its arrays into addresses and strides and launches one kernel on CuPy's current stream
for K and V together; two, where they differ in dtype or shape. Nothing else here is special: the
kernels are those of `kvpool.kernels.cuda_kernels`, found by `kvpool.kernels.cuda_moves`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kvpool.dtypes import dtype_name
from kvpool.kernels import cuda_kernels as kernels
from kvpool.kernels.cuda_geometry import launch_shape
from kvpool.kernels.cuda_moves import Move, has_fp8_hardware, ready, run, spec_of_move
from kvpool.kernels.cuda_units import DTYPES, ITEMSIZES, WIDTHS, units_of, width_for

__all__ = [
    "Move",
    "copy_slots",
    "gather",
    "gather_fp8",
    "run",
    "scatter",
    "scatter_fp8",
    "warm_up",
    "zero",
]

Array = Any


def scatter(
    k_cache: Array,
    v_cache: Array,
    k_rows: Array,
    v_rows: Array,
    slots: Array,
    num_slots: int | None = None,
) -> None:
    """Write rows to slots of cache layers; see `kvpool.kernels`."""
    move = Move("scatter", k_cache, v_cache, num_slots=num_slots)
    run(move.prepare(slots, k_rows, v_rows))


def gather(k_cache: Array, v_cache: Array, slots: Array, k_out: Array, v_out: Array) -> None:
    """Read slots of cache layers into rows; see `kvpool.kernels`."""
    move = Move("gather", k_cache, v_cache)
    run(move.prepare(slots, k_out, v_out))


def scatter_fp8(
    k_cache: Array,
    v_cache: Array,
    k_rows: Array,
    v_rows: Array,
    slots: Array,
    fp8_format: str,
    k_scale: float,
    v_scale: float,
    num_slots: int | None = None,
) -> None:
    """Quantise rows into slots of uint8 cache layers; see `kvpool.kernels`."""
    move = Move("scatter", k_cache, v_cache, fp8_format, k_scale, v_scale, num_slots)
    run(move.prepare(slots, k_rows, v_rows))


def gather_fp8(
    k_cache: Array,
    v_cache: Array,
    slots: Array,
    fp8_format: str,
    k_scale: float,
    v_scale: float,
    k_out: Array,
    v_out: Array,
) -> None:
    """Read slots of uint8 cache layers into rows; see `kvpool.kernels`."""
    move = Move("gather", k_cache, v_cache, fp8_format, k_scale, v_scale)
    run(move.prepare(slots, k_out, v_out))


def zero(k_cache: Array, v_cache: Array, slots: Array) -> None:
    """Zero slots on every layer of both caches; see `kvpool.kernels`."""
    _over_layers("zero", k_cache, v_cache, (slots,))


def copy_slots(k_cache: Array, v_cache: Array, source_slots: Array, target_slots: Array) -> None:
    """Copy slots over slots on every layer of both caches; see `kvpool.kernels`."""
    if source_slots.dtype != target_slots.dtype:
        target_slots = target_slots.astype(source_slots.dtype)
    _over_layers("copy_slots", k_cache, v_cache, (source_slots, target_slots))


def _over_layers(verb: str, k_cache: Array, v_cache: Array, slots: tuple[Array, ...]) -> None:
    n = len(slots[0])
    assert len(slots[-1]) == n
    if n == 0:
        return
    if k_cache.shape != v_cache.shape or k_cache.dtype.itemsize != v_cache.dtype.itemsize:
        _over_layers(verb, k_cache, k_cache, slots)
        _over_layers(verb, v_cache, v_cache, slots)
        return
    index = k_cache.data.device_id
    k_to, v_to = k_cache.data.ptr, v_cache.data.ptr
    layers, total_slots, heads, dim = k_cache.shape
    row_bytes = heads * dim * k_cache.dtype.itemsize
    width = width_for(k_to | v_to | row_bytes)
    spec = getattr(kernels, verb)(slots[0].dtype.itemsize, width)
    units = row_bytes // width
    grid, block = launch_shape(n, units, layers, spec.rows_per_thread)
    caches = (k_to, v_to, total_slots * row_bytes, row_bytes)
    arguments = (*caches, *(each.data.ptr for each in slots), n, total_slots, units)
    run(((index, ready(spec, index).bind(index, grid, block), arguments, None),))


def warm_up(k_cache: Array, v_cache: Array, fp8_format: str | None) -> None:
    """Compile and load every kernel for caches ``[layers, total_slots, heads, dim]``.

    That is, for rows of every dtype and alignment; kernels of other storage dtypes are left out.
    """
    index = k_cache.data.device_id
    for dtype in {k_cache.dtype, v_cache.dtype}:
        for spec in specs_for(fp8_format or dtype_name(dtype), has_fp8_hardware(index)):
            ready(spec, index)


def specs_for(stored: str, hardware: bool) -> Iterator[kernels.KernelSpec]:
    """Every variant that caches of one storage dtype can need."""
    for slot_bytes in kernels.SLOT_BYTES:
        for rows in DTYPES:
            for unit in units_of(rows, stored):
                yield spec_of_move("scatter", rows, stored, slot_bytes, unit, hardware)
                if rows in kernels.CACHE_DTYPES:
                    yield spec_of_move("gather", rows, stored, slot_bytes, unit, hardware)
        for width in WIDTHS:
            if width >= ITEMSIZES[stored]:
                yield kernels.zero(slot_bytes, width)
                yield kernels.copy_slots(slot_bytes, width)
    # What the buffers of graphs are filled with.
    yield kernels.map_pages()
    yield kernels.page_table(8)
