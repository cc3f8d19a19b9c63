"""Run one variant of a kernel in the simulator, on NumPy arrays, as a launcher would."""

import numpy as np

from kvpool.kernels.cuda_scales import divisor_words, scale_bits
from kvpool.kernels.cuda_units import unit_for, width_for

# Small, and no divisor of the tests' shapes: rows and units end within a block. The simulator
# starts an operating-system thread for each of ours.
BLOCK = (2, 3, 1)


def run(spec, values, *, outer=1, grid=None, block=BLOCK):
    """Run `spec` with parameters by name; a grid that covers the rows, unless one is given."""
    from numba import cuda

    assert set(values) == set(spec.parameters)
    if grid is None:
        rows_per_block = block[1] * spec.rows_per_thread
        grid = (-(-values["num_rows"] // rows_per_block), outer, 1)
    arguments = [np.uint64(values[name] % 2**64) for name in spec.parameters]
    cuda.jit(spec.function)[grid, block](*arguments)


def dtype_of(array):
    return array.dtype.name


def address(array):
    return array.ctypes.data


def is_flat(rows):
    """Whether the heads of each row follow each other without gaps."""
    return rows.shape[1] == 1 or rows.strides[1] == rows.shape[2] * rows.itemsize


def row_values(k_cache, v_cache, k_rows, v_rows, slots, num_slots, cache_dtype, unit=None):
    """Parameters that scatter and gather have in common, the unit, and the heads for the grid."""
    _, heads, dim = k_rows.shape
    flat = is_flat(k_rows) and is_flat(v_rows)
    heads, elements = (1, heads * dim) if flat else (heads, dim)
    row_bits = 0
    for rows in (k_rows, v_rows):
        row_bits |= address(rows) | rows.strides[0] | (0 if flat else rows.strides[1])
    head_bytes = elements * k_cache.itemsize
    slot_stride = k_cache.strides[0]
    cache_bits = address(k_cache) | address(v_cache) | head_bytes | slot_stride
    if unit is None:
        unit = unit_for(dtype_of(k_rows), cache_dtype, row_bits, cache_bits, elements)
    values = {
        "k_rows": address(k_rows),
        "v_rows": address(v_rows),
        "k_row_stride": k_rows.strides[0],
        "v_row_stride": v_rows.strides[0],
        "k_head_stride": k_rows.strides[1],
        "v_head_stride": v_rows.strides[1],
        "k_cache": address(k_cache),
        "v_cache": address(v_cache),
        "slot_stride": slot_stride,
        "head_bytes": head_bytes,
        "slots": address(slots),
        "num_rows": len(slots),
        "num_slots": len(k_cache) if num_slots is None else num_slots,
        "units": elements // unit,
    }
    return values, unit, heads


def scatter(k_cache, v_cache, k_rows, v_rows, slots, num_slots=None, unit=None):
    from kvpool.kernels import cuda_kernels

    dtype = dtype_of(k_cache)
    values, unit, heads = row_values(
        k_cache, v_cache, k_rows, v_rows, slots, num_slots, dtype, unit
    )
    run(cuda_kernels.scatter(dtype_of(k_rows), dtype, slots.itemsize, unit), values, outer=heads)
    return unit


def gather(k_cache, v_cache, slots, k_rows, v_rows, unit=None):
    from kvpool.kernels import cuda_kernels

    dtype = dtype_of(k_cache)
    values, unit, heads = row_values(k_cache, v_cache, k_rows, v_rows, slots, None, dtype, unit)
    run(cuda_kernels.gather(dtype, dtype_of(k_rows), slots.itemsize, unit), values, outer=heads)
    return unit


def scatter_fp8(
    k_cache, v_cache, k_rows, v_rows, slots, form, k_scale, v_scale, num_slots=None, unit=None
):
    from kvpool.kernels import cuda_kernels

    values, unit, heads = row_values(
        k_cache, v_cache, k_rows, v_rows, slots, num_slots, form, unit
    )
    for name, scale in (("k", k_scale), ("v", v_scale)):
        values[f"{name}_divisor"], values[f"{name}_power"] = divisor_words(scale)
    spec = cuda_kernels.scatter_fp8(dtype_of(k_rows), form, slots.itemsize, unit, True)
    run(spec, values, outer=heads)
    return unit


def gather_fp8(k_cache, v_cache, slots, form, k_scale, v_scale, k_rows, v_rows, unit=None):
    from kvpool.kernels import cuda_kernels

    values, unit, heads = row_values(k_cache, v_cache, k_rows, v_rows, slots, None, form, unit)
    values["k_scale"], values["v_scale"] = scale_bits(k_scale), scale_bits(v_scale)
    spec = cuda_kernels.gather_fp8(form, dtype_of(k_rows), slots.itemsize, unit, True)
    run(spec, values, outer=heads)
    return unit


def cache_values(k_caches, v_caches, num_rows):
    """Parameters that zero and copy_slots have in common, and the width."""
    layer_stride, slot_stride = k_caches.strides[:2]
    width = width_for(layer_stride | slot_stride | address(k_caches) | address(v_caches))
    values = {
        "k_caches": address(k_caches),
        "v_caches": address(v_caches),
        "layer_stride": layer_stride,
        "slot_stride": slot_stride,
        "num_rows": num_rows,
        "num_slots": k_caches.shape[1],
        "units": slot_stride // width,
    }
    return values, width


def zero(k_caches, v_caches, slots):
    from kvpool.kernels import cuda_kernels

    values, width = cache_values(k_caches, v_caches, len(slots))
    values["slots"] = address(slots)
    run(cuda_kernels.zero(slots.itemsize, width), values, outer=len(k_caches))
    return width


def copy_slots(k_caches, v_caches, source_slots, target_slots):
    from kvpool.kernels import cuda_kernels

    values, width = cache_values(k_caches, v_caches, len(source_slots))
    values["source_slots"], values["target_slots"] = address(source_slots), address(target_slots)
    run(cuda_kernels.copy_slots(source_slots.itemsize, width), values, outer=len(k_caches))
    return width
