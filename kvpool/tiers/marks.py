"""MarkWanted: how the background gets a mark of the scheduler's stream, on a GPU."""

from __future__ import annotations

import threading
from collections import deque
from typing import Any

from kvpool.device.side_stream import SideStream


class MarkWanted:
    """Asks the scheduler's thread for a mark, with its next call, and waits a while for it.

    CuPy's current stream belongs to a thread: only the scheduler's can say which stream its pages
    were written on.

    Parameters
    ----------
    arrivals : deque
        What the scheduler's thread looks at.
    stream : SideStream
        Makes the mark.
    timeout_s : float
        How long to wait.
    """

    def __init__(self, arrivals: deque[Any], stream: SideStream, timeout_s: float) -> None:
        self._arrivals, self._stream, self._timeout_s = arrivals, stream, timeout_s
        self._given = threading.Event()
        self._mark: Any = None

    def take(self) -> Any:
        """A mark that was made after this call began; None if none came in time."""
        self._given.clear()
        self._mark = None
        self._arrivals.append(self)
        return self._mark if self._given.wait(self._timeout_s) else None

    def give(self) -> None:
        """Make the mark, in the scheduler's thread."""
        if not self._given.is_set() and (mark := self._stream.mark()) is not None:
            self._mark = mark
            self._given.set()
