"""The container: a safetensors file, written as a stream and read without trusting it.

The format is public and small: eight bytes that say how long the header is, the header in JSON
(each tensor's dtype, shape and place), then the bytes. Any safetensors reader opens our files, and
a test lets it. Two things the library does not do, so these few lines are our own: its writer
wants every tensor in memory at once, and a pool is tens of gigabytes; its reader refuses a file
that is cut off, whose first pages are whole, and maps it, so that a file which shrinks meanwhile
kills the process.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any, NamedTuple

from kvpool.errors import SnapshotError

MOST_HEADER_BYTES = 1 << 20
_LENGTH_BYTES = 8
_ALIGNMENT = 8
_METADATA = "__metadata__"


class Tensor(NamedTuple):
    """A tensor's entry in the header; `begin` and `end` are bytes, counted from behind it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    def entry(self) -> dict[str, Any]:
        """As JSON has it."""
        return {
            "dtype": self.dtype,
            "shape": list(self.shape),
            "data_offsets": [self.begin, self.end],
        }


def encode_header(metadata: Mapping[str, str], tensors: list[Tensor]) -> bytes:
    """Length and header, padded so that what follows is aligned.

    Raises
    ------
    SnapshotError
        Longer than `read_header` would read.
    """
    entries: dict[str, Any] = {_METADATA: dict(metadata)}
    entries |= {tensor.name: tensor.entry() for tensor in tensors}
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    if len(text) > MOST_HEADER_BYTES:
        raise SnapshotError(
            f"the header would have {len(text)} bytes, at most {MOST_HEADER_BYTES} are read back: "
            "too many layers with scales of their own?"
        )
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text


def read_header(file: int, file_bytes: int) -> tuple[bytes, dict[str, str], dict[str, Any]]:
    """The header of an open file: its bytes with the length, the metadata, the other entries.

    Raises
    ------
    SnapshotError
        Not a safetensors file, or one with a header that no snapshot has.
    """
    length = read_at(file, 0, _LENGTH_BYTES) if file_bytes >= _LENGTH_BYTES else bytearray()
    num_bytes = int.from_bytes(length, "little")
    if not 2 <= num_bytes <= min(MOST_HEADER_BYTES, file_bytes - _LENGTH_BYTES):
        raise SnapshotError(
            f"not a snapshot: a header of {num_bytes} bytes in a file of {file_bytes}, expected 2 "
            f".. {MOST_HEADER_BYTES}"
        )
    text = read_at(file, _LENGTH_BYTES, num_bytes)
    try:
        entries = json.loads(text.decode())
    except (ValueError, RecursionError):
        raise SnapshotError("not a snapshot: its header is no JSON") from None
    if not isinstance(entries, dict):
        raise SnapshotError("not a snapshot: its header is no JSON object")
    metadata = entries.pop(_METADATA, None)
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise SnapshotError("not a snapshot: its header has no metadata")
    return bytes(length + text), metadata, entries


def read_at(file: int, offset: int, num_bytes: int) -> bytearray:
    """Exactly these bytes, which the file had when it was opened; else SnapshotError."""
    data = bytearray(num_bytes)
    read_into(file, offset, memoryview(data))
    return data


def read_into(file: int, offset: int, to: memoryview) -> None:
    """Fill `to` from `offset` on; SnapshotError where the file has become shorter."""
    done = 0
    while done < len(to):
        count = os.preadv(file, [to[done:]], offset + done)
        if count == 0:
            raise SnapshotError(
                f"the file ends at byte {offset + done}: it changed while being read"
            )
        done += count
