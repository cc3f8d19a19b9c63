"""HostTier: records in the memory of this process."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from kvpool.device.pinned import pinned_bytes
from kvpool.errors import KVCacheStateError
from kvpool.numbers import INT64_MAX, whole_number
from kvpool.tiers.contract import Key, check_keys, check_name, check_rows
from kvpool.tiers.index import LRUIndex


class HostTier:
    """Keeps records in one block of memory, the least recently used going first.

    The block is cut into slots of one record each, so that neither a write nor an eviction
    allocates. A slot is written before the index knows it, and handed on only when nobody reads it
    any more: whatever runs beside it, a `read` gives a record as one `write` left it.

    Parameters
    ----------
    capacity_bytes : int
        Of the block. It is reserved at once, so that too much fails here; the system gives the
        memory itself page by page, when records first come to it.
    name : str
        What counters and messages call this tier.
    pinned : bool, optional
        Have the block page-locked, through CuPy: then all of it is taken now. Worth it only where
        a device copies out of the block itself; `read` copies into the rows of the caller, which
        should be pinned instead.

    Raises
    ------
    ValueError
        `pinned` without CuPy or a driver, a negative capacity.
    MemoryError
        The system has no such amount.

    Notes
    -----
    The first `write` says how long records are. A tier may be shared by pools whose records are
    equally long; two layouts need two tiers.

    Invariants, under the lock: a slot is free, or being written, or in the index, or replaced and
    waiting for its last reader; ``_readers`` counts the reads that are copying from a slot.
    """

    def __init__(
        self, capacity_bytes: int, *, name: str = "host", pinned: bool | None = None
    ) -> None:
        self.name = check_name(name)
        self.capacity_bytes = whole_number(capacity_bytes, "capacity_bytes", 0, INT64_MAX)
        try:
            self._memory = (
                pinned_bytes(capacity_bytes) if pinned else np.empty(capacity_bytes, np.uint8)
            )
        except MemoryError as error:
            raise MemoryError(
                f"tier {name!r} of {capacity_bytes} bytes does not fit into memory: {error}"
            ) from None
        self._lock = threading.Lock()
        self._closed = False
        self._slots = self._memory[:0].reshape(0, 1)
        self._index: LRUIndex[int] = LRUIndex(None)
        self._free: list[int] = []
        self._readers: dict[int, int] = {}
        self._replaced: set[int] = set()
        self._hits = self._misses = self._writes = self._refused = 0

    def exists(self, keys: Sequence[Key]) -> list[bool]:
        """Whether each key has a record; no access in the order of eviction."""
        check_keys(keys)
        with self._lock:
            self._check_open()
            return [key in self._index for key in keys]

    def read(self, keys: Sequence[Key], rows: NDArray[np.uint8]) -> list[bool]:
        """Fill ``rows[i]`` with the record of ``keys[i]``, which becomes the last to go."""
        check_rows(keys, rows, fill=True)
        with self._lock:
            self._check_open()
            if len(self._slots):
                self._check_length(rows)
            found = [self._index.get(key) for key in keys]
            for slot in found:
                if slot is not None:
                    self._readers[slot] = self._readers.get(slot, 0) + 1
            slots = self._slots
        try:
            for row, slot in zip(rows, found, strict=True):
                if slot is not None:
                    row[...] = slots[slot]
        finally:
            with self._lock:
                for slot in found:
                    if slot is not None:
                        self._end_read(slot)
                num_hits = len(found) - found.count(None)
                self._hits += num_hits
                self._misses += len(found) - num_hits
        return [slot is not None for slot in found]

    def write(self, keys: Sequence[Key], rows: NDArray[np.uint8]) -> list[bool]:
        """Store each row, evicting as many; False for a record larger than the tier.

        Also False where every slot is being read or written by other threads at this moment.
        """
        check_rows(keys, rows)
        written = 0
        with self._lock:
            self._check_open()
            if not len(keys):
                return []
            if not len(self._slots):
                self._cut(rows.shape[1])
            self._check_length(rows)
        while written < len(keys):
            with self._lock:
                self._check_open()
                slots = self._take_slots(keys[written:])
                memory = self._slots
            if not slots:
                break
            try:
                for i, slot in enumerate(slots, written):
                    memory[slot] = rows[i]
            except BaseException:
                with self._lock:
                    self._free += slots
                raise
            with self._lock:
                self._check_open()
                for i, slot in enumerate(slots, written):
                    for old in self._index.put(keys[i], slot, rows.shape[1]) or ():
                        self._let_go(old)
            written += len(slots)
        with self._lock:
            self._writes += written
            self._refused += len(keys) - written
        return [i < written for i in range(len(keys))]

    def remove(self, keys: Sequence[Key]) -> list[bool]:
        """Forget records, those that did not verify say; whether each was there."""
        check_keys(keys)
        with self._lock:
            self._check_open()
            found = [self._index.discard(key) for key in keys]
            for slot in found:
                if slot is not None:
                    self._let_go(slot)
        return [slot is not None for slot in found]

    def register(self, buffer: NDArray[np.uint8]) -> None:
        """Nothing to do: records are copied by the processor."""

    def unregister(self, buffer: NDArray[np.uint8]) -> None:
        """Nothing to do."""

    def stats(self) -> Mapping[str, int]:
        """What is there now, and what happened since the tier was made."""
        with self._lock:
            return {
                "records": len(self._index),
                "bytes": self._index.num_bytes,
                "capacity_bytes": self.capacity_bytes,
                "read_records": self._hits,
                "missed_records": self._misses,
                "written_records": self._writes,
                "refused_records": self._refused,
                "evicted_records": self._index.num_evicted,
            }

    def close(self) -> None:
        """Forget all records and let go of the memory, once the reads that run now are done."""
        with self._lock:
            self._closed = True
            self._index.clear()
            self._free = []
            self._memory = self._memory[:0].copy()
            self._slots = self._memory.reshape(0, 1)

    # ---- under the lock

    def _check_open(self) -> None:
        if self._closed:
            raise KVCacheStateError(f"tier {self.name!r} is closed: make another one")

    def _cut(self, record_bytes: int) -> None:
        """Cut the block into slots; records that are larger than it find none."""
        if not record_bytes or record_bytes > self.capacity_bytes:
            return
        num_slots = self.capacity_bytes // record_bytes
        self._slots = self._memory[: num_slots * record_bytes].reshape(num_slots, record_bytes)
        # The last is taken first: memory is touched from the front on.
        self._free = list(range(num_slots - 1, -1, -1))

    def _check_length(self, rows: NDArray[np.uint8]) -> None:
        if len(self._slots) and rows.shape[1] != self._slots.shape[1]:
            raise ValueError(
                f"tier {self.name!r} keeps records of {self._slots.shape[1]} bytes, got "
                f"{rows.shape[1]}: make a HostTier for each layout of a pool"
            )

    def _take_slots(self, keys: Sequence[Key]) -> list[int]:
        """Slots for records of `keys`, as many as there are that nobody uses.

        Free ones, then those of the records that they replace, then of the next to go. What is
        being read is given up too, but gives no slot now; so no more are given up than are needed.
        """
        if len(self._free) < len(keys):
            for key in keys:
                replaced = self._index.discard(key)
                if replaced is not None:
                    self._let_go(replaced)
        for _ in range(len(keys) - len(self._free)):
            evicted = self._index.evict()
            if evicted is None:
                break
            self._let_go(evicted)
        taken = self._free[-len(keys) :][::-1]
        del self._free[-len(keys) :]
        return taken

    def _let_go(self, slot: int) -> None:
        """The index has forgotten a slot."""
        if slot in self._readers:
            self._replaced.add(slot)
        else:
            self._free.append(slot)

    def _end_read(self, slot: int) -> None:
        left = self._readers[slot] - 1
        if left:
            self._readers[slot] = left
            return
        del self._readers[slot]
        if slot in self._replaced:
            self._replaced.discard(slot)
            self._free.append(slot)
