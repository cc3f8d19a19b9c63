"""CPU kernels against plain NumPy, bit for bit."""

import itertools

import ml_dtypes
import numpy as np
import pytest

from kvpool.kernels import cpu

BF16 = np.dtype(ml_dtypes.bfloat16)
F16 = np.dtype(np.float16)
F32 = np.dtype(np.float32)
F64 = np.dtype(np.float64)
STORAGE_DTYPES = (F32, F16, BF16)

TOTAL_SLOTS = 23
HEADS, DIM = 3, 5


def bits(array):
    """Return the bits of an array as unsigned integers, so that NaN and -0.0 compare too."""
    return np.ascontiguousarray(array).view(f"u{array.dtype.itemsize}")


def assert_same_bits(actual, expected):
    assert actual.dtype == expected.dtype
    np.testing.assert_array_equal(bits(actual), bits(expected))


def cast(array, dtype):
    """Convert through float32, as the kernels do."""
    if array.dtype == dtype:
        return array
    with np.errstate(over="ignore"):
        return array.astype(F32).astype(dtype)


def random_rows(rng, shape, dtype):
    """Rows with values of every magnitude that float32 has, zeros and infinities; no NaN."""
    values = rng.integers(0, 2**32, shape, dtype=np.uint32).view(F32)
    values = np.where(np.isnan(values), F32.type(1.5), values)
    small = rng.random(shape) < 0.5
    values = np.where(small, rng.standard_normal(shape).astype(F32), values)
    return cast(values, dtype)


def random_cache(rng, dtype, *, layers=(), slots=TOTAL_SLOTS, heads=HEADS, dim=DIM):
    return random_rows(rng, (*layers, slots, heads, dim), dtype)


@pytest.fixture
def rng():
    return np.random.default_rng(20)


# Scatter


@pytest.fixture(params=[0, cpu.FEW_BYTES], ids=["by a kernel", "without one"])
def _both_ways(request, monkeypatch):
    monkeypatch.setattr(cpu, "FEW_BYTES", request.param)


both_ways = pytest.mark.usefixtures("_both_ways")


@both_ways
@pytest.mark.parametrize(
    ("storage", "source"),
    list(itertools.product(STORAGE_DTYPES, (*STORAGE_DTYPES, F64))),
    ids=str,
)
def test_scatter_each_dtype_pair_matches_numpy(storage, source, rng):
    k_cache, v_cache = random_cache(rng, storage), random_cache(rng, storage)
    k_rows, v_rows = (random_rows(rng, (7, HEADS, DIM), source) for _ in "kv")
    slots = rng.permutation(TOTAL_SLOTS)[:7]
    k_expected, v_expected = k_cache.copy(), v_cache.copy()
    k_expected[slots], v_expected[slots] = cast(k_rows, storage), cast(v_rows, storage)
    cpu.scatter(k_cache, v_cache, k_rows, v_rows, slots)
    assert_same_bits(k_cache, k_expected)
    assert_same_bits(v_cache, v_expected)


@pytest.mark.parametrize("storage", STORAGE_DTYPES, ids=str)
@pytest.mark.parametrize("source", [F32, F16, BF16, F64], ids=str)
def test_scatter_nan_stays_nan(storage, source):
    cache = np.zeros((2, 1, 1), storage)
    rows = np.full((2, 1, 1), np.nan, source)
    rows[1] = -rows[1]
    cpu.scatter(cache, cache, rows, rows, np.arange(2))
    assert np.isnan(cache.astype(F32)).all()


@both_ways
def test_scatter_same_dtype_keeps_nan_payloads():
    codes = np.array([0x7C01, 0xFE55, 0x7FFF, 0xFC01], np.uint16)
    rows = codes.view(F16).reshape(-1, 1, 1)
    cache = np.zeros((4, 1, 1), F16)
    cpu.scatter(cache, cache.copy(), rows, rows, np.arange(4))
    np.testing.assert_array_equal(cache.view(np.uint16).ravel(), codes)


@both_ways
@pytest.mark.parametrize("slot_dtype", [np.int64, np.int32])
def test_scatter_slots_outside_are_not_written(slot_dtype, rng):
    k_cache, v_cache = random_cache(rng, F32), random_cache(rng, F32)
    rows = random_rows(rng, (7, HEADS, DIM), F32)
    # 20 is the first slot that the caller keeps out of reach, 23 the first past the end.
    slots = np.array([3, -1, 20, 19, TOTAL_SLOTS, -(2**31), 2**31 - 1], slot_dtype)
    k_expected, v_expected = k_cache.copy(), v_cache.copy()
    for cache in (k_expected, v_expected):
        cache[3], cache[19] = rows[0], rows[3]
    cpu.scatter(k_cache, v_cache, rows, rows, slots, num_slots=20)
    assert_same_bits(k_cache, k_expected)
    assert_same_bits(v_cache, v_expected)


@both_ways
def test_scatter_limit_past_the_end_stops_at_the_end(rng):
    buffer = random_cache(rng, F32)
    expected = buffer.copy()
    rows = random_rows(rng, (2, HEADS, DIM), F32)
    cache = buffer[:4]
    expected[1] = rows[0]
    cpu.scatter(cache, cache, rows, rows, np.array([1, 4]), num_slots=100)
    assert_same_bits(buffer, expected)


@both_ways
def test_scatter_strided_rows_match_numpy(rng):
    n, source = 6, BF16
    fused = random_rows(rng, (n, 3 * HEADS, DIM), source)
    heads_first = random_rows(rng, (HEADS, n, DIM), source)
    dim_first = random_rows(rng, (n, DIM, HEADS), source)
    sources = {
        "slices of a fused projection": (fused[:, HEADS : 2 * HEADS], fused[:, 2 * HEADS :]),
        "heads first": (heads_first.transpose(1, 0, 2),) * 2,
        "dim before heads": (dim_first.transpose(0, 2, 1),) * 2,
        "every second row": (random_rows(rng, (2 * n, HEADS, DIM), source)[::2],) * 2,
        "rows from the last": (random_rows(rng, (n, HEADS, DIM), source)[::-1],) * 2,
        "one row for all": (np.broadcast_to(fused[:1, :HEADS], (n, HEADS, DIM)),) * 2,
    }
    slots = rng.permutation(TOTAL_SLOTS)[:n]
    for name, (k_rows, v_rows) in sources.items():
        k_cache, v_cache = random_cache(rng, F32), random_cache(rng, F32)
        k_expected, v_expected = k_cache.copy(), v_cache.copy()
        k_expected[slots], v_expected[slots] = cast(k_rows, F32), cast(v_rows, F32)
        cpu.scatter(k_cache, v_cache, k_rows, v_rows, slots)
        assert (bits(k_cache) == bits(k_expected)).all(), name
        assert (bits(v_cache) == bits(v_expected)).all(), name


@both_ways
@pytest.mark.parametrize(("heads", "dim"), [(1, 1), (1, 7), (5, 1), (2, 64), (3, 33)])
def test_move_odd_shapes_matches_numpy(heads, dim, rng):
    cache = random_cache(rng, F32, heads=heads, dim=dim)
    rows = random_rows(rng, (4, heads, dim), F32)
    slots = np.array([5, 0, 22, 7])
    expected = cache.copy()
    expected[slots] = rows
    cpu.scatter(cache, cache, rows, rows, slots)
    assert_same_bits(cache, expected)
    k_out, v_out = np.empty_like(rows), np.empty_like(rows)
    cpu.gather(cache, cache, slots, k_out, v_out)
    assert_same_bits(k_out, rows)
    assert_same_bits(v_out, rows)


@both_ways
def test_move_when_v_has_another_dim_keeps_each_shape(rng):
    k_cache, v_cache = random_cache(rng, F32), random_cache(rng, F32, dim=2)
    k_rows = random_rows(rng, (2, HEADS, DIM), F32)
    v_rows = random_rows(rng, (2, HEADS, 2), F32)
    slots = np.array([4, 9])
    cpu.scatter(k_cache, v_cache, k_rows, v_rows, slots)
    k_out, v_out = np.empty_like(k_rows), np.empty_like(v_rows)
    cpu.gather(k_cache, v_cache, slots, k_out, v_out)
    assert_same_bits(k_out, k_rows)
    assert_same_bits(v_out, v_rows)


# Gather


@pytest.mark.parametrize(
    ("storage", "wanted"), list(itertools.product(STORAGE_DTYPES, repeat=2)), ids=str
)
def test_gather_each_dtype_pair_matches_numpy(storage, wanted, rng):
    k_cache, v_cache = random_cache(rng, storage), random_cache(rng, storage)
    slots = rng.permutation(TOTAL_SLOTS)[:7]
    slots[4] = slots[1]
    k_out, v_out = (random_rows(rng, (7, HEADS, DIM), wanted) for _ in "kv")
    cpu.gather(k_cache, v_cache, slots, k_out, v_out)
    assert_same_bits(k_out, cast(k_cache[slots], wanted))
    assert_same_bits(v_out, cast(v_cache[slots], wanted))


@pytest.mark.parametrize("slot_dtype", [np.int64, np.int32])
def test_gather_slots_outside_reads_zeros(slot_dtype, rng):
    cache = random_cache(rng, F32)
    slots = np.array([2, -1, TOTAL_SLOTS, TOTAL_SLOTS - 1], slot_dtype)
    k_out, v_out = (np.full((4, HEADS, DIM), np.nan, F32) for _ in "kv")
    cpu.gather(cache, cache, slots, k_out, v_out)
    expected = np.zeros((4, HEADS, DIM), F32)
    expected[0], expected[3] = cache[2], cache[-1]
    assert_same_bits(k_out, expected)
    assert_same_bits(v_out, expected)


def test_gather_into_strided_rows_matches_numpy(rng):
    cache = random_cache(rng, F32)
    out = np.zeros((2, HEADS, 4, DIM), F32)
    slots = np.array([1, 8, -1, 3])
    cpu.gather(cache, cache, slots, out[0].transpose(1, 0, 2), out[1].transpose(1, 0, 2))
    expected = cache[slots]
    expected[2] = 0
    for heads_first in out:
        np.testing.assert_array_equal(heads_first.transpose(1, 0, 2), expected)


# Zero and copy


@pytest.mark.parametrize("dtype", [*STORAGE_DTYPES, np.dtype(np.uint8)], ids=str)
def test_zero_slots_clears_them_on_every_layer(dtype, rng):
    shape = (2, TOTAL_SLOTS, HEADS, DIM)
    k_cache, v_cache = (rng.integers(1, 100, shape).astype(dtype) for _ in "kv")
    k_expected, v_expected = k_cache.copy(), v_cache.copy()
    for cache in (k_expected, v_expected):
        cache[:, [0, 7, 22]] = 0
    cpu.zero(k_cache, v_cache, np.array([7, -1, 22, TOTAL_SLOTS, 0]))
    assert_same_bits(k_cache, k_expected)
    assert_same_bits(v_cache, v_expected)


@pytest.mark.parametrize("dtype", [*STORAGE_DTYPES, np.dtype(np.uint8)], ids=str)
def test_copy_slots_moves_them_on_every_layer(dtype, rng):
    shape = (2, TOTAL_SLOTS, HEADS, DIM)
    k_cache, v_cache = (rng.integers(1, 100, shape).astype(dtype) for _ in "kv")
    k_expected, v_expected = k_cache.copy(), v_cache.copy()
    for cache in (k_expected, v_expected):
        cache[:, [1, 9]] = cache[:, [4, 4]]
    sources = np.array([4, 4, -1, 5, TOTAL_SLOTS, 6])
    targets = np.array([1, 9, 10, -1, 11, TOTAL_SLOTS])
    cpu.copy_slots(k_cache, v_cache, sources, targets)
    assert_same_bits(k_cache, k_expected)
    assert_same_bits(v_cache, v_expected)


def test_call_without_slots_changes_nothing(rng):
    caches = random_cache(rng, F32, layers=(2,))
    expected = caches.copy()
    none, no_rows = np.empty(0, np.int64), np.empty((0, HEADS, DIM), F32)
    cpu.scatter(caches[0], caches[1], no_rows, no_rows, none)
    cpu.gather(caches[0], caches[1], none, no_rows, no_rows)
    cpu.zero(caches, caches, none)
    cpu.copy_slots(caches, caches, none, none)
    assert_same_bits(caches, expected)
