"""Namespaces as text: each with its type, so that 1, "1" and b"1" stay three."""

from __future__ import annotations

import json
from typing import Any

from kvpool.errors import SnapshotError

ExtraKey = str | bytes | int | None
ALIGNMENT = 8  # the file goes on with wider elements


def encode_namespace(extra_key: ExtraKey) -> list[str]:
    """Type and value of one namespace, as ASCII text would hold them."""
    if extra_key is None:
        return ["none"]
    if isinstance(extra_key, str):
        # A subclass may print as it likes.
        return ["str", str.__str__(extra_key)]
    if isinstance(extra_key, bytes):
        return ["bytes", extra_key.hex()]
    # Hexadecimal: Python limits the decimal digits that it reads and writes.
    return ["int", format(extra_key, "x")]


def encode_namespaces(keys: list[ExtraKey]) -> bytes:
    """JSON of all, padded with spaces; lone surrogates of a str are escaped, not lost."""
    text = json.dumps([encode_namespace(key) for key in keys]).encode("ascii")
    return text + b" " * (-len(text) % ALIGNMENT)


def decode_namespaces(text: bytes) -> list[ExtraKey]:
    """What `encode_namespaces` was given; SnapshotError for anything else, duplicates too."""
    try:
        entries = json.loads(text.decode("ascii"))
    except (ValueError, RecursionError):
        raise SnapshotError("the namespaces are no JSON") from None
    if not isinstance(entries, list):
        raise SnapshotError("the namespaces are no list")
    keys = [_decode(entry) for entry in entries]
    if len({(type(key), key) for key in keys}) != len(keys):
        raise SnapshotError("a namespace stands twice")
    return keys


def _decode(entry: Any) -> ExtraKey:
    match entry:
        case ["none"]:
            return None
        case ["str", str(text)]:
            return text
        case ["bytes", str(text)] if set(text) <= set("0123456789abcdef") and len(text) % 2 == 0:
            return bytes.fromhex(text)
        case ["int", str(text)] if text.removeprefix("-") and (
            set(text.removeprefix("-")) <= set("0123456789abcdef")
        ):
            return int(text, 16)
    raise SnapshotError(f"{str(entry)[:80]} is no namespace")
