"""FP8 codes inside CPU kernels: which format an element has, and what it stands for.

Caches hold codes of both formats as uint8. Kernels see such a cache through `codes_view`: e4m3fn
as uint8, e5m2 as int8. As in `kvpool.kernels.floats`, the integer type is the tag by which a
function is picked when a kernel is compiled. The bits themselves are defined in
`kvpool.kernels.fp8`.
"""

from typing import Any

import numpy as np
from numba.extending import overload

from kvpool.kernels import fp8
from kvpool.kernels.floats import convert
from kvpool.kernels.jit import kernel

_VIEW_BY_FORMAT = {fp8.E4M3FN.name: np.dtype(np.uint8), fp8.E5M2.name: np.dtype(np.int8)}

_encode_e4m3fn = kernel()(fp8.encode_e4m3fn)
_encode_e5m2 = kernel()(fp8.encode_e5m2)
_decode_e4m3fn = kernel()(fp8.decode_e4m3fn)
_decode_e5m2 = kernel()(fp8.decode_e5m2)


def codes_view(cache: np.ndarray[Any, Any], fp8_format: str) -> np.ndarray[Any, Any]:
    """Return a uint8 `cache` as kernels take it: tagged with its format, a key of `fp8.FORMATS`.

    A view that was taken before goes through unchanged.
    """
    view = _VIEW_BY_FORMAT[fp8_format]
    return cache if cache.dtype == view else cache.view(view)


@kernel()
def _tagged_encode_e5m2(quotient: Any) -> Any:
    return np.int8(_encode_e5m2(quotient))


@kernel()
def _tagged_decode_e5m2(code: Any) -> Any:
    return _decode_e5m2(np.uint8(code))


_ENCODE = {"uint8": _encode_e4m3fn, "int8": _tagged_encode_e5m2}
_DECODE = {"uint8": _decode_e4m3fn, "int8": _tagged_decode_e5m2}


def quantise(value: Any, scale: Any, like: Any) -> Any:
    """Return the code of ``value / scale`` in the format of `like`, an element of a `codes_view`.

    `value` is an element of a `floats.bits_view`, `scale` is float32.
    """
    quotient = np.float32(convert(value, np.float32(0.0)) / scale)
    return _ENCODE[type(like).__name__](quotient)


def stored_value(element: Any, scale: Any) -> Any:
    """Return the value of a stored element, float32.

    That is ``decode(element) * scale`` for an element of a `codes_view`; an element of a
    `floats.bits_view` is not scaled.
    """
    decode = _DECODE.get(type(element).__name__)
    if decode is None:
        return convert(element, np.float32(0.0))
    return np.float32(decode(element) * scale)


@overload(quantise, strict=False)
def _quantise_when_compiling(value: Any, scale: Any, like: Any) -> Any:
    encode = _ENCODE[like.name]
    return lambda value, scale, like: encode(np.float32(convert(value, np.float32(0.0)) / scale))


@overload(stored_value, strict=False)
def _stored_value_when_compiling(element: Any, scale: Any) -> Any:
    decode = _DECODE.get(element.name)
    if decode is None:
        return lambda element, scale: convert(element, np.float32(0.0))
    return lambda element, scale: np.float32(decode(element) * scale)
