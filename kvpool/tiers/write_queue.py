"""WriteQueue: cached pages that wait to be written to tiers; a full one drops the oldest."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvpool.tiers.ending import LONGEST_SLEEP_S


class CachedPage(NamedTuple):
    """A page of the tree, as it was when the tree was last heard of.

    Attributes
    ----------
    page_id : int
        Where its K and V lie.
    generation : int
        Of that page id: tells whether the page has stayed.
    key : bytes
        Page key.
    tokens : ndarray
        int32 ``[page_size]``.
    """

    page_id: int
    generation: int
    key: bytes
    tokens: NDArray[np.int32]


class WriteQueue:
    """First in, first out; bounded. Any thread may use it, one takes.

    Parameters
    ----------
    max_pages : int
        The most that wait.
    """

    def __init__(self, max_pages: int) -> None:
        self.max_pages = max_pages
        self.num_dropped = 0
        self._pages: deque[CachedPage] = deque()
        self._changed = threading.Condition()
        self._is_working = False
        self._is_woken = False
        self._closing = False

    def __len__(self) -> int:
        return len(self._pages)

    def add(self, pages: Iterable[CachedPage]) -> None:
        """Put pages at the end; what has no room is dropped, the oldest first."""
        with self._changed:
            if self._closing:
                return
            self._pages.extend(pages)
            while len(self._pages) > self.max_pages:
                self._pages.popleft()
                self.num_dropped += 1
            self._changed.notify_all()

    def wake(self) -> None:
        """Have `take` return, with nothing if there is nothing."""
        with self._changed:
            self._is_woken = True
            self._changed.notify_all()

    def take(self, num_pages: int, timeout_s: float = LONGEST_SLEEP_S) -> list[CachedPage] | None:
        """Up to `num_pages` of the oldest, when there are any; none after a while, or a `wake`.

        None after `close`.

        To take again is to say that the pages before are done with.
        """
        with self._changed:
            self._is_working = False
            self._changed.notify_all()
            self._changed.wait_for(
                lambda: self._pages or self._is_woken or self._closing, timeout_s
            )
            if self._closing:
                return None
            self._is_woken = False
            count = min(num_pages, len(self._pages))
            self._is_working = True
            return [self._pages.popleft() for _ in range(count)]

    def wait_until_idle(self, timeout_s: float) -> bool:
        """Wait until nothing waits and the taker is done; whether that came in time."""
        with self._changed:
            return self._changed.wait_for(
                lambda: self._closing or not (self._pages or self._is_working or self._is_woken),
                timeout_s,
            )

    def close(self) -> None:
        """Let go of everything; `take` gives None from now on."""
        with self._changed:
            self._closing = True
            self._pages.clear()
            self._changed.notify_all()
