"""StagingArena: host memory through which records move, in buffers that are lent.

A buffer is lent to whoever fills or reads it, and to every call of a tier that works on it. It
comes back when the last of them lets go: the buffer of a call that hangs stays with that call, so
that nothing else is in it if the tier writes to it after all.
"""

from __future__ import annotations

import threading

import numpy as np
from numpy.typing import NDArray

_ALIGNMENT = 4096


class StagingBuffer:
    """Rows for records, lent by a `StagingArena`.

    Attributes
    ----------
    rows : ndarray
        uint8 ``[num_rows, record_bytes]``.
    """

    def __init__(self, arena: StagingArena, rows: NDArray[np.uint8]) -> None:
        self.rows = rows
        self.num_holders = 1
        self._arena = arena

    @property
    def is_shared(self) -> bool:
        """Whether somebody else has it too: a call that has not returned."""
        return self.num_holders > 1

    def hold(self) -> None:
        """Have it too."""
        self._arena.lend(self)

    def release(self) -> None:
        """Let go of it."""
        self._arena.take_back(self)


class StagingArena:
    """Buffers of equal size in one piece of memory, which tiers are told of.

    Parameters
    ----------
    num_buffers, num_rows : int
        Buffers, and records in each.
    record_bytes : int
        Length of a record.
    """

    def __init__(self, num_buffers: int, num_rows: int, record_bytes: int) -> None:
        num_bytes = num_buffers * num_rows * record_bytes
        memory = np.zeros(num_bytes + _ALIGNMENT, np.uint8)
        begin = -memory.ctypes.data % _ALIGNMENT
        self.memory = memory[begin : begin + num_bytes]
        self.num_rows = num_rows
        rows = self.memory.reshape(num_buffers, num_rows, record_bytes)
        # Not buffers: they know the arena, and the memory would wait for the collector.
        self._free = list(rows)
        self._changed = threading.Condition()

    @property
    def num_free(self) -> int:
        """Buffers that nobody has."""
        return len(self._free)

    def take(self, timeout_s: float = 0.0) -> StagingBuffer | None:
        """A buffer that nobody else has; None where none comes free in time."""
        with self._changed:
            if not self._changed.wait_for(lambda: bool(self._free), timeout_s):
                return None
            return StagingBuffer(self, self._free.pop())

    def lend(self, buffer: StagingBuffer) -> None:
        """Count one more who has `buffer`."""
        with self._changed:
            buffer.num_holders += 1

    def take_back(self, buffer: StagingBuffer) -> None:
        """Count one less; the last one brings it back."""
        with self._changed:
            buffer.num_holders -= 1
            if buffer.num_holders == 0:
                self._free.append(buffer.rows)
                self._changed.notify()
