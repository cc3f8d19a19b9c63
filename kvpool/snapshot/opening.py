"""Snapshot: a file whose header and columns verify, open for its pages to be read."""

from __future__ import annotations

import errno
import os
import stat
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvpool.errors import SnapshotError
from kvpool.snapshot.checksums import DIGEST_BYTES, page_identities, seal_of
from kvpool.snapshot.columns import PageColumns, check_columns
from kvpool.snapshot.container import read_at, read_header, read_into
from kvpool.snapshot.contents import Contents, read_contents
from kvpool.snapshot.namespaces import decode_namespaces


class Snapshot:
    """An open snapshot whose header and columns verify; a context that closes the file.

    Parameters
    ----------
    path : str
        The file.

    Raises
    ------
    OSError
        No such file, no permission, a directory.
    SnapshotError
        Not a snapshot, one of a newer version, or one whose header or columns do not verify, or
        make no tree.
    """

    contents: Contents
    """What it holds, in numbers."""

    columns: PageColumns
    """Its pages, the most valuable first."""

    identities: list[bytes]
    """Which prefix each page stands for."""

    num_whole: int
    """Pages whose K and V are in the file to their end; fewer than saved if it was cut off."""

    file_bytes: int
    expected_bytes: int
    """Its size, and what it was when it was saved."""

    def __init__(self, path: str) -> None:
        self.path = path
        # Else the open of a pipe that nobody writes to would wait for ever.
        self._file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            self._read_header()
        except BaseException as error:
            os.close(self._file)
            if isinstance(error, SnapshotError):
                raise SnapshotError(f"{path}: {error}") from None
            raise

    def __enter__(self) -> Snapshot:
        return self

    def __exit__(self, *_: Any) -> None:
        os.close(self._file)

    def _read_header(self) -> None:
        status = os.fstat(self._file)
        if stat.S_ISDIR(status.st_mode):
            raise IsADirectoryError(errno.EISDIR, "a snapshot is one file", self.path)
        if not stat.S_ISREG(status.st_mode):
            raise SnapshotError("no regular file")
        self.file_bytes = status.st_size
        header, metadata, entries = read_header(self._file, self.file_bytes)
        self.contents = contents = read_contents(metadata, entries)
        tensors = contents.tensors()
        self._kv_begin = len(header) + tensors["kv"].begin
        self.expected_bytes = len(header) + tensors["kv"].end
        # What is in the file may be read into memory; what its header promises may not.
        if self._kv_begin > self.file_bytes:
            raise SnapshotError(
                f"cut off before the first page: {self.file_bytes} bytes, expected "
                f"{self.expected_bytes}"
            )
        whole = (self.file_bytes - self._kv_begin) // contents.fingerprint.page_bytes
        self.num_whole = min(contents.num_pages, whole)
        block = read_at(self._file, len(header), tensors["kv"].begin)
        seal = tensors["seal"].end
        if seal_of(header, memoryview(block)[seal:]) != block[:seal]:
            raise SnapshotError("the header and the columns of the tree do not verify")

        def column(name: str, dtype: str) -> NDArray[Any]:
            tensor = tensors[name]
            raw = np.frombuffer(block, np.uint8)[tensor.begin : tensor.end]
            return raw.view(dtype).reshape(tensor.shape)

        self._checksums = column("page_checksums", "u1").tobytes()
        self.columns = PageColumns(
            tokens=column("tokens", "<i4"),
            parents=column("parents", "<i4"),
            priorities=column("priorities", "<i4"),
            namespace_ids=column("namespace_ids", "<i4"),
            namespaces=decode_namespaces(column("namespaces", "u1").tobytes()),
        )
        check_columns(self.columns)
        self.identities = page_identities(
            contents.fingerprint.digest(),
            self.columns.namespaces,
            self.columns.namespace_ids,
            self.columns.parents,
            self.columns.tokens,
        )
        if len(set(self.identities)) != len(self.identities):
            raise SnapshotError("two pages stand for the same prefix")

    def checksum(self, page: int) -> bytes:
        """What the checksum of an entry must be."""
        return self._checksums[page * DIGEST_BYTES : (page + 1) * DIGEST_BYTES]

    def read_pages(self, begin: int, to: NDArray[np.uint8]) -> None:
        """Fill `to` ``[n, page_bytes]`` with K and V of the entries from `begin` on, unverified.

        Raises
        ------
        SnapshotError
            The file has become shorter.
        """
        if len(to):
            offset = self._kv_begin + begin * self.contents.fingerprint.page_bytes
            read_into(self._file, offset, to.data.cast("B"))
