"""FP8 from the definition of its formats, in float64: what kernels are tested against.

Nothing here looks at the bits of a float. Codes without a sign count the values of a format in
ascending order, so rounding is a search among the midpoints between them.
"""

import numpy as np

from kvpool.kernels.fp8 import E4M3FN, E5M2

F32 = np.dtype(np.float32)
FORMATS = (E4M3FN.name, E5M2.name)
NAN = 0x7F

# (mantissa bits, bias, number of finite codes without a sign)
_SHAPES = {E4M3FN.name: (3, 7, 0x7F), E5M2.name: (2, 15, 0x7C)}


def finite_values(name):
    """Values of the codes 0, 1, .. up to the largest finite one, float64."""
    mantissa_bits, bias, num_codes = _SHAPES[name]
    exponent, mantissa = np.divmod(np.arange(num_codes), 2**mantissa_bits)
    fraction = mantissa / 2**mantissa_bits
    subnormal = fraction * 2.0 ** (1 - bias)
    return np.where(exponent == 0, subnormal, (1 + fraction) * 2.0 ** (exponent - bias))


def decode(codes, name):
    """Values of uint8 codes, float32."""
    finite = finite_values(name)
    table = np.full(128, np.nan)
    table[: len(finite)] = finite
    if name == E5M2.name:
        table[0x7C] = np.inf
    return np.concatenate([table, -table]).astype(F32)[codes]


def encode(quotients, name):
    """Codes of float32 quotients: to nearest, ties to even, saturating, NaN to 0x7F."""
    finite = finite_values(name)
    midpoints = (finite[1:] + finite[:-1]) / 2
    with np.errstate(invalid="ignore"):  # signalling NaN
        magnitudes = np.abs(quotients).astype(np.float64)
    codes = np.searchsorted(midpoints, magnitudes)
    is_tie = midpoints[np.minimum(codes, len(midpoints) - 1)] == magnitudes
    codes += is_tie & (codes % 2 == 1)
    codes += 0x80 * np.signbit(quotients)
    return np.where(np.isnan(quotients), NAN, codes).astype(np.uint8)


def first_patterns(name):
    """First bit pattern of a positive float32 for each code, as int64.

    A tie belongs to the even one of its codes.
    """
    finite = finite_values(name)
    midpoints = ((finite[1:] + finite[:-1]) / 2).astype(F32)
    goes_down = np.arange(len(midpoints)) % 2 == 0
    return np.concatenate([[0], midpoints.view(np.int32).astype(np.int64) + goes_down])


def quantise(rows, scale, name):
    """Codes of rows of any float dtype, divided by `scale` in float32."""
    with np.errstate(all="ignore"):
        return encode(rows.astype(F32) / F32.type(scale), name)


def dequantise(codes, scale, name, dtype=F32):
    """Values of codes, times `scale` in float32, in `dtype`."""
    with np.errstate(all="ignore"):
        return (decode(codes, name) * F32.type(scale)).astype(dtype)


def near_codes(name, steps=40):
    """Float32 values around every finite value and every midpoint, both signs."""
    finite = finite_values(name)
    # the last midpoint would be the first that an unsaturated format rounds up
    past_the_end = 2 * finite[-1] - finite[-2]
    values = np.append(finite, past_the_end)
    centres = np.concatenate([values, (values[1:] + values[:-1]) / 2]).astype(F32)
    patterns = centres.view(np.int32)[:, None] + np.arange(-steps, steps + 1)
    positive = patterns[patterns >= 0].astype(np.int32).view(F32)
    return np.concatenate([positive, -positive])
