"""Pauses: a thread in the background lets the scheduler have the interpreter, again and again."""

from __future__ import annotations

import time

# A page takes about a microsecond, and a record as long as a few pages. Python itself would let
# the scheduler wait for its switch interval, 5 ms.
PAGES_AT_ONCE = 64
_PAGES_A_RECORD = 8
_PAUSE_S = 2e-5


class Pauses:
    """Sleeps for a moment after every so many pages, if it is to."""

    def __init__(self) -> None:
        self.wanted = False
        """Whether the thread that works now shall pause."""
        self._num_pages = 0

    def after(self, num_pages: int) -> None:
        """So many pages of a record, at most `PAGES_AT_ONCE`, are done."""
        self._num_pages += num_pages + _PAGES_A_RECORD
        if self._num_pages >= PAGES_AT_ONCE:
            self._num_pages = 0
            if self.wanted:
                time.sleep(_PAUSE_S)
