"""TraceReader: one pass over a trace, line by line; what is malformed is counted and named."""

from __future__ import annotations

import gzip
import io
import os
import stat
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from kvpool.replay.lines import EXPECTED, MalformedLineError, TraceRequest, parse_line

MAX_LINE_BYTES = 1 << 26
GIVE_UP = 20  # malformed lines at the start of a file that make it no trace
NUM_NAMED = 5  # malformed lines whose reasons are kept
_Lines = gzip.GzipFile | io.BufferedReader
_GZIP_MAGIC = b"\x1f\x8b"


class TraceError(ValueError):
    """A trace that cannot be replayed; the message says what was found and what is expected."""


class TraceReader:
    """Reads a trace once; iterate over it. Memory: one line.

    Parameters
    ----------
    path : str or Path
        A file of JSON lines, or such a file through gzip.
    block_size : int
        Tokens of one hash id.
    limit : int, optional
        Requests after which to stop.
    last_line : int, optional
        Line after which to stop: a second pass reads what the first one read.
    strict : bool
        Raise at the first malformed line.

    Attributes
    ----------
    num_requests, num_lines, num_malformed : int
        So far.
    malformed : list of (int, str)
        Line number and reason of the first few malformed lines.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        block_size: int = 512,
        limit: int | None = None,
        last_line: int | None = None,
        strict: bool = False,
    ) -> None:
        self.path = Path(path)
        self.block_size = block_size
        self.limit = limit
        self.last_line = last_line
        self.strict = strict
        self.num_requests = self.num_lines = self.num_malformed = 0
        self.malformed: list[tuple[int, str]] = []
        self._raw: BinaryIO | None = None
        self._bytes_read = self._file_bytes = 0

    @property
    def bytes_read(self) -> int:
        """Bytes of the file, as it lies on the disk, that were read so far."""
        return self._bytes_read if self._raw is None else self._raw.tell()

    @property
    def file_bytes(self) -> int:
        """Size of the file; 0 before it is open."""
        return self._file_bytes

    def __iter__(self) -> Iterator[TraceRequest]:
        """Requests in the order of their lines.

        Raises
        ------
        TraceError
            No such file, none of its lines is a request, or (strict) one of them is malformed.
        """
        with _opened(self.path) as raw:
            self._raw, self._file_bytes = raw, os.fstat(raw.fileno()).st_size
            is_zipped = raw.peek(2)[:2] == _GZIP_MAGIC
            try:
                lines = gzip.GzipFile(fileobj=raw) if is_zipped else raw
                yield from self._requests(lines)
            except (EOFError, zlib.error, gzip.BadGzipFile) as error:
                raise TraceError(f"{self.path}: broken gzip file: {error}") from None
            finally:
                self._bytes_read, self._raw = raw.tell(), None
        if self.num_requests == 0:
            raise self._no_trace()

    def _requests(self, lines: _Lines) -> Iterator[TraceRequest]:
        while self.num_requests != self.limit and self.num_lines != self.last_line:
            line = lines.readline(MAX_LINE_BYTES)
            if not line:
                return
            self.num_lines += 1
            try:
                if len(line) == MAX_LINE_BYTES and not line.endswith(b"\n"):
                    _skip_line(lines)
                    raise MalformedLineError(f"longer than {MAX_LINE_BYTES:,} bytes")
                if line.isspace():
                    continue
                request = parse_line(line, self.num_lines, self.block_size)
            except MalformedLineError as error:
                self._note(str(error))
                continue
            self.num_requests += 1
            yield request

    def _note(self, reason: str) -> None:
        self.num_malformed += 1
        if len(self.malformed) < NUM_NAMED:
            self.malformed.append((self.num_lines, reason))
        if self.strict:
            raise TraceError(f"{self.path}, line {self.num_lines}: {reason}")
        if self.num_requests == 0 and self.num_malformed == GIVE_UP:
            raise self._no_trace()

    def _no_trace(self) -> TraceError:
        if not self.malformed:
            return TraceError(f"{self.path} is empty, expected a line a request: {EXPECTED}")
        line, reason = self.malformed[0]
        return TraceError(
            f"{self.path} is no trace: none of its first {self.num_lines} lines is a request; "
            f"line {line}: {reason}. Expected one JSON object a line: {EXPECTED}"
        )


def _opened(path: Path) -> io.BufferedReader:
    try:
        file = path.open("rb")
    except OSError as error:
        raise TraceError(f"cannot read {path}: {error.strerror}") from None
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise TraceError(f"{path} is no regular file: a replay reads its trace several times")
    return file


def _skip_line(lines: _Lines) -> None:
    while (piece := lines.readline(1 << 20)) and not piece.endswith(b"\n"):
        pass
