"""OpenCalls: the calls that are inside of something, which is closed when they are done."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from kvpool.errors import KVCacheStateError


class OpenCalls:
    """Counts calls on something that would break them if it closed under them.

    Parameters
    ----------
    what : str
        Its name in the error of a call that comes too late.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._condition = threading.Condition()
        self._num_calls = 0
        self._refuses = False

    @contextmanager
    def call(self) -> Iterator[None]:
        """Around each call.

        Raises
        ------
        KVCacheStateError
            It is closed, or about to be.
        """
        with self._condition:
            if self._refuses:
                raise KVCacheStateError(f"{self._what} is closed: make another one")
            self._num_calls += 1
        try:
            yield
        finally:
            with self._condition:
                self._num_calls -= 1
                self._condition.notify_all()

    def refuse(self, timeout_s: float) -> bool:
        """Let no call in any more and wait for those inside; whether all are out."""
        with self._condition:
            self._refuses = True
            return self._condition.wait_for(lambda: not self._num_calls, timeout_s)
