"""Page files: one record each, named by its key, below a `TierDirectory`."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvpool.page_keys import KEY_BYTES
from kvpool.tiers.contract import Key
from kvpool.tiers.directory import Ledger, TierDirectory

_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
# Of one record; everything else is the directory's or the disk's.
_NOT_THERE = {errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EACCES, errno.EPERM, errno.ENXIO}
_NO_SPACE = {errno.ENOSPC, errno.EDQUOT}


def page_name(key: Key) -> str:
    """Name of a record's file, below its directory.

    Raises
    ------
    ValueError
        No page key.
    """
    if len(key) != KEY_BYTES:
        raise ValueError(f"a page key has {KEY_BYTES} bytes, got {len(key)}")
    name = key.hex()
    return f"{name[:2]}/{name[2:4]}/{name}.page"


def open_page(directory: TierDirectory, name: str) -> int | None:
    """A page file for reading; None where there is none that may be read."""
    try:
        file = os.open(name, _READ, dir_fd=directory.descriptor)
    except OSError as error:
        if error.errno in _NOT_THERE:
            return None
        raise
    if stat.S_ISREG(os.fstat(file).st_mode):
        return file
    os.close(file)
    return None


def stat_of(directory: TierDirectory, name: str) -> os.stat_result | None:
    """What is known of a file, or of whatever else has its name; None where nothing has."""
    try:
        return os.stat(name, dir_fd=directory.descriptor, follow_symlinks=False)
    except (FileNotFoundError, NotADirectoryError):
        return None


def size_of(directory: TierDirectory, name: str) -> int | None:
    """Bytes of a page file; None where there is none, or something else has its name."""
    found = stat_of(directory, name)
    return found.st_size if found is not None and stat.S_ISREG(found.st_mode) else None


def forget(directory: TierDirectory, ledger: Ledger, name: str, num_bytes: int) -> None:
    """Remove a page file and count it out; one that is gone already was not ours to count.

    Raises
    ------
    OSError
        It may not be removed.
    """
    try:
        os.unlink(name, dir_fd=directory.descriptor)
    except FileNotFoundError:
        return
    ledger.num_bytes -= num_bytes
    ledger.num_records -= 1


def place(directory: TierDirectory, part: str, name: str) -> None:
    """Give a finished part its name, in place of the page file that had it."""
    descriptor = directory.descriptor
    try:
        os.rename(part, name, src_dir_fd=descriptor, dst_dir_fd=descriptor)
    except FileNotFoundError:
        above = os.path.dirname(name)
        directory.make(os.path.dirname(above))
        directory.make(above)
        os.rename(part, name, src_dir_fd=descriptor, dst_dir_fd=descriptor)


def read_all(file: int, row: NDArray[np.uint8]) -> bool:
    """Fill `row` from a file; False if it is shorter or longer."""
    if os.fstat(file).st_size != len(row):
        return False
    left = _bytes_of(row)
    while left:
        length = os.readv(file, [left])
        if not length:
            return False
        left = left[length:]
    return True


def write_all(file: int, row: NDArray[np.uint8]) -> None:
    """Append `row` to a file."""
    left = _bytes_of(row)
    while left:
        left = left[os.write(file, left) :]


@contextmanager
def up_to_no_space() -> Iterator[None]:
    """Ends where the disk is full, and says nothing."""
    try:
        yield
    except OSError as error:
        if error.errno not in _NO_SPACE:
            raise


def _bytes_of(row: Any) -> memoryview:
    return memoryview(row)
