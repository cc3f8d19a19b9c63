"""The bits of FP8: every code, every half-precision value, and what rounding may get wrong."""

import ml_dtypes
import numba
import numpy as np
import pytest
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from kvpool.kernels import cpu, fp8
from tests import fp8_reference as reference

F16, F32 = np.dtype(np.float16), np.dtype(np.float32)
BF16 = np.dtype(ml_dtypes.bfloat16)
FORMATS = reference.FORMATS
# Divisions by the last ones are not exact; 0.015 is what a calibrated cache may have.
SCALES = (1.0, 0.25, 0.015, 0.3, 1 / 3, 7.7, 2.0**-40, 1.7e30)

JIT = not numba.config.DISABLE_JIT
# Coverage runs read the kernels as plain Python, a thousand times slower.
NUM_RANDOM = 1_000_000 if JIT else 1_000
NUM_NEAR = 40 if JIT else 1
EACH = 1 if JIT else 61
needs_jit = pytest.mark.skipif(not JIT, reason="too slow as plain Python")


def encode(values, name, scale=1.0):
    """Codes of values of any float dtype, by way of a cache."""
    rows = values.reshape(1, 1, -1)
    cache = np.zeros(rows.shape, np.uint8)
    cpu.scatter_fp8(cache, cache.copy(), rows, rows, np.zeros(1, np.int64), name, scale, 1.0)
    return cache.ravel()


def decode(codes, name, scale=1.0, dtype=F32):
    """Values of uint8 codes, by way of a cache."""
    cache = codes.reshape(1, 1, -1)
    out = np.empty(cache.shape, dtype)
    slots = np.zeros(1, np.int64)
    cpu.gather_fp8(cache, cache, slots, name, scale, 1.0, out, out.copy())
    return out.ravel()


def assert_same_values(actual, expected):
    """Equal bits, but for the payloads of NaN."""
    assert actual.dtype == expected.dtype
    is_nan = np.isnan(expected.astype(F32))
    np.testing.assert_array_equal(np.isnan(actual.astype(F32)), is_nan)
    unsigned = f"u{actual.dtype.itemsize}"
    np.testing.assert_array_equal(actual.view(unsigned)[~is_nan], expected.view(unsigned)[~is_nan])


def every_half(dtype):
    return np.arange(65536, dtype=np.uint16).view(dtype)


def random_patterns(count, seed):
    return np.random.default_rng(seed).integers(0, 2**32, count, dtype=np.uint32).view(F32)


# The reference itself


@pytest.mark.parametrize("name", FORMATS)
def test_reference_agrees_with_ml_dtypes(name):
    dtype = getattr(ml_dtypes, name)
    codes = np.arange(256, dtype=np.uint8)
    assert_same_values(reference.decode(codes, name), codes.view(dtype).astype(F32))
    largest = fp8.FORMATS[name].largest
    values = np.concatenate([reference.near_codes(name), random_patterns(NUM_RANDOM, 1)])
    with np.errstate(invalid="ignore"):
        clipped = np.clip(values, -largest, largest).astype(dtype).view(np.uint8)
    expected = np.where(np.isnan(values), reference.NAN, clipped)
    np.testing.assert_array_equal(reference.encode(values, name), expected)


# Encode


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
@pytest.mark.parametrize("scale", SCALES)
def test_encode_every_half_precision_value(dtype, scale, name):
    values = every_half(dtype)[::EACH]
    expected = reference.quantise(values, scale, name)
    np.testing.assert_array_equal(encode(values, name, scale), expected)


@pytest.mark.parametrize("name", FORMATS)
def test_encode_near_every_code_and_every_tie(name):
    values = reference.near_codes(name, NUM_NEAR)
    expected = reference.encode(values, name)
    np.testing.assert_array_equal(encode(values, name), expected)
    for scale in SCALES:
        rows = values * F32.type(scale)
        expected = reference.quantise(rows, scale, name)
        np.testing.assert_array_equal(encode(rows, name, scale), expected)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("scale", SCALES)
def test_encode_random_float32(scale, name):
    in_range = np.random.default_rng(3).normal(0, 50 * scale, NUM_RANDOM).astype(F32)
    values = np.concatenate([random_patterns(NUM_RANDOM // 4, 2), in_range])
    expected = reference.quantise(values, scale, name)
    np.testing.assert_array_equal(encode(values, name, scale), expected)


@needs_jit
@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS)
def test_encode_every_float32(name):
    chunk = 2**22
    first = np.append(reference.first_patterns(name), [0x7F800001, 2**31])  # NaN, and the end
    positive = np.append(np.arange(len(first) - 2), reference.NAN).astype(np.uint8)
    negative = np.append(positive[:-1] | 0x80, reference.NAN).astype(np.uint8)
    caches, slots = np.empty((2, 1, 1, chunk), np.uint8), np.zeros(1, np.int64)
    for start in range(0, 2**31, chunk):
        patterns = np.arange(start, start + chunk, dtype=np.uint32).reshape(1, 1, -1)
        rows = patterns.view(F32), (patterns | np.uint32(0x80000000)).view(F32)
        cpu.scatter_fp8(*caches, *rows, slots, name, 1.0, 1.0)
        counts = np.diff(first.clip(start, start + chunk))
        assert (caches[0] == positive.repeat(counts)).all()
        assert (caches[1] == negative.repeat(counts)).all()


@pytest.mark.parametrize(
    ("value", "e4m3fn", "e5m2"),
    [
        (0.0, 0x00, 0x00),
        (-0.0, 0x80, 0x80),
        (1.0, 0x38, 0x3C),
        (-1.0, 0xB8, 0xBC),
        (np.nan, 0x7F, 0x7F),
        (-np.nan, 0x7F, 0x7F),
        (np.inf, 0x7E, 0x7B),
        (-np.inf, 0xFE, 0xFB),
        (448.0, 0x7E, 0x5F),
        (465.0, 0x7E, 0x5F),  # ml_dtypes, which does not saturate, makes NaN of it
        (57344.0, 0x7E, 0x7B),
        (61440.0, 0x7E, 0x7B),  # ml_dtypes and torch make infinity of it
        (3.4028235e38, 0x7E, 0x7B),
        (2.0**-9, 0x01, 0x18),  # the smallest e4m3fn
        (2.0**-10, 0x00, 0x14),  # a tie between zero and it
        (1.5 * 2.0**-9, 0x02, 0x1A),  # a tie between it and the next
        (2.0**-16, 0x00, 0x01),  # the smallest e5m2
        (2.0**-17, 0x00, 0x00),  # a tie between zero and it
        (-(2.0**-17), 0x80, 0x80),
        (1e-45, 0x00, 0x00),  # the smallest float32
        (-1e-45, 0x80, 0x80),
        (0.99 * 2.0**-6, 0x08, 0x24),  # a subnormal that rounds up to the first normal value
        (1.0625, 0x38, 0x3C),  # a tie, the lower code is even
        (1.1875, 0x3A, 0x3D),  # a tie, the upper code is even
    ],
)
def test_encode_known_values(value, e4m3fn, e5m2):
    for name, code in zip(FORMATS, (e4m3fn, e5m2), strict=True):
        quotient = F32.type(value)
        assert reference.encode(np.array([quotient]), name)[0] == code
        assert fp8.ENCODE[name](quotient) == code
        assert encode(np.array([quotient]), name)[0] == code


def test_encode_divides_instead_of_multiplying():
    # The quotient is just below a tie, and its product with 1 / 0.015 on it or above.
    value, scale = F32.type(0.0003662109375), F32.type(0.015)
    assert reference.encode(np.array([value * (1 / scale)]), FORMATS[0])[0] == 0x0D
    assert encode(np.array([value]), FORMATS[0], 0.015)[0] == 0x0C


# Decode


@pytest.mark.parametrize("name", FORMATS)
def test_decode_every_code(name):
    codes = np.arange(256, dtype=np.uint8)
    assert_same_values(decode(codes, name), reference.decode(codes, name))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=str)
@pytest.mark.parametrize("scale", SCALES)
def test_decode_every_code_scales_in_float32(dtype, scale, name):
    codes = np.arange(256, dtype=np.uint8)
    expected = reference.dequantise(codes, scale, name, dtype)
    assert_same_values(decode(codes, name, scale, dtype), expected)


@pytest.mark.parametrize("name", FORMATS)
def test_encode_what_was_decoded_gives_the_code(name):
    codes = np.arange(256, dtype=np.uint8)
    codes = codes[np.isfinite(reference.decode(codes, name))]
    for scale in SCALES:
        np.testing.assert_array_equal(encode(decode(codes, name, scale), name, scale), codes)


# One source for every compiler


@pytest.mark.parametrize("name", FORMATS)
def test_plain_python_functions_agree(name):
    # Without a warning: in the interpreter NumPy tells of every scalar that wraps around.
    values = np.concatenate([reference.near_codes(name, 1), random_patterns(2_000, 4)])
    codes = [fp8.ENCODE[name](value) for value in values]
    assert {type(code) for code in codes} == {np.uint8}
    np.testing.assert_array_equal(codes, reference.encode(values, name))
    every_code = np.arange(256, dtype=np.uint8)
    decoded = [fp8.DECODE[name](code) for code in every_code]
    assert {type(value) for value in decoded} == {np.float32}
    assert_same_values(np.array(decoded), reference.decode(every_code, name))


@pytest.mark.sim
@pytest.mark.parametrize("name", FORMATS)
def test_device_functions_agree(name):
    from numba import cuda

    encode_one = cuda.jit(device=True)(fp8.ENCODE[name])
    decode_one = cuda.jit(device=True)(fp8.DECODE[name])

    @cuda.jit
    def convert(values, codes, every_code, decoded):
        for i in range(values.size):
            codes[i] = encode_one(values[i])
            decoded[i] = decode_one(every_code[i])

    values = np.append(reference.near_codes(name, 0)[:192], random_patterns(64, 6))
    codes, decoded = np.zeros(256, np.uint8), np.zeros(256, F32)
    every_code = np.arange(256, dtype=np.uint8)
    convert[1, 1](values, codes, every_code, decoded)
    np.testing.assert_array_equal(codes, reference.encode(values, name))
    assert_same_values(decoded, reference.decode(every_code, name))


@intrinsic
def _fma(typing_context, a, b, c):
    def generate(context, builder, signature, arguments):
        single = ir.FloatType()
        kind = ir.FunctionType(single, [single] * 3)
        return builder.call(
            builder.module.declare_intrinsic("llvm.fma", [single], kind), arguments
        )

    return types.float32(types.float32, types.float32, types.float32), generate


def _divide(value, scale, inverse):
    first = np.float32(value * inverse)
    rest = _fma(np.float32(-first), scale, value)
    corrected = _fma(rest, inverse, first)
    is_kept = first == 0 or not abs(first) <= np.float32(3.4028235e38)
    return np.float32(first if is_kept else corrected)


@needs_jit
@pytest.mark.parametrize("name", FORMATS)
def test_divide_by_two_fused_multiply_adds_gives_the_same_codes(name):
    # What `kvpool.kernels.fp8` promises to those who write kernels for a GPU.
    divide = numba.vectorize(_divide)
    rng = np.random.default_rng(5)
    quotients = np.concatenate(
        [
            reference.near_codes(name),
            rng.normal(0, 30, 200_000).astype(F32),
            np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1e-45, -1e-45, 3e38], F32),
        ]
    )
    for exponent in (-60, -20, -7, -1, 0, 3, 30, 60):
        scale = F32.type(rng.uniform(0.5, 1) * 2.0**exponent)
        with np.errstate(all="ignore"):
            rows = np.concatenate([quotients * scale, quotients[-8:]])
            divided = divide(rows, scale, F32.type(1) / scale)
        expected = reference.quantise(rows, scale, name)
        np.testing.assert_array_equal(reference.encode(divided, name), expected)
