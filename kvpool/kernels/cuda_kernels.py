"""The table of CUDA kernels: what there is, in which variants, and what each one takes.

Every parameter of every kernel is an 8-byte integer, unsigned in the machine code: an address, a
byte stride, a count, or the bits of a number; a negative stride wraps around. `KernelSpec` says
all that a launcher needs; how kernels are compiled and launched is not known here. Strides and
shapes are parameters, so a pool needs few variants, whatever its layout.

K and V have the same dtypes, lengths and cache strides in one launch. Where they differ, launch
twice, each time with one of them in both places: the same bytes are then written twice.
"""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from kvpool.kernels import cuda_fp8, cuda_rows, cuda_tables
from kvpool.kernels.capabilities import FP8_HARDWARE as FP8_HARDWARE
from kvpool.kernels.capabilities import OLDEST as OLDEST
from kvpool.kernels.cuda_units import DTYPES, FP8_DTYPES, ITEMSIZES, WIDTHS, units_of

CACHE_DTYPES = ("float32", "float16", "bfloat16")
SLOT_BYTES = (8, 4)

_ROWS = ("k_rows", "v_rows", "k_row_stride", "v_row_stride", "k_head_stride", "v_head_stride")
_CACHE = ("k_cache", "v_cache", "slot_stride", "head_bytes")
_SLOTS = ("slots", "num_rows", "num_slots", "units")
_CACHES = ("k_caches", "v_caches", "layer_stride", "slot_stride")

# Parameters in order, by kernel. `units` is how many units a row (of one head) has.
PARAMETERS: dict[str, tuple[str, ...]] = {
    "scatter": (*_ROWS, *_CACHE, *_SLOTS),
    "gather": (*_ROWS, *_CACHE, *_SLOTS),
    "scatter_fp8": (
        *(*_ROWS, *_CACHE, *_SLOTS),
        *("k_divisor", "k_power", "v_divisor", "v_power"),
    ),
    "gather_fp8": (*_ROWS, *_CACHE, *_SLOTS, "k_scale", "v_scale"),
    "zero": (*_CACHES, *_SLOTS),
    "copy_slots": (*_CACHES, "source_slots", "target_slots", "num_rows", "num_slots", "units"),
    "map_pages": ("runs", "ints", "page_map", "map_stride"),
    "page_table": (
        *("rows", "lengths", "starts", "batch_size"),
        *("page_map", "map_stride", "page_size", "window", "scratch_slot"),
        *("indptr", "indices", "last_page_len", "slots"),
    ),
}


@dataclass(frozen=True)
class KernelSpec:
    """One kernel in one variant.

    Attributes
    ----------
    name : str
        Unique name, an identifier, good for a cache key and for profilers.
    function : callable
        What `numba.cuda.compile` takes, with ``(uint64,) * len(parameters)``, and the simulator.
    parameters : tuple of str
        Names of the parameters, in order; all of 8 bytes.
    rows_per_thread : int
        For `kvpool.kernels.cuda_geometry.launch_shape`.
    oldest : tuple of int
        Compute capability from which on the variant compiles.
    """

    name: str
    function: Callable[..., Any]
    parameters: tuple[str, ...]
    rows_per_thread: int = 1
    oldest: tuple[int, int] = OLDEST


def _spec(
    kernel: str, variant: str, function: Any, rows_per_thread: int = 1, oldest: Any = OLDEST
) -> KernelSpec:
    name = f"kvpool_{kernel}_{variant}"
    # numba makes the name in the machine code, which a profiler shows, of this one.
    function.__name__ = function.__qualname__ = name
    return KernelSpec(name, function, PARAMETERS[kernel], rows_per_thread, oldest)


def scatter(rows: str, cache: str, slot_bytes: int, unit: int) -> KernelSpec:
    """Rows to slots. `unit` is what `cuda_units.unit_for` says for (rows, cache)."""
    if rows == cache:
        return _copying("scatter", slot_bytes, unit * ITEMSIZES[cache])
    return _converting("scatter", rows, cache, slot_bytes, unit)


def gather(cache: str, rows: str, slot_bytes: int, unit: int) -> KernelSpec:
    """Slots to rows; slots that are not there give zeros."""
    if rows == cache:
        return _copying("gather", slot_bytes, unit * ITEMSIZES[cache])
    return _converting("gather", cache, rows, slot_bytes, unit)


@functools.cache
def _copying(kernel: str, slot_bytes: int, width: int) -> KernelSpec:
    # float16 and bfloat16 share these: bits are bits.
    make = cuda_rows.make_scatter if kernel == "scatter" else cuda_rows.make_gather
    function = make(None, None, slot_bytes, width)
    variant = f"{width}_byte_units_slots{8 * slot_bytes}"
    return _spec(kernel, variant, function, cuda_rows.ROWS_PER_THREAD[kernel])


@functools.cache
def _converting(kernel: str, source: str, target: str, slot_bytes: int, unit: int) -> KernelSpec:
    make = cuda_rows.make_scatter if kernel == "scatter" else cuda_rows.make_gather
    function = make(source, target, slot_bytes, unit)
    variant = f"{source}_to_{target}_by_{unit}_slots{8 * slot_bytes}"
    return _spec(kernel, variant, function, cuda_rows.ROWS_PER_THREAD[kernel])


@functools.cache
def scatter_fp8(rows: str, cache: str, slot_bytes: int, unit: int, hardware: bool) -> KernelSpec:
    """Rows to slots of an FP8 cache; the scales are `cuda_scales.divisor_words`."""
    function = cuda_fp8.make_scatter_fp8(rows, cache, slot_bytes, unit, hardware)
    variant = f"{rows}_to_{cache}_by_{unit}_slots{8 * slot_bytes}_{_how(hardware)}"
    return _spec("scatter_fp8", variant, function, oldest=FP8_HARDWARE if hardware else OLDEST)


@functools.cache
def gather_fp8(cache: str, rows: str, slot_bytes: int, unit: int, hardware: bool) -> KernelSpec:
    """Slots of an FP8 cache to rows; the scales are `cuda_scales.scale_bits`."""
    function = cuda_fp8.make_gather_fp8(cache, rows, slot_bytes, unit, hardware)
    variant = f"{cache}_to_{rows}_by_{unit}_slots{8 * slot_bytes}_{_how(hardware)}"
    oldest = FP8_HARDWARE if hardware else OLDEST
    return _spec("gather_fp8", variant, function, oldest=oldest)


@functools.cache
def zero(slot_bytes: int, width: int) -> KernelSpec:
    """Zero slots on all layers; `width` is what `cuda_units.width_for` says."""
    function = cuda_rows.make_zero(slot_bytes, width)
    return _spec("zero", f"{width}_byte_units_slots{8 * slot_bytes}", function)


@functools.cache
def copy_slots(slot_bytes: int, width: int) -> KernelSpec:
    """Copy slots over slots on all layers; `width` is what `cuda_units.width_for` says."""
    function = cuda_rows.make_copy_slots(slot_bytes, width)
    return _spec("copy_slots", f"{width}_byte_units_slots{8 * slot_bytes}", function)


@functools.cache
def map_pages() -> KernelSpec:
    """Runs of page ids into the page map. Grid: the runs; block: `cuda_tables.THREADS`."""
    return _spec("map_pages", "int32", cuda_tables.make_map_pages())


@functools.cache
def page_table(slot_bytes: int) -> KernelSpec:
    """Page table and write slots of a batch. Grid: its rows; block: `cuda_tables.THREADS`."""
    return _spec("page_table", f"slots{8 * slot_bytes}", cuda_tables.make_page_table(slot_bytes))


def _how(hardware: bool) -> str:
    return "hardware" if hardware else "integer"


def all_specs(hardware: bool, slot_bytes: tuple[int, ...] = SLOT_BYTES) -> Iterator[KernelSpec]:
    """Yield every variant, with FP8 by the hardware or by integers."""
    yield map_pages()
    for width in slot_bytes:
        seen = set()
        for rows in DTYPES:
            for cache in CACHE_DTYPES:
                for unit in units_of(rows, cache):
                    seen.add(scatter(rows, cache, width, unit))
                    if rows in CACHE_DTYPES:
                        seen.add(gather(cache, rows, width, unit))
            for form in FP8_DTYPES:
                for unit in units_of(rows, form):
                    seen.add(scatter_fp8(rows, form, width, unit, hardware))
                    if rows in CACHE_DTYPES:
                        seen.add(gather_fp8(form, rows, width, unit, hardware))
        for unit_bytes in WIDTHS:
            seen |= {zero(width, unit_bytes), copy_slots(width, unit_bytes)}
        seen.add(page_table(width))
        yield from sorted(seen, key=lambda spec: spec.name)
