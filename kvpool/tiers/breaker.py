"""CircuitBreaker: whether a tier that failed is asked again yet.

It opens after a few failures in a row, or one time-out. While it is open nobody asks; after a
while one call may try (half-open), and its answer closes the breaker or opens it for twice as
long. Time is monotonic: a wall clock that jumps changes nothing.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

LONGEST_PAUSE_S = 30.0


class CircuitBreaker:
    """Closed, open or half-open; any thread may ask.

    Parameters
    ----------
    max_failures : int
        Failures in a row that open it.
    retry_s : float
        Seconds until the first try; doubled after each that fails, up to `LONGEST_PAUSE_S`.
    clock : callable
        Seconds that only ever grow.
    """

    def __init__(
        self,
        max_failures: int = 3,
        retry_s: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.num_opened = 0
        self._max_failures = max_failures
        self._retry_s = retry_s
        self._clock = clock
        self._lock = threading.RLock()
        self._failures = 0
        self._pause_s = retry_s
        self._retry_at: float | None = None  # None: closed
        self._is_trying = False

    @property
    def state(self) -> str:
        """``"closed"``, ``"open"`` or ``"half-open"``."""
        with self._lock:
            if self._retry_at is None:
                return "closed"
            return "half-open" if self._is_trying else "open"

    def allows(self) -> bool:
        """Whether a call may be made now; if this is the try of a half-open breaker, only it."""
        with self._lock:
            if self._retry_at is None:
                return True
            if self._is_trying or self._clock() < self._retry_at:
                return False
            self._is_trying = True
            return True

    def withdraw(self) -> None:
        """The call that was allowed was not made."""
        with self._lock:
            self._is_trying = False

    def succeeded(self) -> None:
        """The tier answered."""
        with self._lock:
            self._failures, self._is_trying = 0, False
            self._retry_at, self._pause_s = None, self._retry_s

    def failed(self) -> bool:
        """A call raised; whether this opened the breaker."""
        with self._lock:
            self._failures += 1
            if self._retry_at is None and self._failures < self._max_failures:
                return False
            return self._open()

    def trip(self) -> bool:
        """A call took too long: open at once."""
        with self._lock:
            return self._open()

    def _open(self) -> bool:
        was_closed = self._retry_at is None
        self._retry_at = self._clock() + self._pause_s
        self._pause_s = min(LONGEST_PAUSE_S, 2 * self._pause_s)
        self._is_trying = False
        self.num_opened += was_closed
        return was_closed
