"""WildTier: a tier that misbehaves; a script of the soak has its source."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

FAULTS = ("raises", "hangs", "tears", "swaps", "forgets", "is full", "claims all", "answers less")


class WildTier:
    """A tier over another, which misbehaves in as many of its next calls as it is told."""

    def __init__(self, tier: Any, pause_s: float) -> None:
        self.name = "wild"
        self._tier, self._pause_s = tier, pause_s
        self._fault, self._calls = "", 0

    def misbehave(self, fault: str, calls: int) -> None:
        """Have that many calls from now on go wrong."""
        self._fault, self._calls = fault, calls

    def _next_fault(self) -> str:
        if self._calls <= 0:
            return ""
        self._calls -= 1
        if self._fault == "raises":
            raise OSError("no way to the tier")
        if self._fault == "hangs":
            time.sleep(self._pause_s)
        return self._fault

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        """As the tier below, or wrong."""
        fault = self._next_fault()
        found: list[bool] = self._tier.exists(keys)
        if fault == "claims all":
            return [True] * len(keys)
        return found[1:] if fault == "answers less" else found

    def read(self, keys: Sequence[bytes], rows: NDArray[np.uint8]) -> list[bool]:
        """As the tier below, or wrong."""
        fault = self._next_fault()
        if fault == "forgets":
            self._tier.remove(keys)
        found: list[bool] = self._tier.read(keys, rows)
        if fault == "tears":
            rows[:, rows.shape[1] // 2 :] = 0
        elif fault == "swaps":
            rows[:] = rows[::-1].copy()
        elif fault == "claims all":
            found = [True] * len(keys)
        return found[1:] if fault == "answers less" else found

    def write(self, keys: Sequence[bytes], rows: NDArray[np.uint8]) -> list[bool]:
        """As the tier below, or wrong."""
        fault = self._next_fault()
        if fault in ("is full", "forgets"):
            return [fault == "forgets"] * len(keys)
        if fault in ("tears", "swaps"):
            rows = rows.copy() if fault == "tears" else rows[::-1].copy()
        if fault == "tears":
            rows[:, rows.shape[1] // 2 :] = 0
        found: list[bool] = self._tier.write(keys, rows)
        return found[1:] if fault == "answers less" else found

    def remove(self, keys: Sequence[bytes]) -> list[bool]:
        """As the tier below, or it raises."""
        self._next_fault()
        found: list[bool] = self._tier.remove(keys)
        return found

    def register(self, buffer: NDArray[np.uint8]) -> None:
        """As the tier below."""
        self._tier.register(buffer)

    def unregister(self, buffer: NDArray[np.uint8]) -> None:
        """As the tier below."""
        self._tier.unregister(buffer)

    def stats(self) -> Mapping[str, int]:
        """As the tier below, or it raises."""
        self._next_fault()
        found: Mapping[str, int] = self._tier.stats()
        return found

    def close(self) -> None:
        """As the tier below."""
        self._tier.close()
