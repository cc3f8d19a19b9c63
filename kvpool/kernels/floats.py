"""float16 and bfloat16 as bits, for kernels whose compiler has neither type.

numba takes no float16 or bfloat16 arrays. Kernels see such an array through `bits_view`: float16
as uint16, bfloat16 as int16. The two integer types are the tag by which `convert` picks the right
conversion when a kernel is compiled, so no kernel carries a type code or branches on one per
element.

All conversions round to nearest, ties to even, and keep signed zeros, subnormals, infinities and
NaN (the payload of a NaN may change, and a signalling one becomes quiet). Values go through
float32, float64 too. The functions are straight-line selects, so that LLVM vectorises the loops
around them, and use no float32 subnormals, so that a process which flushes those to zero gets the
same bits.
"""

from typing import Any

import ml_dtypes
import numpy as np
from numba import types
from numba.extending import overload

from kvpool.kernels.jit import kernel

_VIEW_BY_TYPE_NUMBER = {
    np.dtype(np.float16).num: np.dtype(np.uint16),
    np.dtype(ml_dtypes.bfloat16).num: np.dtype(np.int16),
}


def bits_view(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return `array` as kernels take it: float16 as uint16, bfloat16 as int16, others as they are.

    A caller may do this once and hand the view to a kernel in place of the array.
    """
    view = _VIEW_BY_TYPE_NUMBER.get(array.dtype.num)
    return array if view is None else array.view(view)


@kernel()
def bf16_to_f32(bits: Any) -> Any:
    """Return the float32 of bfloat16 `bits` (uint16). Exact."""
    return np.uint32(np.uint32(bits) << np.uint32(16)).view(np.float32)


@kernel()
def f32_to_bf16(value: Any) -> Any:
    """Return the bfloat16 bits (uint16) nearest to `value` (float32)."""
    number = np.float32(value)
    word = number.view(np.uint32)
    upper = np.uint32(word >> np.uint32(16))
    # Half an ulp less one, plus one for odd neighbours: the carry rounds ties to even, up to
    # infinity, and never reaches the sign.
    odd = np.uint64(upper & np.uint32(1))
    rounded = np.uint32(np.uint64(word) + np.uint64(0x7FFF) + odd)
    # Rounding could carry a NaN to infinity or past the sign, so it is cut and made quiet instead.
    quiet = np.uint32(upper | np.uint32(0x0040))
    chosen = quiet if np.isnan(number) else np.uint32(rounded >> np.uint32(16))
    return np.uint16(chosen)


@kernel()
def f16_to_f32(bits: Any) -> Any:
    """Return the float32 of float16 `bits` (uint16). Exact."""
    half = np.uint32(bits)
    sign = np.uint32(np.uint32(half & np.uint32(0x8000)) << np.uint32(16))
    magnitude = np.uint32(half & np.uint32(0x7FFF))
    shifted = np.uint32(magnitude << np.uint32(13))
    # The exponent bias grows from 15 to 127; infinity and NaN move up by as much again, to
    # exponent 255.
    rebias = np.uint32(0x70000000) if magnitude >= np.uint32(0x7C00) else np.uint32(0x38000000)
    normal = np.uint32(shifted + rebias)
    # Subnormals are their mantissa times 2^-24; int32 because that is what vector units convert
    # from.
    subnormal = np.float32(np.float32(np.int32(magnitude)) * np.float32(2.0**-24)).view(np.uint32)
    chosen = subnormal if magnitude < np.uint32(0x0400) else normal
    return np.uint32(chosen | sign).view(np.float32)


@kernel()
def f32_to_f16(value: Any) -> Any:
    """Return the float16 bits (uint16) nearest to `value` (float32)."""
    word = np.float32(value).view(np.uint32)
    magnitude = np.uint32(word & np.uint32(0x7FFFFFFF))
    sign = np.uint32(np.uint32(word >> np.uint32(16)) & np.uint32(0x8000))
    # Below 2^-14 the result is a multiple of 2^-24, which is the ulp of floats in [0.5, 1): adding
    # 0.5 lets the hardware round at that place. Larger values are replaced first, for a NaN must
    # not reach the sum.
    is_small = magnitude < np.uint32(0x38800000)
    # The wrap in uint32 is for numba, which cannot compile `.view` on the result of a conditional.
    small = np.uint32(magnitude if is_small else np.uint32(0))
    summed = np.float32(small.view(np.float32) + np.float32(0.5)).view(np.uint32)
    subnormal = np.uint32(summed - np.uint32(0x3F000000))
    # Values from 65520 up round to infinity; the cap keeps the carry from running into NaN codes.
    capped = min(max(magnitude, np.uint32(0x38800000)), np.uint32(0x47800000))
    odd = np.uint32(np.uint32(capped >> np.uint32(13)) & np.uint32(1))
    biased = np.uint32(capped - np.uint32(0x38000000))
    normal = np.uint32(np.uint32(biased + np.uint32(0x0FFF) + odd) >> np.uint32(13))
    payload = np.uint32(np.uint32(magnitude >> np.uint32(13)) & np.uint32(0x03FF))
    quiet = np.uint32(payload | np.uint32(0x7E00))
    finite = subnormal if is_small else normal
    chosen = quiet if magnitude > np.uint32(0x7F800000) else finite
    return np.uint16(chosen | sign)


def convert(value: Any, like: Any) -> Any:
    """Return `value` in the element type of `like`, both of them elements of a `bits_view`.

    Equal types hand the bits through untouched. Inside a kernel the choice is made at compile
    time.
    """
    if type(value) is type(like):
        return value
    return _NARROW[type(like).__name__](_WIDEN[type(value).__name__](value))


@kernel()
def _same(value: Any) -> Any:
    return value


@kernel()
def _as_f32(value: Any) -> Any:
    return np.float32(value)


@kernel()
def _tagged_bf16_to_f32(value: Any) -> Any:
    return bf16_to_f32(np.uint16(value))


@kernel()
def _f32_to_tagged_bf16(value: Any) -> Any:
    return np.int16(f32_to_bf16(value))


_WIDEN = {
    "float32": _same,
    "float64": _as_f32,
    "uint16": f16_to_f32,
    "int16": _tagged_bf16_to_f32,
}
_NARROW = {
    "float32": _same,
    "uint16": f32_to_f16,
    "int16": _f32_to_tagged_bf16,
}


# Not strict: numba would ask for the annotations again on the lambdas, which cannot carry any.
@overload(convert, strict=False)
def _convert_when_compiling(value: Any, like: Any) -> Any:
    if value == like:
        return lambda value, like: value
    if not (isinstance(value, types.Type) and value.name in _WIDEN and like.name in _NARROW):
        return None
    widen, narrow = _WIDEN[value.name], _NARROW[like.name]
    return lambda value, like: narrow(widen(value))
