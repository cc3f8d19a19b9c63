"""A namespace of the pool in the words of vLLM's events: adapter name, salt, extra keys.

vLLM keeps prefixes apart by an adapter's name, told with every block, and by a cache salt, told
with a prompt's first block only; the hashes below inherit it. A pool has one `extra_key` for both.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvpool.request import ExtraKey

LoraName = Callable[[ExtraKey], str | None]

_INT64_MIN, _UINT64_MAX = -(1 << 63), (1 << 64) - 1


def salt_keys(extra_key: ExtraKey) -> tuple[Any, ...]:
    """One item with the type of the namespace; two, type and value, where msgpack has no such."""
    if extra_key is None:
        return ()
    if isinstance(extra_key, str):
        extra_key = str.__str__(extra_key)
        return (extra_key,) if is_text(extra_key) else ("str", _as_bytes(extra_key))
    if isinstance(extra_key, int) and not _INT64_MIN <= extra_key <= _UINT64_MAX:
        # Hexadecimal: Python limits the decimal digits that it reads and writes.
        return ("int", format(extra_key, "x"))
    return (extra_key,)


def salt_text(extra_key: ExtraKey) -> str | None:
    """The namespace as text; what is no text of itself says its type."""
    match extra_key:
        case None:
            return None
        case str():
            text = str.__str__(extra_key)
            return text if is_text(text) else f"str:{_as_bytes(text).hex()}"
        case bytes():
            return f"bytes:{extra_key.hex()}"
        case _:
            return f"int:{extra_key:x}"


def namespace_of(first_keys: tuple[Any, ...] | None, lora_name: str | None) -> ExtraKey:
    """The `extra_key` behind the extra keys of a namespace's first page, adapter and salt.

    Streams of vLLM have images and embeddings among them, which no namespace of kvpool has; of
    these the salt comes last but for embeddings, and a list of several is no namespace at all.
    """
    keys = list(first_keys or ())
    if lora_name is not None and keys and keys[0] == lora_name:
        keys = keys[1:]
        if not keys:
            return lora_name
    match keys:
        case []:
            return lora_name
        case ["int", str(text)]:
            return int(text, 16)
        case ["str", bytes(data)]:
            return data.decode("utf-8", "surrogatepass")
        case [str() | bytes() | int() as key]:
            return key
    return repr(keys)


class Namespace:
    """How the events of one namespace name it.

    Parameters
    ----------
    extra_key : str, bytes, int or None
        The namespace.
    lora_name : str or None
        The adapter that it stands for, or is of.
    """

    def __init__(self, extra_key: ExtraKey, lora_name: str | None) -> None:
        self.lora_name = lora_name
        self._all: tuple[Any, ...] = () if lora_name is None else (lora_name,)
        salted = not (isinstance(extra_key, str) and extra_key == lora_name)
        self._first = self._all + (salt_keys(extra_key) if salted else ())
        self.cache_salt = salt_text(extra_key) if salted else None

    def extra_keys(self, num_pages: int, *, begins: bool) -> list[tuple[Any, ...] | None] | None:
        """Those of `num_pages` pages, of which the first may begin the namespace."""
        first = self._first if begins else self._all
        if not first and not self._all:
            return None
        return [first or None] + [self._all or None] * (num_pages - 1)


def is_text(text: str) -> bool:
    """Whether UTF-8 can hold it: a lone surrogate it cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _as_bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")
