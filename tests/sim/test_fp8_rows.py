"""FP8 scatter and gather in the simulator, against the CPU's kernels, code for code."""

import numpy as np
import pytest

from kvpool.kernels import cpu_fp8
from tests.fp8_reference import FORMATS
from tests.sim import launching
from tests.sim.arrays import BF16, F16, F32, F64, FLOATS, aligned, assert_same_bits, random_bits

pytestmark = [
    pytest.mark.sim,
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
]

TOTAL_SLOTS = 9
SLOTS = np.array([3, -1, 8, 0, 9, 6])
# Neither is a power of two; the values below reach every exponent of both formats.
K_SCALE, V_SCALE = 0.015, 3.3


@pytest.fixture
def rng():
    return np.random.default_rng(32)


def rows_for(rng, shape, dtype):
    """Rows that land on codes of all kinds: subnormal, normal, saturated, infinite, NaN."""
    exponents = rng.integers(-22, 20, shape)
    values = np.ldexp(rng.uniform(-2, 2, shape), exponents)
    values.flat[:6] = [np.nan, -np.nan, np.inf, -np.inf, 0.0, -0.0]
    with np.errstate(over="ignore"):
        return aligned(values.astype(dtype))


@pytest.mark.parametrize("unit", [None, 1], ids=["vectors", "scalars"])
@pytest.mark.parametrize("source", [*FLOATS, F64], ids=str)
@pytest.mark.parametrize("form", FORMATS)
def test_scatter_fp8(form, source, unit, rng):
    k_cache, v_cache = (random_bits(rng, (TOTAL_SLOTS, 2, 8), np.dtype(np.uint8)) for _ in "kv")
    k_rows, v_rows = (rows_for(rng, (len(SLOTS), 2, 8), source) for _ in "kv")
    k_expected, v_expected = k_cache.copy(), v_cache.copy()
    scales = K_SCALE, V_SCALE
    cpu_fp8.scatter_fp8(k_expected, v_expected, k_rows, v_rows, SLOTS, form, *scales)
    used = launching.scatter_fp8(k_cache, v_cache, k_rows, v_rows, SLOTS, form, *scales, unit=unit)
    assert used == (unit or {2: 8, 4: 4, 8: 1}[source.itemsize])
    assert_same_bits(k_cache, k_expected)
    assert_same_bits(v_cache, v_expected)


@pytest.mark.parametrize("unit", [None, 1], ids=["vectors", "scalars"])
@pytest.mark.parametrize("out", FLOATS, ids=str)
@pytest.mark.parametrize("form", FORMATS)
def test_gather_fp8(form, out, unit, rng):
    # All 256 codes, in both caches.
    codes = np.arange(256, dtype=np.uint8).reshape(8, 2, 16)
    k_cache, v_cache = aligned(codes), aligned(codes[::-1])
    slots = np.array([*range(8), -1, 8, 2**40])
    k_out, v_out = (random_bits(rng, (len(slots), 2, 16), out) for _ in "kv")
    k_expected, v_expected = k_out.copy(), v_out.copy()
    cpu_fp8.gather_fp8(k_cache, v_cache, slots, form, K_SCALE, V_SCALE, k_expected, v_expected)
    launching.gather_fp8(k_cache, v_cache, slots, form, K_SCALE, V_SCALE, k_out, v_out, unit)
    for actual, expected in ((k_out, k_expected), (v_out, v_expected)):
        # The payload of a NaN is not defined.
        both_nan = np.isnan(actual.astype(F32)) & np.isnan(expected.astype(F32))
        assert_same_bits(np.where(both_nan, 0, actual), np.where(both_nan, 0, expected))
        assert not actual[8:].any()


@pytest.mark.parametrize(
    "scale",
    [1.0, 2.0**-14, 1 / 3, float(np.finfo(np.float32).max), float(np.finfo(np.float32).tiny)],
)
@pytest.mark.parametrize("form", FORMATS)
def test_scatter_fp8_any_scale_is_a_division(form, scale, rng):
    near = rng.uniform(-1000, 1000, (4, 1, 16)) * min(scale, 1e35)
    k_rows = aligned(near.astype(F32))
    v_rows = aligned(rng.integers(0, 2**32, (4, 1, 16), dtype=np.uint32).view(F32))
    k_cache, v_cache = (np.zeros((TOTAL_SLOTS, 1, 16), np.uint8) for _ in "kv")
    k_expected, v_expected = k_cache.copy(), v_cache.copy()
    arguments = k_rows, v_rows, np.array([1, 2, 3, 4]), form, scale, scale
    cpu_fp8.scatter_fp8(k_expected, v_expected, *arguments)
    launching.scatter_fp8(k_cache, v_cache, *arguments, unit=4)
    assert_same_bits(k_cache, k_expected)
    assert_same_bits(v_cache, v_expected)


@pytest.mark.parametrize(("source", "heads", "dim"), [(BF16, 3, 5), (F32, 1, 7), (F16, 5, 6)])
def test_odd_heads_and_dims(source, heads, dim, rng):
    k_cache, v_cache = (np.zeros((TOTAL_SLOTS, heads, dim), np.uint8) for _ in "kv")
    k_rows, v_rows = (rows_for(rng, (len(SLOTS), heads, dim), source) for _ in "kv")
    k_expected, v_expected = k_cache.copy(), v_cache.copy()
    arguments = k_rows, v_rows, SLOTS.astype(np.int32), FORMATS[0], K_SCALE, V_SCALE
    cpu_fp8.scatter_fp8(k_expected, v_expected, *arguments, 8)
    launching.scatter_fp8(k_cache, v_cache, *arguments, 8)
    assert_same_bits(k_cache, k_expected)
    assert_same_bits(v_cache, v_expected)
