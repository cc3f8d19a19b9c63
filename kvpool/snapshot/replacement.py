"""Replacement: a file that takes another's place only once it is whole and on the disk.

It is written beside its target under a name of its own, then renamed over it. Whoever is killed
while writing leaves such a file behind, and the next replacement of the same target removes it:
a live one holds a lock on its file, which ends with its process however that ends.

What it replaces may have been closed to others, for it holds what users wrote: nobody may read the
new file, finished or not, who could not read the old one.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
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
        The target, which may exist: its mode is kept, and where permitted its owner and group.
        Where the group cannot be kept, another group gets no rights. Of a symbolic link the file
        behind it is replaced.

    Raises
    ------
    OSError
        No such directory, no permission, the target is a directory; or, while writing, a full
        disk. The target is as before then, and `filename` is its path.
    SnapshotError
        The target is there and no regular file: a device, a socket.
    """

    def __init__(self, path: str) -> None:
        self.path = os.path.realpath(path)
        self._replaced = _check_target(self.path)
        self._name = ""  # of the file that is written
        self._directory, name = os.path.split(self.path)
        # Not the name itself: with what is added it could become too long for a file.
        self._prefix = f".kvpool-{sha256(os.fsencode(name)).hexdigest()[:12]}-"
        self._pattern = re.compile(re.escape(self._prefix) + r"[0-9a-f]{16}\.part")

    def __enter__(self) -> Replacement:
        self._remove_left_over()
        self._file = self._create()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if kind is None:
                with self._naming_target():
                    self._keep_permissions()
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
            with self._naming_target():
                _sync_directory(self._directory)

    def write(self, data: Any) -> None:
        """Append the bytes of `data`, a contiguous buffer of bytes."""
        view = memoryview(data)
        if view.nbytes == 0:
            return
        view = view.cast("B")
        with self._naming_target():
            while view:
                view = view[os.write(self._file, view) :]

    def seek(self, offset: int) -> None:
        """Go on writing at `offset`, over what is there."""
        with self._naming_target():
            os.lseek(self._file, offset, os.SEEK_SET)

    @contextmanager
    def _naming_target(self) -> Iterator[None]:
        """Errors of the file system name the target, and not a file that is gone by then."""
        try:
            yield
        except OSError as error:
            # What a signal handler raises meanwhile is none of ours.
            if error.errno is None or error.filename not in (None, self._name):
                raise
            raise OSError(error.errno, error.strerror, self.path) from error

    def _create(self) -> int:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        mode = 0o666 if self._replaced is None else 0o600
        with self._naming_target():
            for _ in range(_TRIES):
                name = f"{self._prefix}{secrets.token_hex(8)}.part"
                self._name = os.path.join(self._directory, name)
                file = os.open(self._name, flags, mode)
                # Another save may look for what was left over between these two calls.
                if _lock(file) and _is_at(file, self._name):
                    return file
                os.close(file)
            raise OSError(errno.EAGAIN, "other saves take our unfinished file for one left over")

    def _keep_permissions(self) -> None:
        # Asked again: a save is long, and they may have been changed meanwhile.
        replaced = _check_target(self.path)
        if replaced is None:
            return
        mode = stat.S_IMODE(replaced.st_mode) & 0o777
        own = os.fstat(self._file)
        if own.st_gid != replaced.st_gid:
            try:
                os.fchown(self._file, -1, replaced.st_gid)
            except OSError:
                mode &= ~stat.S_IRWXG  # they were another group's
        if stat.S_IMODE(own.st_mode) != mode:
            os.fchmod(self._file, mode)
        # Last: a file of somebody else's has no mode for us to set.
        if own.st_uid != replaced.st_uid:
            with suppress(OSError):
                os.fchown(self._file, replaced.st_uid, -1)

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


def _check_target(path: str) -> os.stat_result | None:
    """The file at `path`, None where there is none; an error for what is no regular file."""
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return None
    mode = found.st_mode
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, "a snapshot is one file, this is a directory", path)
    if not stat.S_ISREG(mode):
        raise SnapshotError(f"{path} is no regular file: a save would put one in its place")
    return found


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
