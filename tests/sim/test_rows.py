"""Scatter, gather, zero and copy in the simulator, against the CPU's kernels, bit for bit."""

import itertools

import numpy as np
import pytest

from kvpool.kernels import cpu
from tests.sim import launching
from tests.sim.arrays import (
    BF16,
    F16,
    F32,
    F64,
    FLOATS,
    aligned,
    assert_same_bits,
    random_bits,
    random_floats,
)

# Counting slots in unsigned numbers wraps around, on purpose.
pytestmark = [
    pytest.mark.sim,
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
]

TOTAL_SLOTS = 11
# Negative ones, the last one, one at the end, one past it, and what a 32-bit cast would hide.
SLOTS = (3, -1, 10, 0, 11, 7, 500, -(2**31))


@pytest.fixture
def rng():
    return np.random.default_rng(31)


def caches(rng, dtype, shape):
    return tuple(random_floats(rng, (TOTAL_SLOTS, *shape), dtype) for _ in "kv")


def scatter_both(k_cache, v_cache, k_rows, v_rows, slots, num_slots=None, unit=None):
    """Scatter on copies with both kernels, compare, return the unit that the simulator used."""
    k_expected, v_expected = k_cache.copy(), v_cache.copy()
    cpu.scatter(k_expected, v_expected, k_rows, v_rows, slots, num_slots)
    unit = launching.scatter(k_cache, v_cache, k_rows, v_rows, slots, num_slots, unit)
    assert_same_bits(k_cache, k_expected)
    assert_same_bits(v_cache, v_expected)
    return unit


def gather_both(k_cache, v_cache, slots, k_out, v_out, unit=None):
    k_expected, v_expected = k_out.copy(), v_out.copy()
    cpu.gather(k_cache, v_cache, slots, k_expected, v_expected)
    unit = launching.gather(k_cache, v_cache, slots, k_out, v_out, unit)
    assert_same_bits(k_out, k_expected)
    assert_same_bits(v_out, v_expected)
    return unit


@pytest.mark.parametrize("unit", [None, 1], ids=["vectors", "scalars"])
@pytest.mark.parametrize(
    ("cache", "source"), list(itertools.product(FLOATS, (*FLOATS, F64))), ids=str
)
def test_scatter_each_dtype_pair(cache, source, unit, rng):
    k_cache, v_cache = caches(rng, cache, (2, 12))
    k_rows, v_rows = (random_floats(rng, (len(SLOTS), 2, 12), source) for _ in "kv")
    used = scatter_both(k_cache, v_cache, k_rows, v_rows, np.array(SLOTS), unit=unit)
    assert used == (unit or (1 if source == F64 else 16 // max(source.itemsize, cache.itemsize)))


@pytest.mark.parametrize("unit", [None, 1], ids=["vectors", "scalars"])
@pytest.mark.parametrize(("cache", "out"), list(itertools.product(FLOATS, FLOATS)), ids=str)
def test_gather_each_dtype_pair(cache, out, unit, rng):
    k_cache, v_cache = caches(rng, cache, (2, 12))
    k_out, v_out = (random_floats(rng, (len(SLOTS), 2, 12), out) for _ in "kv")
    gather_both(k_cache, v_cache, np.array(SLOTS), k_out, v_out, unit)
    assert not k_out[1].any()
    assert not v_out[4].any()


@pytest.mark.parametrize("slot_dtype", [np.int32, np.int64])
@pytest.mark.parametrize("num_slots", [None, 8, 0, 99])
def test_scatter_past_the_limit_writes_nothing(num_slots, slot_dtype, rng):
    k_cache, v_cache = caches(rng, BF16, (1, 16))
    k_rows, v_rows = (random_floats(rng, (len(SLOTS), 1, 16), F32) for _ in "kv")
    limit = TOTAL_SLOTS if num_slots is None else min(num_slots, TOTAL_SLOTS)
    scatter_both(k_cache, v_cache, k_rows, v_rows, np.array(SLOTS, slot_dtype), limit)


@pytest.mark.parametrize("num_rows", [1, 2, 3, 4, 5, 6, 7, 12, 13])
def test_last_rows_of_a_block(num_rows, rng):
    k_cache, v_cache = (random_floats(rng, (20, 1, 8), F16) for _ in "kv")
    k_rows, v_rows = (random_floats(rng, (num_rows, 1, 8), F16) for _ in "kv")
    slots = rng.permutation(20)[:num_rows]
    scatter_both(k_cache, v_cache, k_rows, v_rows, slots)
    gather_both(k_cache, v_cache, slots, np.zeros_like(k_rows), np.zeros_like(v_rows))


@pytest.mark.parametrize(("dtype", "width"), [(F32, 16), (F32, 4), (BF16, 2)], ids=str)
def test_copy_keeps_every_bit(dtype, width, rng):
    k_cache, v_cache = (random_bits(rng, (TOTAL_SLOTS, 2, 8), dtype) for _ in "kv")
    k_rows, v_rows = (random_bits(rng, (4, 2, 8), dtype) for _ in "kv")
    slots, unit = np.array([4, -7, 2, 9]), width // dtype.itemsize
    assert scatter_both(k_cache, v_cache, k_rows, v_rows, slots, unit=unit) == unit
    k_out, v_out = np.zeros_like(k_rows), np.zeros_like(v_rows)
    assert gather_both(k_cache, v_cache, slots, k_out, v_out, unit) == unit


@pytest.mark.parametrize(
    ("source", "cache"), [(BF16, BF16), (F32, F32), (F32, BF16), (BF16, F32)], ids=str
)
@pytest.mark.parametrize(("heads", "dim"), [(1, 1), (3, 5), (1, 13), (5, 2), (7, 6)])
def test_odd_heads_and_dims(source, cache, heads, dim, rng):
    k_cache, v_cache = caches(rng, cache, (heads, dim))
    k_rows, v_rows = (random_floats(rng, (3, heads, dim), source) for _ in "kv")
    slots = np.array([9, -1, 0])
    scatter_both(k_cache, v_cache, k_rows, v_rows, slots)
    gather_both(k_cache, v_cache, slots, np.zeros_like(k_rows), np.zeros_like(v_rows))


@pytest.mark.parametrize(("source", "unit"), [(BF16, 8), (F32, 4), (F64, 1)], ids=str)
def test_scatter_reads_a_fused_projection_in_place(source, unit, rng):
    # q, k and v of 4, 2 and 2 heads, side by side in a row.
    fused = random_floats(rng, (5, 8, 8), source)
    k_rows, v_rows = fused[:, 4:6], fused[:, 6:]
    k_cache, v_cache = caches(rng, BF16, (2, 8))
    assert scatter_both(k_cache, v_cache, k_rows, v_rows, np.array([1, 3, -1, 5, 7])) == unit


@pytest.mark.parametrize("out", [BF16, F32], ids=str)
def test_heads_with_their_own_stride(out, rng):
    # [heads, n, dim], seen as rows: heads are far apart, each is a vector still.
    k_rows, v_rows = (random_floats(rng, (3, 5, 16), out).transpose(1, 0, 2) for _ in "kv")
    k_cache, v_cache = caches(rng, BF16, (3, 16))
    slots = np.array([1, 3, -1, 5, 7])
    assert scatter_both(k_cache, v_cache, k_rows, v_rows, slots) == 16 // out.itemsize
    k_out, v_out = (random_floats(rng, (3, 5, 16), out).transpose(1, 0, 2) for _ in "kv")
    k_expected, v_expected = (np.empty((5, 3, 16), out) for _ in "kv")
    cpu.gather(k_cache, v_cache, slots, k_expected, v_expected)
    launching.gather(k_cache, v_cache, slots, k_out, v_out)
    assert_same_bits(k_out, k_expected)
    assert_same_bits(v_out, v_expected)


def test_rows_in_reverse_have_a_negative_stride(rng):
    k_rows, v_rows = (random_floats(rng, (4, 1, 8), F16)[::-1] for _ in "kv")
    k_cache, v_cache = caches(rng, F16, (1, 8))
    scatter_both(k_cache, v_cache, k_rows, v_rows, np.array([1, 3, 5, 7]))


def test_unaligned_rows_take_narrower_units(rng):
    k_cache, v_cache = caches(rng, BF16, (1, 16))
    for skip, unit in ((16, 8), (8, 4), (4, 2), (2, 1)):
        k_rows, v_rows = (aligned(np.ones((2, 1, 16), BF16), skip=skip) for _ in "kv")
        assert scatter_both(k_cache, v_cache, k_rows, v_rows, np.array([2, 5])) == unit


@pytest.mark.parametrize("slot_dtype", [np.int32, np.int64])
@pytest.mark.parametrize(("dtype", "dim", "width"), [(F32, 8, 16), (BF16, 5, 2), (F16, 6, 4)])
def test_zero_clears_slots_of_every_layer(dtype, dim, width, slot_dtype, rng):
    k_caches, v_caches = (random_bits(rng, (3, TOTAL_SLOTS, 1, dim), dtype) for _ in "kv")
    k_expected, v_expected = k_caches.copy(), v_caches.copy()
    slots = np.array(SLOTS, slot_dtype)
    cpu.zero(k_expected, v_expected, slots)
    assert launching.zero(k_caches, v_caches, slots) == width
    assert_same_bits(k_caches, k_expected)
    assert_same_bits(v_caches, v_expected)


def test_zero_leaves_the_scratch_page_of_each_layer_alone(rng):
    # What a pool shows has a gap between layers, which a slot past the end would fall into.
    k_whole, v_whole = (random_bits(rng, (2, TOTAL_SLOTS + 4, 1, 8), F16) for _ in "kv")
    k_expected, v_expected = k_whole.copy(), v_whole.copy()
    k_expected[:, [2, 10]], v_expected[:, [2, 10]] = 0, 0
    launching.zero(k_whole[:, :TOTAL_SLOTS], v_whole[:, :TOTAL_SLOTS], np.array([2, 11, 10, 13]))
    assert_same_bits(k_whole, k_expected)
    assert_same_bits(v_whole, v_expected)


@pytest.mark.parametrize("slot_dtype", [np.int32, np.int64])
@pytest.mark.parametrize(("dtype", "dim", "width"), [(F32, 8, 16), (BF16, 5, 2), (F16, 4, 8)])
def test_copy_slots_copies_every_layer(dtype, dim, width, slot_dtype, rng):
    k_caches, v_caches = (random_bits(rng, (3, TOTAL_SLOTS, 1, dim), dtype) for _ in "kv")
    k_expected, v_expected = k_caches.copy(), v_caches.copy()
    source = np.array([4, -1, 6, 0, 11], slot_dtype)
    target = np.array([1, 2, -5, 9, 3], slot_dtype)
    cpu.copy_slots(k_expected, v_expected, source, target)
    assert launching.copy_slots(k_caches, v_caches, source, target) == width
    assert_same_bits(k_caches, k_expected)
    assert_same_bits(v_caches, v_expected)
