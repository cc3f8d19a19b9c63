"""Bytes of a model's weights, as the files beside its config say."""

from __future__ import annotations

import json
import reprlib
import struct
from pathlib import Path

from kvpool.numbers import INT64_MAX
from kvpool.sizing.errors import SizingError

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"


def stored_weights(folder: Path) -> tuple[int, str] | None:
    """Bytes of the tensors of a folder, and the file that says so; None where it has no weights.

    Raises
    ------
    SizingError
        The file is there but broken.
    """
    if (folder / _INDEX).is_file():
        return _total_of_index(folder / _INDEX), _INDEX
    if (folder / _SINGLE).is_file():
        return _tensors_of_file(folder / _SINGLE), _SINGLE
    return None


def _total_of_index(path: Path) -> int:
    try:
        total = json.loads(path.read_text(encoding="utf-8"))["metadata"]["total_size"]
        # Some writers made a float of it.
        num_bytes = int(total)
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
        raise SizingError(
            f"{path} has no metadata.total_size: say how many bytes the weights have",
            remedy="weights",
        ) from None
    if isinstance(total, bool) or not 1 <= num_bytes <= INT64_MAX:
        raise SizingError(
            f"{path} has metadata.total_size = {reprlib.repr(total)}, expected bytes in 1 .. "
            f"{INT64_MAX}"
        )
    return num_bytes


def _tensors_of_file(path: Path) -> int:
    """Bytes after the header, whose length stands in the first eight bytes."""
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
    header = struct.unpack("<Q", start)[0] if len(start) == 8 else size
    if header + 8 >= size:
        raise SizingError(
            f"{path} is no safetensors file: {size} bytes, and a header of {header} in them"
        )
    return int(size - 8 - header)
