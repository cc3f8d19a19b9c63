"""PastBatches: the latest batches of a stream, for those who missed some."""

from __future__ import annotations

from collections import deque

from kvpool.numbers import INT32_MAX, whole_number


class PastBatches:
    """Batches by rising sequence, bounded in number and in bytes; not thread-safe.

    Parameters
    ----------
    most_batches, most_bytes : int
        Beyond either the oldest go.

    Raises
    ------
    ValueError, TypeError
        A bound below 1.
    """

    def __init__(self, most_batches: int, most_bytes: int) -> None:
        self.most_batches = whole_number(most_batches, "replay_batches", 1, INT32_MAX // 4)
        self._most_bytes = whole_number(most_bytes, "replay_bytes", 1)
        self._batches: deque[tuple[int, bytes]] = deque()
        self._latest_anew = -1
        self._next = 0
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._batches)

    def append(self, sequence: int, payload: bytes, *, anew: bool) -> None:
        """Enter a batch; `anew` says that it begins with `AllBlocksCleared`."""
        self._batches.append((sequence, payload))
        self._next = sequence + 1
        self.num_bytes += len(payload)
        if anew:
            self._latest_anew = sequence
        while len(self._batches) > self.most_batches or self.num_bytes > self._most_bytes:
            self.num_bytes -= len(self._batches.popleft()[1])

    def since(self, sequence: int) -> tuple[list[tuple[int, bytes]], bool]:
        """Batches from `sequence` on, and whether they tell a subscriber all that it lacks.

        Where some of them are gone already, the batches from the latest on that told everything
        anew say as much.
        """
        oldest = self._batches[0][0] if self._batches else self._next
        complete = sequence >= oldest
        if not complete and self._latest_anew >= oldest:
            sequence, complete = self._latest_anew, True
        return [batch for batch in self._batches if batch[0] >= sequence], complete
