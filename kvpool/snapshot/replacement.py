"""Replacement: a file that takes another's place only once it is whole and on the disk.

It is written beside its target under a name of its own, then renamed over it. Whoever is killed
while writing leaves such a file behind, and the next replacement of the same target removes it:
a live one holds a lock on its file, which ends with its process however that ends.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
import stat
from contextlib import suppress
from hashlib import sha256
from types import TracebackType
from typing import Any

from kvpool.errors import SnapshotError

_TRIES = 16


class Replacement:
    """A context: leaving it renames what was written, an exception in it removes that.

    Parameters
    ----------
    path : str
        The target, which may exist. Of a symbolic link the file behind it is replaced.

    Raises
    ------
    OSError
        No such directory, no permission, the target is a directory; or, while writing, a full
        disk. The target is as before then.
    SnapshotError
        The target is there and no regular file: a device, a socket.
    """

    def __init__(self, path: str) -> None:
        self.path = os.path.realpath(path)
        _check_target(self.path)
        self._directory, name = os.path.split(self.path)
        # Not the name itself: with what is added it could become too long for a file.
        self._prefix = f".kvpool-{sha256(os.fsencode(name)).hexdigest()[:12]}-"
        self._pattern = re.compile(re.escape(self._prefix) + r"[0-9a-f]{16}\.part")

    def __enter__(self) -> Replacement:
        self._remove_left_over()
        self._name, self._file = self._create()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if kind is None:
                os.fsync(self._file)
                os.rename(self._name, self.path)
        except BaseException:
            _unlink(self._name)
            raise
        else:
            if kind is not None:
                _unlink(self._name)
        finally:
            os.close(self._file)
        if kind is None:
            _sync_directory(self._directory)

    def write(self, data: Any) -> None:
        """Append the bytes of `data`, a contiguous buffer of bytes."""
        view = memoryview(data)
        if view.nbytes == 0:
            return
        view = view.cast("B")
        while view:
            view = view[os.write(self._file, view) :]

    def seek(self, offset: int) -> None:
        """Go on writing at `offset`, over what is there."""
        os.lseek(self._file, offset, os.SEEK_SET)

    def _create(self) -> tuple[str, int]:
        for _ in range(_TRIES):
            name = os.path.join(self._directory, f"{self._prefix}{secrets.token_hex(8)}.part")
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            file = os.open(name, flags, 0o666)
            # Another save may look for what was left over between these two calls.
            if _lock(file) and _is_at(file, name):
                return name, file
            os.close(file)
        raise OSError(errno.EAGAIN, "other saves take our unfinished file for one left over", name)

    def _remove_left_over(self) -> None:
        for entry in os.listdir(self._directory or "."):
            if not self._pattern.fullmatch(entry):
                continue
            name = os.path.join(self._directory, entry)
            try:
                file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            except OSError:
                continue  # gone, or not ours
            try:
                if _lock(file, unless_supported=False):
                    _unlink(name)
            finally:
                os.close(file)


def _check_target(path: str) -> None:
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        return
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, "a snapshot is one file, this is a directory", path)
    if not stat.S_ISREG(mode):
        raise SnapshotError(f"{path} is no regular file: a save would put one in its place")


def _lock(file: int, unless_supported: bool = True) -> bool:
    """Whether this process has the lock now; where there are none, `unless_supported`."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return unless_supported
    return True


def _is_at(file: int, name: str) -> bool:
    try:
        return os.path.samestat(os.fstat(file), os.stat(name))
    except FileNotFoundError:
        return False


def _unlink(name: str) -> None:
    # Whatever is wrong with it, the error that led here says more.
    with suppress(OSError):
        os.unlink(name)


def _sync_directory(path: str) -> None:
    """Make the rename itself last, where the file system can."""
    try:
        directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except PermissionError:
        return  # one may write into it and not read it
    try:
        os.fsync(directory)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(directory)
