"""FP8: the one definition of its bits, for every device.

Storing a value takes two steps, reading it two more:

1. ``quotient = x / scale`` in float32, a real division, to nearest.
2. ``code = encode(quotient)``.
3. ``value = decode(code)``, exact in float32.
4. ``value * scale`` in float32, then to the compute dtype, to nearest, ties to even.

`encode` is CUDA's saturating conversion, ``cvt.rn.satfinite``:

- to nearest, ties to even, subnormals included; what is below half of the smallest one is zero;
- anything past the largest finite value, infinities included, becomes that value: 448 (0x7E) in
  e4m3fn, 57344 (0x7B) in e5m2;
- NaN becomes 0x7F in both formats, its sign is dropped;
- every other sign is kept, that of zero too.

`decode` gives NaN for 0x7F and 0xFF in e4m3fn, which has no infinities, and for exponent field 31
in e5m2 with a mantissa; without one these are the infinities. `encode` makes no infinity, but a
cache may have been filled by others.

The functions are plain Python over NumPy scalars, without calls, so that `numba.njit`,
``numba.cuda.jit(device=True)``, the CUDA simulator and the interpreter read one source. Hence the
casts: numba widens uint32 to uint64 in arithmetic, NumPy warns when a scalar wraps around. They
are straight-line selects, which LLVM vectorises, and use no float32 subnormals, so that a process
which flushes those to zero gets the same codes. They must not be compiled with fastmath.

On a GPU, ``x / scale`` compiles to ``div.rn.f32``, which is right and slow. With ``inverse = 1 /
scale`` rounded to nearest, two fused multiply-adds give the same codes::

    quotient = x * inverse
    rest = fma(-quotient, scale, x)
    quotient = fma(rest, inverse, quotient)

where the first quotient must be kept if it is zero (the sums lose the sign of -0.0) or not finite
(the rest would be NaN). Of 3e9 quotients by scales in [2^-60, 2^60], all in reach of a code, none
changed its code. ``x * inverse`` alone is not this rule: it changes about one code in ten million.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Format:
    """How one FP8 format lays out its byte: sign, exponent, mantissa.

    Attributes
    ----------
    name : str
        The name of the dtype in torch and ml_dtypes.
    mantissa_bits : int
        Bits of the mantissa; 7 less these are the exponent.
    bias : int
        What is added to the exponent of a normal value.
    largest : float
        The largest finite value.
    has_infinity : bool
        Whether the highest exponent is for infinity and NaN, as in IEEE 754, or whether only the
        highest code is NaN.
    """

    name: str
    mantissa_bits: int
    bias: int
    largest: float
    has_infinity: bool


E4M3FN = Format("float8_e4m3fn", 3, 7, 448.0, has_infinity=False)
E5M2 = Format("float8_e5m2", 2, 15, 57344.0, has_infinity=True)
FORMATS = {form.name: form for form in (E4M3FN, E5M2)}


def make_encode(form: Format) -> Callable[[Any], Any]:
    """Return ``encode(quotient)``: float32 to the code, uint8, that is nearest in this format."""
    # Constants for the closure: compilers see them as literals.
    smallest_normal = np.float32(2.0 ** (1 - form.bias)).view(np.uint32)
    largest = np.float32(form.largest).view(np.uint32)
    dropped_bits = 23 - form.mantissa_bits
    shift, lift = np.uint32(dropped_bits), np.uint32(dropped_bits << 23)
    rebias = np.uint32((128 - form.bias + dropped_bits) << form.mantissa_bits)

    def encode(quotient: Any) -> Any:
        word = np.float32(quotient).view(np.uint32)
        sign = np.uint32(np.uint32(word >> np.uint32(24)) & np.uint32(0x80))
        magnitude = np.uint32(word & np.uint32(0x7FFFFFFF))
        # NaN is capped too and must not reach the sum.
        capped = np.uint32(min(magnitude, largest))
        exponent = np.uint32(np.uint32(max(capped, smallest_normal)) & np.uint32(0x7F800000))
        # The float32 whose ulp is the step between codes here: the sum rounds where they do, and
        # what it adds to the bits counts steps. Subnormals need no case of their own.
        rounder = np.uint32(exponent + lift)
        summed = np.float32(capped.view(np.float32) + rounder.view(np.float32)).view(np.uint32)
        steps = np.uint32(summed - rounder)
        finite = np.uint32(np.uint32(steps + np.uint32(rounder >> shift)) - rebias)
        signed = np.uint32(finite | sign)
        return np.uint8(np.uint32(0x7F) if magnitude > np.uint32(0x7F800000) else signed)

    return encode


def make_decode(form: Format) -> Callable[[Any], Any]:
    """Return ``decode(code)``: uint8 or wider, below 256, to float32. Exact."""
    shift = np.uint32(23 - form.mantissa_bits)
    smallest_normal = np.uint32(1 << form.mantissa_bits)
    step = np.float32(2.0 ** (1 - form.bias - form.mantissa_bits))
    rebias = np.uint32((127 - form.bias) << 23)
    # Codes from `first_special` up move from the highest exponent to that of float32, and keep the
    # mantissa, which tells infinity from NaN.
    highest_exponent = 0x7F >> form.mantissa_bits
    infinity = highest_exponent << form.mantissa_bits
    first_special = np.uint32(infinity if form.has_infinity else 0x7F)
    special = np.uint32((0xFF - highest_exponent) << 23)

    def decode(code: Any) -> Any:
        byte = np.uint32(code)
        sign = np.uint32(np.uint32(byte & np.uint32(0x80)) << np.uint32(24))
        magnitude = np.uint32(byte & np.uint32(0x7F))
        moved = np.uint32(magnitude << shift)
        normal = np.uint32(moved + np.uint32(special if magnitude >= first_special else rebias))
        # int32 because that is what vector units convert from.
        subnormal = np.float32(np.float32(np.int32(magnitude)) * step).view(np.uint32)
        chosen = np.uint32(subnormal if magnitude < smallest_normal else normal)
        return np.uint32(chosen | sign).view(np.float32)

    return decode


encode_e4m3fn = make_encode(E4M3FN)
decode_e4m3fn = make_decode(E4M3FN)
encode_e5m2 = make_encode(E5M2)
decode_e5m2 = make_decode(E5M2)
ENCODE = {E4M3FN.name: encode_e4m3fn, E5M2.name: encode_e5m2}
DECODE = {E4M3FN.name: decode_e4m3fn, E5M2.name: decode_e5m2}
