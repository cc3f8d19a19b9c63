"""Grids, blocks and units of the CUDA kernels: pure arithmetic."""

import numpy as np
import pytest

from kvpool.kernels import cuda_geometry
from kvpool.kernels.cuda_geometry import MAX_GRID_Y, MAX_ROWS, MAX_THREADS, launch_shape
from kvpool.kernels.cuda_units import ITEMSIZES, unit_for, units_of, width_for


@pytest.mark.parametrize("rows_per_thread", [1, 2])
@pytest.mark.parametrize("units", [1, 2, 5, 16, 96, 128, 255, 256, 257, 4000])
@pytest.mark.parametrize("num_rows", [1, 2, 3, 255, 256, 257, 1000])
def test_launch_shape_covers_every_row_and_no_block_is_idle(num_rows, units, rows_per_thread):
    (blocks, outer, z), (x, y, one) = launch_shape(num_rows, units, 7, rows_per_thread)
    assert (outer, z, one) == (7, 1, 1)
    assert x == min(units, MAX_THREADS)
    assert MAX_THREADS / 2 < x * y <= MAX_THREADS
    rows_per_block = y * rows_per_thread
    assert (blocks - 1) * rows_per_block < num_rows <= blocks * rows_per_block


def test_launch_shape_at_the_limits():
    assert launch_shape(MAX_ROWS, 256)[0] == (cuda_geometry.MAX_GRID_X, 1, 1)
    # The last row a thread may be in front of is still counted in 32 bits.
    assert MAX_ROWS + 2 * MAX_THREADS < 2**32
    assert launch_shape(1, 1, MAX_GRID_Y)[0] == (1, MAX_GRID_Y, 1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((MAX_ROWS + 1, 1), "up to 2147483647 rows, got 2147483648"),
        ((1, 1, MAX_GRID_Y + 1), "up to 65535 heads or layers, got 65536"),
        ((0, 1), "got 0, 1 and 1"),
        ((1, 0), "got 1, 0 and 1"),
        ((1, 1, 0), "got 1, 1 and 0"),
    ],
)
def test_launch_shape_refuses_what_no_grid_holds(arguments, message):
    with pytest.raises(ValueError, match=message):
        launch_shape(*arguments)


@pytest.mark.parametrize("target", ITEMSIZES)
@pytest.mark.parametrize("source", ITEMSIZES)
def test_units_fill_16_bytes_of_the_wider_side(source, target):
    widest, *narrower = units_of(source, target)
    if "float64" not in (source, target) or source == target:
        assert widest * max(ITEMSIZES[source], ITEMSIZES[target]) == 16
    assert (narrower or [widest])[-1] == 1


@pytest.mark.parametrize(
    ("source_bits", "target_bits", "elements", "unit"),
    [
        (0, 0, 16, 8),
        (16, 16, 16, 8),
        (8, 16, 16, 4),
        (16, 8, 16, 4),
        (16, 16, 12, 4),
        (4, 16, 16, 2),
        (16, 16, 5, 1),
        (2, 0, 16, 1),
    ],
)
def test_unit_of_a_copy_is_the_widest_that_all_allow(source_bits, target_bits, elements, unit):
    assert unit_for("float16", "float16", source_bits, target_bits, elements) == unit


def test_unit_of_a_conversion_is_a_vector_or_one():
    assert unit_for("float32", "float8_e4m3fn", 16, 4, 8) == 4
    assert unit_for("float32", "float8_e4m3fn", 8, 4, 8) == 1
    assert unit_for("float32", "float8_e4m3fn", 16, 2, 8) == 1
    assert unit_for("bfloat16", "float8_e5m2", 16, 8, 8) == 8
    assert unit_for("bfloat16", "float32", 8, 16, 4) == 4
    assert unit_for("float64", "bfloat16", 0, 0, 64) == 1


def test_unit_without_alignment_is_refused():
    with pytest.raises(ValueError, match="float32"):
        unit_for("float32", "bfloat16", 2, 2, 4)


def test_width_divides_all_bits():
    assert [width_for(n) for n in (0, 16, 24, 4, 2, 30, 1, 17)] == [16, 16, 8, 4, 2, 2, 1, 1]


def test_itemsizes_are_those_of_the_dtypes():
    import ml_dtypes

    for name, itemsize in ITEMSIZES.items():
        dtype = getattr(ml_dtypes, name, None) or name
        assert np.dtype(dtype).itemsize == itemsize
