"""What `kvpool.kernels.cuda_convert` does, in NumPy: for numba's CUDA simulator."""

from collections.abc import Callable
from typing import Any

import numpy as np

from kvpool.kernels import fp8
from kvpool.kernels.cuda_units import DTYPES

Words = tuple[np.uint32, ...]
Array = np.ndarray[Any, Any]


def _elements(words: Words, dtype: Any, unit: int) -> Array:
    elements: Array = np.array(words, np.uint32).view(dtype)[:unit]
    return elements


def _words(elements: Array) -> Words:
    data = elements.tobytes()
    # Less than a word is the low part of one.
    return tuple(np.frombuffer(data + bytes(-len(data) % 4), np.uint32))


def _cast(elements: Array, target: str) -> Array:
    with np.errstate(over="ignore", invalid="ignore"):
        return elements.astype(np.float32).astype(DTYPES[target])


def simulated_conversion(source: str, target: str, unit: int) -> Callable[..., Words]:
    """Return the twin of `cuda_convert.conversion`."""
    return lambda words: _words(_cast(_elements(words, DTYPES[source], unit), target))


def simulated_quantisation(source: str, form: str, unit: int) -> Callable[..., Words]:
    """Return the twin of `cuda_convert.quantisation`."""
    encode = fp8.ENCODE[form]

    def quantise(words: Words, divisor: Any, power: Any) -> Words:
        values = _cast(_elements(words, DTYPES[source], unit), "float32")
        scale = np.array([int(divisor) & 0xFFFFFFFF], np.uint32).view(np.float32)
        factor = np.array([int(power)], np.uint32).view(np.float32)
        with np.errstate(all="ignore"):
            quotients = values * factor / scale
            return _words(np.array([encode(value) for value in quotients], np.uint8))

    return quantise


def simulated_dequantisation(form: str, target: str, unit: int) -> Callable[..., Words]:
    """Return the twin of `cuda_convert.dequantisation`."""
    decode = fp8.DECODE[form]

    def dequantise(words: Words, scale: Any) -> Words:
        codes = _elements(words, np.uint8, unit)
        factor = np.array([int(scale)], np.uint32).view(np.float32)
        with np.errstate(all="ignore"):
            values = np.array([decode(code) for code in codes], np.float32) * factor
            return _words(_cast(values, target))

    return dequantise
