"""float16 and bfloat16 as bits: every pattern, and what rounding may get wrong."""

import ml_dtypes
import numba
import numpy as np
import pytest

from kvpool.kernels import cpu, floats

BF16 = np.dtype(ml_dtypes.bfloat16)
F16 = np.dtype(np.float16)
F32 = np.dtype(np.float32)
F64 = np.dtype(np.float64)

# Coverage runs read the kernels as plain Python, a thousand times slower.
NUM_RANDOM = 1_000 if numba.config.DISABLE_JIT else 1_000_000


@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
def test_convert_every_pattern_to_float32_is_exact(dtype):
    patterns = np.arange(65536, dtype=np.uint16).view(dtype).reshape(-1, 1, 1)
    slots = np.arange(len(patterns))
    out = np.empty(patterns.shape, F32)
    cpu.gather(patterns, patterns, slots, out, out.copy())
    expected = patterns.astype(F32)
    is_nan = np.isnan(expected)
    np.testing.assert_array_equal(out[~is_nan].view(np.uint32), expected[~is_nan].view(np.uint32))
    assert np.isnan(out[is_nan]).all()


@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
def test_convert_float32_rounds_to_nearest_even(dtype):
    rng = np.random.default_rng(20)
    patterns = np.arange(65536, dtype=np.uint16).view(dtype).astype(F32)
    finite = np.sort(patterns[np.isfinite(patterns)])
    with np.errstate(over="ignore", invalid="ignore"):
        midpoints = ((finite[1:].astype(F64) + finite[:-1].astype(F64)) / 2).astype(F32)
        values = np.concatenate(
            [
                patterns,
                midpoints,
                np.nextafter(midpoints, F32.type(np.inf)),
                np.nextafter(midpoints, F32.type(-np.inf)),
                rng.integers(0, 2**32, NUM_RANDOM, dtype=np.uint32).view(F32),
            ]
        )
        expected = values.astype(dtype)
    rows = values.reshape(-1, 1, 1)
    cache = np.zeros(rows.shape, dtype)
    cpu.scatter(cache, cache.copy(), rows, rows, np.arange(len(rows)))
    is_nan = np.isnan(values)
    seen, wanted = cache.ravel()[~is_nan], expected[~is_nan]
    np.testing.assert_array_equal(seen.view(np.uint16), wanted.view(np.uint16))
    assert np.isnan(cache.ravel()[is_nan].astype(F32)).all()


@pytest.mark.parametrize(
    ("value", "half", "brain"),
    [
        (1.0, 0x3C00, 0x3F80),
        (-0.0, 0x8000, 0x8000),
        (65519.0, 0x7BFF, 0x4780),  # the largest that float16 does not round to infinity
        (65520.0, 0x7C00, 0x4780),
        (2.0**-24, 0x0001, 0x3380),  # the smallest float16
        (2.0**-25, 0x0000, 0x3300),  # a tie between zero and it
        (-np.inf, 0xFC00, 0xFF80),
        (3.4028235e38, 0x7C00, 0x7F80),
    ],
)
def test_convert_scalar_gives_known_bits(value, half, brain):
    assert floats.f32_to_f16(np.float32(value)) == half
    assert floats.f32_to_bf16(np.float32(value)) == brain


def test_convert_outside_a_kernel_agrees_with_inside():
    half, brain = np.uint16(0x3E00), np.int16(0x3FC0)  # 1.5 both
    assert floats.convert(half, np.float32(0)) == 1.5
    assert floats.convert(brain, np.float32(0)) == 1.5
    assert floats.convert(np.float64(1.5), half) == half
    assert floats.convert(half, brain) == brain
    assert floats.convert(brain, half) == half


def test_view_bits_of_each_dtype_shares_memory():
    for dtype, seen in ((F32, np.float32), (F64, np.float64), (F16, np.uint16), (BF16, np.int16)):
        array = np.zeros((2, 3), dtype)
        view = floats.bits_view(array)
        assert view.dtype == seen
        assert np.shares_memory(view, array)
