"""SideStream: copies in the background, beside the stream on which a pool works.

On a CPU there are no streams, and all of this does nothing. On a GPU (`kvpool.device.cuda`) the
scheduler's thread records a *mark* on its stream, and the background waits for that mark, on the
device, before it touches pages: so it sees what was written before, and overwrites nothing that
work queued before still reads. The GPU half has run against a stand-in for CuPy only.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class SideStream:
    """The side stream of a CPU: there is none."""

    needs_marks = False
    """Whether `after` wants a mark of the scheduler's thread."""

    def mark(self) -> Any:
        """Everything that the calling thread's current stream has been given so far."""
        return None

    @contextmanager
    def after(self, mark: Any) -> Iterator[None]:
        """A block whose device work comes after `mark`, and has ended when the block ends."""
        yield
