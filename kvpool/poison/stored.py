"""StoredPages: the stored bits of whole pages, to be poisoned, looked at and hashed.

Bits, not numbers: NaN compares unequal to itself, and FP8 is bytes.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from functools import reduce
from operator import and_
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvpool.storage import KVStorage

# NaN, and none that arithmetic or a put makes: payloads of their own, and in FP8 a sign, for a put
# turns every NaN into 0x7F.
POISON = {
    "float32": 0x7FC0DEAD,
    "float16": 0x7EAD,
    "bfloat16": 0x7FED,
    "float8_e4m3fn": 0xFF,
    "float8_e5m2": 0xFD,
}
# What a look copies at once: little enough to stay in a cache until it was compared.
CHUNK_BYTES = 1 << 19


class StoredPages:
    """Whole pages of a storage as bits; the scratch page is out of reach.

    Page ids are int32 or int64 ``[n]`` on the host, answers are NumPy arrays. On a CUDA device
    every look waits for it.

    Parameters
    ----------
    storage : KVStorage
        Whose pages.
    """

    def __init__(self, storage: KVStorage) -> None:
        self.device = storage.device
        self.num_layers, self.page_size = storage.num_layers, storage.page_size
        self.num_slots = storage.num_slots
        bits = np.dtype(f"uint{8 * storage.dtype.itemsize}")
        self.code = bits.type(POISON[storage.dtype.name])
        shape = (self.num_layers, -1, self.page_size * int(np.prod(storage.row_shape)))
        planes = [
            plane.view(bits).reshape(shape) for plane in (storage.key_cache, storage.value_cache)
        ]
        self._layers = [[plane[layer] for layer in range(self.num_layers)] for plane in planes]
        self._num_at_once = max(1, CHUNK_BYTES // (shape[-1] * bits.itemsize))

    def fill(self, pages: NDArray[Any]) -> None:
        """Poison whole pages on every layer."""
        if pages.size:
            found = self.device.to_device(pages)
            for layer in self._all_layers():
                layer[found] = self.code

    def are_poison(self, pages: NDArray[Any]) -> NDArray[np.bool_]:
        """Which pages are poison and nothing else, bool ``[n]``."""
        return self._in_every_layer(pages, lambda found: (found == self.code).all(axis=1))

    def have_poison(self, pages: NDArray[Any]) -> NDArray[np.bool_]:
        """Which pages have any poison, bool ``[n]``."""
        return ~self._in_every_layer(pages, lambda found: (found != self.code).all(axis=1))

    def first_poison(self, page: int, num_tokens: int | None = None) -> tuple[int, int] | None:
        """``(layer, offset)`` of the first poison among the first tokens of a page, or None."""
        num_tokens = self.page_size if num_tokens is None else num_tokens
        for layers in self._layers:
            for layer, plane in enumerate(layers):
                tokens = plane[page].reshape(self.page_size, -1)[:num_tokens]
                offsets = np.flatnonzero(self.device.to_host((tokens == self.code).any(axis=1)))
                if offsets.size:
                    return layer, int(offsets[0])
        return None

    def poisoned_slots(self, layer: int, slots: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which slots ``[n]`` of a layer have any poison in K or V, bool ``[n]``."""
        found, poisoned = self.device.to_device(slots), np.zeros(slots.size, np.bool_)
        for layers in self._layers:
            rows = layers[layer].reshape(self.num_slots, -1)[found] == self.code
            poisoned |= self.device.to_host(rows.any(axis=1))
        return poisoned

    def hashes(self, pages: NDArray[Any]) -> NDArray[np.uint32]:
        """CRC-32 of each page's K and V over all layers, uint32 ``[n]``."""
        out = [0] * pages.size
        for layer in self._all_layers():
            for start, chunk in self._chunks(pages):
                rows = self.device.to_host(layer[self.device.to_device(chunk)])
                for i, row in enumerate(rows, start):
                    out[i] = zlib.crc32(row.data, out[i])
        return np.array(out, np.uint32)

    def _all_layers(self) -> Iterator[Any]:
        for layers in self._layers:
            yield from layers

    def _chunks(self, pages: NDArray[Any]) -> Iterator[tuple[int, NDArray[Any]]]:
        for start in range(0, pages.size, self._num_at_once):
            yield start, pages[start : start + self._num_at_once]

    def _in_every_layer(self, pages: NDArray[Any], look: Any) -> NDArray[np.bool_]:
        """`look` at each page ``[n, elements]`` in K and V of every layer, and-ed."""
        out = np.ones(pages.size, np.bool_)
        for start, chunk in self._chunks(pages):
            found = self.device.to_device(chunk)
            # Brought together on the device, so that the host waits for it once.
            answers = [look(layer[found]) for layer in self._all_layers()]
            together = reduce(and_, answers)
            out[start : start + chunk.size] = self.device.to_host(together)
        return out
