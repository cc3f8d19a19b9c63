"""FileTier: records as files in a directory, which processes share."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress

import numpy as np
from numpy.typing import NDArray

from kvpool.errors import KVCacheStateError
from kvpool.numbers import INT64_MAX, positive_seconds, whole_number
from kvpool.tiers.contract import Key, check_keys, check_name, check_rows
from kvpool.tiers.directory import Ledger, TierDirectory
from kvpool.tiers.file_order import FileOrder
from kvpool.tiers.page_files import (
    forget,
    open_page,
    page_name,
    place,
    read_all,
    size_of,
    stat_of,
    up_to_no_space,
    write_all,
)

_COUNTED = (
    "read_records",
    "missed_records",
    "torn_records",
    "written_records",
    "refused_records",
)


class FileTier:
    """Keeps each record in a file of its own, for all processes that name the same directory.

    A record is written beside the others and renamed when it is whole. Nothing is forced to the
    disk: after a loss of power a file may be torn or empty, which its length or its checksum
    shows, and the record is a miss. The least recently used ones go first, over all processes: a
    read leaves its time on the file.

    Parameters
    ----------
    directory : str or path-like
        Made if it is missing, with rights for its owner only: what users wrote can be read from K
        and V. Otherwise empty, or a tier's already; its rights are kept, so that one may be shared
        with other users. It needs a file system with locks.
    capacity_bytes : int
        Of all records together, whoever wrote them. Files that are being written come on top: at
        most what the processes write at this moment. Processes should name the same number; each
        evicts to its own when it writes.
    name : str
        What counters and messages call this tier.
    timeout_s : float
        How long a write waits for other processes before it raises `TimeoutError`.

    Raises
    ------
    ValueError
        The directory is not empty and no tier's, or of another version; a negative capacity, a
        time-out that is none, a path that is empty.
    OSError
        No directory there, no rights, no space, no locks.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        capacity_bytes: int,
        *,
        name: str = "file",
        timeout_s: float = 5.0,
    ) -> None:
        self.name = check_name(name)
        self.capacity_bytes = whole_number(capacity_bytes, "capacity_bytes", 0, INT64_MAX)
        path = _path_of(directory)
        self._directory = TierDirectory(path, positive_seconds(timeout_s, "timeout_s"))
        self._order = FileOrder(self._directory)
        self._made: set[str] = set()
        self._counts: Counter[str] = Counter()
        self._counts_lock = threading.Lock()

    def exists(self, keys: Sequence[Key]) -> list[bool]:
        """Whether each key has a record; no access in the order of eviction."""
        check_keys(keys)
        names = [page_name(key) for key in keys]
        with self._directory.in_use():
            return [size_of(self._directory, name) is not None for name in names]

    def read(self, keys: Sequence[Key], rows: NDArray[np.uint8]) -> list[bool]:
        """Fill ``rows[i]`` with the record of ``keys[i]``, which becomes the last to go.

        A file of another length is removed: it is torn.

        Raises
        ------
        OSError
            The disk fails, or no descriptors are left. A record without rights is a miss.
        """
        check_rows(keys, rows, fill=True)
        names = [page_name(key) for key in keys]
        with self._directory.in_use():
            found = [self._read_one(name, row) for name, row in zip(names, rows, strict=True)]
            torn = [name for name, is_whole in zip(names, found, strict=True) if is_whole is None]
            if torn:
                self._remove_torn(torn, rows.shape[1])
        answers = [bool(is_whole) for is_whole in found]
        self._count(
            read_records=sum(answers),
            missed_records=len(answers) - sum(answers),
            torn_records=len(torn),
        )
        return answers

    def write(self, keys: Sequence[Key], rows: NDArray[np.uint8]) -> list[bool]:
        """Store each row, in place of what its key had; False where there is no space.

        That is a record larger than the tier, or a full disk: then what is there stays.

        Raises
        ------
        TimeoutError
            Other processes do not let go of the directory.
        OSError
            The directory is gone, or may not be written to.
        """
        check_rows(keys, rows)
        names = [page_name(key) for key in keys]
        answers: list[bool] = []
        if rows.shape[1] <= self.capacity_bytes:
            with self._directory.in_use():
                answers = self._write(names, rows)
        answers += [False] * (len(keys) - len(answers))
        self._count(written_records=sum(answers), refused_records=len(answers) - sum(answers))
        return answers

    def remove(self, keys: Sequence[Key]) -> list[bool]:
        """Forget records, those that did not verify say; whether each was there.

        Raises
        ------
        OSError
            As `write`.
        """
        check_keys(keys)
        names = [page_name(key) for key in keys]
        answers = []
        with self._directory.in_use(), self._directory.locked() as ledger:
            for name in names:
                length = size_of(self._directory, name)
                answers.append(length is not None)
                if length is not None:
                    forget(self._directory, ledger, name, length)
        return answers

    def register(self, buffer: NDArray[np.uint8]) -> None:
        """Nothing to do: the system copies."""

    def unregister(self, buffer: NDArray[np.uint8]) -> None:
        """Nothing to do."""

    def stats(self) -> Mapping[str, int]:
        """Records and bytes of all processes, and what this object did."""
        try:
            with self._directory.in_use():
                ledger = self._directory.peek()
        except (OSError, ValueError, KVCacheStateError):
            ledger = Ledger()  # closed, or gone: the next write says so
        with self._counts_lock:
            return {
                "records": ledger.num_records,
                "bytes": ledger.num_bytes,
                "capacity_bytes": self.capacity_bytes,
                **{name: self._counts[name] for name in _COUNTED},
                "evicted_records": self._order.num_evicted,
                "scans": self._order.num_scans,
                "removed_parts": self._directory.removed_parts,
            }

    def close(self) -> None:
        """Let go of the directory; the records stay."""
        self._directory.close()

    def _count(self, **numbers: int) -> None:
        with self._counts_lock:
            self._counts.update(numbers)

    # ---- with the directory in use

    def _read_one(self, name: str, row: NDArray[np.uint8]) -> bool | None:
        """Whether the record was there; None for a file of another length."""
        file = open_page(self._directory, name)
        if file is None:
            return False
        try:
            if not read_all(file, row):
                return None
            with suppress(OSError):  # another user's, or a file system for reading only
                self._order.stamp(file)
        finally:
            os.close(file)
        return True

    def _remove_torn(self, names: list[str], record_bytes: int) -> None:
        # Whoever may only read leaves it where it is.
        with suppress(OSError), self._directory.locked() as ledger:
            for name in names:
                length = size_of(self._directory, name)
                if length is not None and length != record_bytes:
                    forget(self._directory, ledger, name, length)

    def _write(self, names: list[str], rows: NDArray[np.uint8]) -> list[bool]:
        """What became of each record, up to the first that the disk has no space for."""
        parts: list[tuple[int, str]] = []
        answers: list[bool] = []
        num_whole = 0
        try:
            with up_to_no_space():
                for row in rows:
                    parts.append(self._directory.create_part())
                    write_all(parts[-1][0], row)
                    num_whole += 1
            with up_to_no_space():
                self._commit(names, parts[:num_whole], rows.shape[1], answers)
        finally:
            for i, (file, part) in enumerate(parts):
                os.close(file)
                if i >= len(answers) or not answers[i]:
                    with suppress(OSError):
                        os.unlink(part, dir_fd=self._directory.descriptor)
        return answers

    def _commit(
        self,
        names: list[str],
        parts: list[tuple[int, str]],
        record_bytes: int,
        answers: list[bool],
    ) -> None:
        """Give whole files their names, as long as each finds room."""
        if not parts:
            return
        with self._directory.locked(record_bytes * len(parts), len(parts)) as ledger:
            self._order.agree(ledger)
            for name, (file, part) in zip(names, parts, strict=False):
                self._check_above(name)
                if not self._order.make_room(ledger, record_bytes, name, self.capacity_bytes):
                    answers.append(False)
                    continue
                replaced = size_of(self._directory, name)
                if replaced is None and stat_of(self._directory, name) is not None:
                    answers.append(False)  # somebody keeps something else under this name
                    continue
                self._order.stamp(file)
                place(self._directory, part, name)
                ledger.num_bytes += record_bytes - (replaced or 0)
                ledger.num_records += replaced is None
                answers.append(True)
            self._order.agree(ledger)

    def _check_above(self, name: str) -> None:
        """See once that the directories above a page file are some, and not links to others."""
        above = os.path.dirname(name)
        if above not in self._made:
            self._directory.make(os.path.dirname(above))
            self._directory.make(above)
            self._made.add(above)


def _path_of(directory: str | os.PathLike[str]) -> str:
    """A path that names something: an empty one would be the working directory."""
    if not isinstance(directory, (str, bytes, os.PathLike)):
        raise TypeError(f"directory must be a str or a path, got {type(directory).__name__}")
    path = os.fsdecode(directory)
    if not path or "\0" in path:
        raise ValueError(f"directory must be a path, got {path!r}; '.' is the working directory")
    return path
