"""KnownKeys: what a tier is known to have, so that it is not asked, or given it, again."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from kvpool.tiers.index import LRUIndex


class KnownKeys:
    """Page keys that a tier had when it was last heard of them; it may have lost them since.

    Any thread may use it. A key that is known by mistake costs a record that is not written, until
    a read misses it.

    Parameters
    ----------
    max_keys : int
        The most to remember; the least recently used is forgotten first.
    """

    def __init__(self, max_keys: int) -> None:
        self._keys = LRUIndex[None](max_keys)
        self._lock = threading.RLock()

    def __len__(self) -> int:
        return len(self._keys)

    def have(self, keys: Sequence[bytes]) -> NDArray[np.bool_]:
        """Whether each key ``[n]`` is known, bool ``[n]``; an access."""
        with self._lock:
            return np.array([self._keys.touch(key) for key in keys], np.bool_)

    def add(self, keys: Iterable[bytes]) -> None:
        """The tier has them."""
        with self._lock:
            for key in keys:
                self._keys.put(key, None, 1)

    def discard(self, keys: Iterable[bytes]) -> None:
        """The tier did not have them."""
        with self._lock:
            for key in keys:
                self._keys.discard(key)
