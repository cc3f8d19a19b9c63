"""TierDirectory: the directory of a `FileTier`, its marker, its lock and its unfinished files.

::

    kvpool-tier                  marker: magic, bytes, records, last use; whoever changes what
                                 is below holds a lock on it
    parts/<32 hex>.part          being written, each under a lock that ends with its writer
    ab/cd/<64 hex>.page          a record, named by its key abcd...

Everything is reached from one descriptor of the directory. So a tier whose directory was removed,
moved or replaced by another one fails, or goes on in its own, and never writes into a strange one.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
import stat
import struct
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass

from kvpool.tiers.open_calls import OpenCalls

MARKER = "kvpool-tier"
PARTS = "parts"
_MAGIC = b"kvtier\x00\x01"
_LAYOUT = struct.Struct("<8sqqq")
_PART = re.compile(r"[0-9a-f]{32}\.part")
# What a fresh file system has before anybody used it.
_NOBODYS = {"lost+found"}
_POLL_S = 0.001
_COPIES_S = 5.0


@dataclass
class Ledger:
    """What is in a directory, as all processes count it.

    Attributes
    ----------
    num_bytes, num_records : int
        Of all records. Too high after a crash, until the next scan; never too low.
    last_use : int
        Nanoseconds since 1970, or one more than the use before where the clock went back.
    """

    num_bytes: int = 0
    num_records: int = 0
    last_use: int = 0


class TierDirectory:
    """An open directory of records; any thread may call the methods, inside of `in_use`.

    Parameters
    ----------
    path : str
        Made if it is missing, for its owner only; one that is there keeps its rights.
    timeout_s : float
        How long to wait for the lock, before a `TimeoutError` says that it does not come.

    Attributes
    ----------
    descriptor : int
        Of the directory, for calls that name what is in it.
    removed_parts : int
        Files that writers who died had left, when it was opened.

    Raises
    ------
    ValueError
        A directory that is not empty and no tier's, or of another format.
    OSError
        No rights, no space, no locks on this file system, no directory.
    """

    def __init__(self, path: str, timeout_s: float) -> None:
        self.path = os.path.realpath(path)
        self.removed_parts = 0
        self._timeout_s = timeout_s
        self._calls = OpenCalls(f"the tier in {self.path}")
        self._closed = False
        with suppress(FileExistsError):
            os.makedirs(self.path, 0o700)
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
        self.descriptor = os.open(self.path, flags)
        try:
            self._adopt()
        except BaseException:
            self.close()
            raise

    def in_use(self) -> AbstractContextManager[None]:
        """Around whatever uses the descriptor: until its end, a close waits.

        Raises
        ------
        KVCacheStateError
            It is closed.
        """
        return self._calls.call()

    def close(self) -> None:
        """Let go of the directory, once nobody uses it."""
        # Whoever uses it waits no longer than this for the lock, and copies a few records then.
        if self._calls.refuse(self._timeout_s + _COPIES_S) and not self._closed:
            self._closed = True
            os.close(self.descriptor)

    # ---- the ledger

    @contextmanager
    def locked(self, growth_bytes: int = 0, growth_records: int = 0) -> Iterator[Ledger]:
        """The ledger, while no other thread or process has it; changes are kept at the end.

        Parameters
        ----------
        growth_bytes, growth_records : int
            What may come to it at most; whoever is killed meanwhile leaves it counted.

        Raises
        ------
        TimeoutError
            Somebody else has it for too long; stopped, perhaps.
        FileNotFoundError
            The directory or its marker is gone.
        """
        # Opened anew: a lock belongs to an open file, which threads and forked children share.
        file = self._open_marker(os.O_RDWR)
        try:
            self._wait_for(file)
            ledger = self._read_ledger(file)
            if growth_bytes:
                num_bytes = ledger.num_bytes + growth_bytes
                num_records = ledger.num_records + growth_records
                self._write_ledger(file, Ledger(num_bytes, num_records, ledger.last_use))
            try:
                yield ledger
            finally:
                self._write_ledger(file, ledger)
        finally:
            os.close(file)

    def peek(self) -> Ledger:
        """The ledger as it is, without waiting for whoever changes it."""
        file = self._open_marker(os.O_RDONLY)
        try:
            return self._read_ledger(file)
        finally:
            os.close(file)

    def _open_marker(self, flags: int) -> int:
        flags |= os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            return os.open(MARKER, flags, 0o666, dir_fd=self.descriptor)
        except FileNotFoundError:
            message = "the tier's directory is gone or was emptied: make the tier again"
            raise FileNotFoundError(errno.ENOENT, message, self.path) from None
        except OSError as error:
            raise _naming(error, self.path) from None

    def _wait_for(self, file: int) -> None:
        deadline = time.monotonic() + self._timeout_s
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise TimeoutError(
                        errno.ETIMEDOUT,
                        f"another process holds the lock for more than {self._timeout_s} s: see "
                        "whether one that uses this tier is stopped",
                        self.path,
                    ) from None
                time.sleep(_POLL_S)
            except OSError as error:
                raise _naming(error, self.path) from None

    def _read_ledger(self, file: int) -> Ledger:
        data = os.pread(file, _LAYOUT.size, 0)
        if len(data) < _LAYOUT.size or data[: len(_MAGIC)] != _MAGIC:
            raise ValueError(
                f"{self.path}/{MARKER} is damaged or of another version of kvpool: remove the "
                "directory, it is a cache"
            )
        return Ledger(*_LAYOUT.unpack(data)[1:])

    def _write_ledger(self, file: int, ledger: Ledger) -> None:
        fields = (ledger.num_bytes, ledger.num_records, ledger.last_use)
        # Too small for a file system to need space for it anew.
        os.pwrite(file, _LAYOUT.pack(_MAGIC, *fields), 0)

    def _adopt(self) -> None:
        """Take an empty directory over, or join those that use it."""
        names = set(os.listdir(self.descriptor)) - _NOBODYS
        if names and MARKER not in names:
            raise ValueError(
                f"{self.path} is not empty and no tier's directory: it has {sorted(names)[0]!r}. "
                "Name another one, or one that does not exist yet"
            )
        file = self._open_marker(os.O_RDWR | os.O_CREAT)
        try:
            self._wait_for(file)
            # Somebody may have been killed between these steps, so each is looked at.
            if not os.pread(file, _LAYOUT.size, 0).strip(b"\0"):
                self._write_ledger(file, Ledger())
            self._read_ledger(file)
            self.make(PARTS)
            self._remove_left_over()
        finally:
            os.close(file)

    # ---- what is in it

    def make(self, name: str) -> None:
        """A directory in this one, if it is not there yet."""
        with suppress(FileExistsError):
            os.mkdir(name, 0o777, dir_fd=self.descriptor)
        found = os.stat(name, dir_fd=self.descriptor, follow_symlinks=False)
        if not stat.S_ISDIR(found.st_mode):
            message = "a tier keeps records in a directory of this name, and something else is it"
            raise NotADirectoryError(errno.ENOTDIR, message, os.path.join(self.path, name))

    def create_part(self) -> tuple[int, str]:
        """A new file to write: its descriptor and its name. Close it, then rename or unlink it."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        while True:
            name = f"{PARTS}/{secrets.token_hex(16)}.part"
            file = os.open(name, flags, 0o666, dir_fd=self.descriptor)
            with suppress(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # Who looks for left-overs may have removed it before it was locked.
                if os.fstat(file).st_nlink:
                    return file, name
            os.close(file)

    def _remove_left_over(self) -> None:
        for entry, _ in list(self.entries(PARTS, _PART)):
            name = f"{PARTS}/{entry}"
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            try:
                file = os.open(name, flags, dir_fd=self.descriptor)
            except OSError:
                continue  # gone, or not ours
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.unlink(name, dir_fd=self.descriptor)
                self.removed_parts += 1
            except OSError:
                continue  # its writer lives, or others were quicker
            finally:
                os.close(file)

    def entries(
        self, directory: str, pattern: re.Pattern[str]
    ) -> Iterator[tuple[str, os.DirEntry[str]]]:
        """Names that fit `pattern` in a directory in this one; nothing behind symbolic links."""
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            opened = os.open(directory, flags, dir_fd=self.descriptor)
        except (FileNotFoundError, NotADirectoryError):
            return
        try:
            with os.scandir(opened) as found:
                for entry in found:
                    if pattern.fullmatch(entry.name):
                        yield entry.name, entry
        finally:
            os.close(opened)


def _naming(error: OSError, path: str) -> OSError:
    """The same error with the path of the directory, and not of what is in it."""
    return OSError(error.errno, error.strerror, path)
