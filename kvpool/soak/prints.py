"""Fingerprints: the K and V that a token must have, from what stands before it.

A row of K or V is a function of the namespace, all tokens up to its position, the layer and which
of the two it is. So two requests that may share a page must write the same bits, and a page that
belongs to anything else holds other ones. The values are exact in the pool's dtype: reads are
compared bit by bit.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from kvpool.dtypes import FLOAT_DTYPES

GOLDEN = 0x9E3779B97F4A7C15
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_BASE = np.uint64(0xD6E8FEB86659FD93)  # odd: every power of it has an inverse

# Bits of a fingerprint that one element can carry.
_ELEMENT_BITS = {
    "float32": 16,
    "float16": 11,
    "bfloat16": 8,
    "float8_e4m3fn": 6,
    "float8_e5m2": 5,
}
_FP8_TYPES: dict[str, Any] = {
    "float8_e4m3fn": ml_dtypes.float8_e4m3fn,
    "float8_e5m2": ml_dtypes.float8_e5m2,
}


def mixed(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Each 64-bit word scattered over all 64-bit words, one to one; `words` is overwritten."""
    words ^= words >> np.uint64(30)
    words *= _FIRST
    words ^= words >> np.uint64(27)
    words *= _SECOND
    words ^= words >> np.uint64(31)
    return words


def word(*numbers: int) -> np.uint64:
    """One word for a few integers."""
    found = 0
    for number in numbers:
        found = (found ^ (number & (2**64 - 1))) * GOLDEN + 1 & (2**64 - 1)
    return np.uint64(mixed(np.array([found], np.uint64))[0])


def stream(seed: int, start: int, end: int, vocabulary: int) -> NDArray[np.int32]:
    """Tokens ``[start, end)`` of the endless text of a seed; ``2**32`` words mean any int32."""
    places = np.arange(start, end, dtype=np.uint64) * np.uint64(GOLDEN) + word(seed)
    return (mixed(places) % np.uint64(vocabulary)).astype(np.uint32).view(np.int32)


class Powers:
    """Powers of the hash's base, as many as were asked for."""

    def __init__(self) -> None:
        self._found = np.ones(1, np.uint64)

    def upto(self, count: int) -> NDArray[np.uint64]:
        """At least `count` powers."""
        if self._found.size < count:
            factors = np.full(max(count, 2 * self._found.size), _BASE)
            factors[0] = 1
            self._found = np.multiply.accumulate(factors)
        return self._found


POWERS = Powers()


def extend_sums(before: np.uint64, tokens: NDArray[np.int32], start: int) -> NDArray[np.uint64]:
    """Hashes of all prefixes that end in `tokens`, the first of which stands at `start`."""
    terms = mixed(tokens.view(np.uint32).astype(np.uint64) + np.uint64(GOLDEN))
    terms *= POWERS.upto(start + tokens.size)[start : start + tokens.size]
    if terms.size:
        terms[:1] += before  # arrays wrap around silently, scalars warn
    return np.cumsum(terms, dtype=np.uint64)


class RowCode:
    """Rows of one shape and dtype for fingerprints.

    Parameters
    ----------
    dtype, compute_dtype : str
        As the pool's.
    num_layers, num_kv_heads, head_dim : int
        As the pool's.
    scale : float
        FP8 scale of K and V, 1.0 for other dtypes.
    """

    def __init__(
        self,
        dtype: str,
        compute_dtype: str,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        scale: float = 1.0,
    ) -> None:
        values = exact_values(dtype)
        self.dtype, self.compute_dtype = dtype, compute_dtype
        self.computed = values.astype(FLOAT_DTYPES[compute_dtype])
        """What `get` returns for each code."""
        stored = (values / np.float32(scale)).astype(_FP8_TYPES.get(dtype) or FLOAT_DTYPES[dtype])
        self.stored = stored.view(np.uint8) if dtype in _FP8_TYPES else stored
        """What the buffers hold for each code."""
        self.num_layers, self.num_kv_heads, self.head_dim = num_layers, num_kv_heads, head_dim
        self.num_elements = num_kv_heads * head_dim
        self._mask = np.uint16(values.size - 1)
        num_words = -(-self.num_elements // 4)
        self.salts = mixed(
            np.arange(1, num_layers * 2 * num_words + 1, dtype=np.uint64) * np.uint64(GOLDEN)
        ).reshape(num_layers, 2, 1, num_words)

    def codes(self, prints: NDArray[np.uint64]) -> NDArray[np.uint16]:
        """uint16 ``[num_layers, 2, n, heads * head_dim]`` for fingerprints ``[n]``: K, then V."""
        words = mixed(prints[None, None, :, None] + self.salts)
        codes = words.view(np.uint16)[..., : self.num_elements] & self._mask
        found: NDArray[np.uint16] = codes
        return found


def exact_values(dtype: str) -> NDArray[np.float32]:
    """A power of two of positive values that the dtype holds exactly, ascending.

    >>> exact_values("float8_e5m2")[:6].tolist(), exact_values("bfloat16").size
    ([4.0, 5.0, 6.0, 7.0, 8.0, 10.0], 256)
    """
    codes = np.arange(1 << _ELEMENT_BITS[dtype])
    mantissa_bits = {"float8_e4m3fn": 3, "float8_e5m2": 2}.get(dtype)
    if mantissa_bits is None:
        return (codes + 1).astype(np.float32)
    steps = 1 << mantissa_bits
    # Up to 240 and 896: far from saturation, also with a scale of 2.
    exponents = codes // steps - (3 if dtype == "float8_e4m3fn" else 0)
    return np.ldexp((steps + codes % steps).astype(np.float32), exponents).astype(np.float32)
