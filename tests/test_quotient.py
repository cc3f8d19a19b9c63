"""The division of CUDA's FP8 kernels, compiled for the host from the same code, against ``/``.

A code changes only where the quotient and the true one lie on different sides of a boundary
between two codes. All boundaries of both formats are 16 numbers times a power of two, so the cases
to try are known: for every divisor, the dividends next to a boundary.
"""

import numba
import numpy as np
import pytest
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from kvpool.kernels import fp8
from kvpool.kernels.cuda_scales import SMALLEST_SCALE, divisor_words, scale_bits

if numba.config.ENABLE_CUDASIM or numba.config.DISABLE_JIT:
    pytest.skip("what is tested is compiled code", allow_module_level=True)

F32 = np.dtype(np.float32)


@pytest.fixture(scope="module")
def divide():
    from kvpool.kernels import cuda_convert

    @intrinsic
    def divided(typing_context, value, power, divisor, inverse):
        def generate(context, builder, signature, arguments):
            return cuda_convert.divide(builder, *arguments)

        return types.float32(*(types.float32,) * 4), generate

    return divided


@pytest.fixture(scope="module")
def count_wrong_sides(divide):
    """A function that tries dividends around every boundary for divisors of these mantissas."""

    @intrinsic
    def as_float(typing_context, bits):
        def generate(context, builder, signature, arguments):
            return builder.bitcast(arguments[0], ir.FloatType())

        return types.float32(types.uint32), generate

    @numba.njit
    def count(first, last):
        wrong_sides, wrong_products = 0, 0
        one = np.float32(1)
        for mantissa in range(first, last):
            divisor = as_float(np.uint32(0x3F800000 | mantissa))
            inverse = one / divisor
            for sixteenth in range(16, 32):
                boundary = np.float32(sixteenth / 16)
                below = 2.0**-25 if sixteenth == 16 else 2.0**-24
                # The boundary, and the two points where rounding to float32 reaches it.
                for shift in (0.0, 2.0**-24, -below):
                    nearest = np.float32((sixteenth / 16 + shift) * divisor)
                    for ulps in (-(2.0**-23), 0.0, 2.0**-23):
                        value = np.float32(nearest + nearest * ulps)
                        true = value / divisor
                        made = divide(value, one, divisor, inverse)
                        product = np.float32(value * inverse)
                        wrong_sides += (made > boundary) != (true > boundary)
                        wrong_sides += (made < boundary) != (true < boundary)
                        wrong_products += (product > boundary) != (true > boundary)
        return wrong_sides, wrong_products

    return count


def test_every_divisor_is_on_the_right_side_of_every_boundary(count_wrong_sides):
    wrong_sides, wrong_products = count_wrong_sides(0, 1 << 23)
    assert wrong_sides == 0
    assert wrong_products > 0, "the cases are meant to be hard: a product alone must fail some"


@pytest.fixture(scope="module")
def codes(divide):
    """A function that encodes quotients made in both ways."""

    def make(form):
        encode = numba.njit(fp8.ENCODE[form])

        @numba.njit(error_model="numpy")
        def both(values, scale, power, divisor, inverse, made, true):
            for i in range(values.size):
                made[i] = encode(divide(values[i], power, divisor, inverse))
                true[i] = encode(np.float32(values[i] / scale))

        return both

    return {form: make(form) for form in fp8.FORMATS}


@pytest.mark.parametrize("form", fp8.FORMATS)
@pytest.mark.parametrize(
    "scale",
    [
        *(1.0, 0.015, 3.3, 448.0, 1 / 3, 2.0**-126, 1.5 * 2.0**-126),
        *(SMALLEST_SCALE, 1e-30, 2.0**127, float(np.finfo(F32).max), 1 - 2.0**-24, 1 + 2.0**-23),
    ],
)
def test_codes_are_those_of_the_division(form, scale, codes):
    rng = np.random.default_rng(9)
    anything = rng.integers(0, 2**32, 1 << 18, dtype=np.uint32).view(F32)
    with np.errstate(over="ignore"):
        in_reach = np.ldexp(rng.uniform(-2, 2, 1 << 18), rng.integers(-19, 17, 1 << 18)) * scale
        in_reach = in_reach.astype(F32)
    every_bf16 = (np.arange(1 << 16, dtype=np.uint32) << 16).view(F32)
    values = np.concatenate([anything, in_reach, every_bf16])
    words, power = divisor_words(scale)
    divisor, inverse, power = np.array([words & 0xFFFFFFFF, words >> 32, power], np.uint32).view(
        F32
    )
    assert 1 <= divisor < 2
    made, true = np.empty(values.size, np.uint8), np.empty(values.size, np.uint8)
    codes[form](values, F32.type(scale), power, divisor, inverse, made, true)
    np.testing.assert_array_equal(made, true)


@pytest.mark.parametrize("scale", [0.0, -1.0, np.nan, np.inf, 1e39, SMALLEST_SCALE / 2])
def test_scales_without_a_normal_float32_are_refused(scale):
    with np.errstate(over="ignore"), pytest.raises(ValueError, match="FP8 scale"):
        divisor_words(scale)


def test_scale_bits_are_those_of_the_nearest_float32():
    assert np.uint32(scale_bits(0.015)).view(F32) == F32.type(0.015)
