"""LRUIndex: what fits into so many bytes, the least recently used going first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import Generic, TypeVar

from kvpool.numbers import whole_number

V = TypeVar("V")


class LRUIndex(Generic[V]):
    """Entries with a size each, bounded by the sum of the sizes; not thread-safe.

    `HostTier` keeps its records in one, and `kvpool.replay` asks one what a tier of some size
    would still have.

    Parameters
    ----------
    capacity_bytes : int or None
        Of all entries together; None: without bound.
    """

    def __init__(self, capacity_bytes: int | None) -> None:
        if capacity_bytes is not None:
            whole_number(capacity_bytes, "capacity_bytes")
        self.capacity_bytes = capacity_bytes
        self.num_bytes = 0
        self.num_evicted = 0
        self._entries: OrderedDict[bytes, tuple[V, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: bytes) -> bool:
        """Whether `key` is there; no access."""
        return key in self._entries

    def get(self, key: bytes) -> V | None:
        """The value of `key`, which becomes the most recently used; None where it is not there."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        self._entries.move_to_end(key)
        return entry[0]

    def touch(self, key: bytes) -> bool:
        """Make `key` the most recently used; whether it is there."""
        if key not in self._entries:
            return False
        self._entries.move_to_end(key)
        return True

    def put(self, key: bytes, value: V, num_bytes: int) -> list[V] | None:
        """Enter `key` as the most recently used, in place of what it had.

        Returns
        -------
        list or None
            The values that had to go, a replaced one too; None if it is larger than everything
            together: then nothing has changed.
        """
        if self.capacity_bytes is not None and num_bytes > self.capacity_bytes:
            return None
        gone: list[V] = []
        old = self._entries.pop(key, None)
        if old is not None:
            gone.append(old[0])
            self.num_bytes -= old[1]
        self._entries[key] = (value, num_bytes)
        self.num_bytes += num_bytes
        while self.capacity_bytes is not None and self.num_bytes > self.capacity_bytes:
            _, (value_gone, bytes_gone) = self._entries.popitem(last=False)
            self.num_bytes -= bytes_gone
            self.num_evicted += 1
            gone.append(value_gone)
        return gone

    def put_new(self, keys: Iterable[bytes], value: V, num_bytes: int) -> None:
        """`put` one after the other what is not there, all with one value and size.

        What is there stays as it is, and that is no access.
        """
        limit = self.capacity_bytes
        if limit is not None and num_bytes > limit:
            return
        entries, entry = self._entries, (value, num_bytes)
        for key in keys:
            if key in entries:
                continue
            entries[key] = entry
            self.num_bytes += num_bytes
            while limit is not None and self.num_bytes > limit:
                self.evict()

    def evict(self) -> V | None:
        """Take the least recently used entry out, as one evicted; its value, None if empty."""
        if not self._entries:
            return None
        _, (value, num_bytes) = self._entries.popitem(last=False)
        self.num_bytes -= num_bytes
        self.num_evicted += 1
        return value

    def discard(self, key: bytes) -> V | None:
        """Take `key` out; its value, or None where it was not there."""
        entry = self._entries.pop(key, None)
        if entry is None:
            return None
        self.num_bytes -= entry[1]
        return entry[0]

    def clear(self) -> None:
        """Take everything out."""
        self._entries.clear()
        self.num_bytes = 0
