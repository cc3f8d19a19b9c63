"""Numbers as people write them: bytes with a unit, tokens with k or M."""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction
from typing import TypeVar

from kvpool.cli.output import CommandError
from kvpool.numbers import INT64_MAX

_BYTES = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
_TOKENS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20}
_NUMBER = re.compile(r"(\d+(?:[_,]\d+)*(?:\.\d+)?)\s*([a-z]*)", re.IGNORECASE | re.ASCII)

_LONGEST = 64

T = TypeVar("T")


def parse_bytes(text: str | int) -> int:
    """Bytes behind ``80GiB`` (2**30), ``80GB`` (10**9), ``1_000`` or a plain number.

    A fraction of a byte is cut off: ``0.3GiB`` is 322,122,547.

    Raises
    ------
    ValueError
        No number, below zero, or a unit that does not say whether it is binary (``80G``).

    >>> parse_bytes("80GiB"), parse_bytes("80 GB"), parse_bytes("16,060,522,496")
    (85899345920, 80000000000, 16060522496)
    """
    number, unit = _split(str(text), "bytes such as 80GiB, 512MiB or 80GB")
    if unit in ("k", "m", "g", "t"):
        raise ValueError(
            f"{text!r} does not say which unit: write {unit.upper()}iB (powers of 1024) or "
            f"{unit.upper()}B (powers of 1000)"
        )
    if unit not in _BYTES:
        raise ValueError(f"expected a unit among B, KB to TB and KiB to TiB, got {text!r}")
    return _in_range(int(number * _BYTES[unit]), text)


def parse_tokens(text: str | int) -> int | None:
    """Tokens behind ``64k`` (64,000), ``3M``, ``4Ki`` (4,096), ``1_000_000``; None: unbounded.

    Raises
    ------
    ValueError
        No number, less than one token, or part of a token (``0.0001k``).

    >>> parse_tokens("64k"), parse_tokens("1.5M"), parse_tokens("unbounded")
    (64000, 1500000, None)
    """
    if str(text).strip().lower() == "unbounded":
        return None
    number, unit = _split(str(text), "tokens such as 64k, 3M, 1_000_000 or unbounded")
    if unit not in _TOKENS:
        raise ValueError(f"expected k, M, G (powers of 1000), Ki or Mi as the unit, got {text!r}")
    tokens = number * _TOKENS[unit]
    if tokens.denominator != 1:
        raise ValueError(f"expected whole tokens, got {text!r}")
    if tokens < 1:
        raise ValueError(f"expected at least one token, got {text!r}")
    return _in_range(int(tokens), text)


def parse_list(parse: Callable[[str], T], text: str) -> list[T]:
    """Parts of a list with commas, each parsed, in order; ``1k,4k`` becomes two numbers.

    Raises
    ------
    ValueError
        An empty part, or what `parse` raises.
    """
    parts = [part.strip() for part in text.split(",")]
    if not all(parts):
        raise ValueError(f"expected values with single commas between them, got {text!r}")
    return [parse(part) for part in parts]


def option_value(option: str, parse: Callable[[str], T], text: str) -> T:
    """What an option says, parsed; a ValueError becomes a `CommandError` that names the option."""
    try:
        return parse(text)
    except ValueError as error:
        raise CommandError(f"{option}: {error}") from None


def show_bytes(num_bytes: int) -> str:
    """Bytes in the largest binary unit that they fill, with two decimals.

    >>> show_bytes(85899345920), show_bytes(131072), show_bytes(12)
    ('80.00 GiB', '128.00 KiB', '12 B')
    """
    for unit, size in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(num_bytes) >= size:
            return f"{num_bytes / size:.2f} {unit}"
    return f"{num_bytes} B"


def show_count(count: int) -> str:
    """A count with commas: ``463,184``."""
    return f"{count:,}"


def _in_range(number: int, text: str | int) -> int:
    if number > INT64_MAX:
        raise ValueError(f"expected at most {INT64_MAX:,}, got {str(text)!r}")
    return number


def _split(text: str, expected: str) -> tuple[Fraction, str]:
    if len(text) > _LONGEST:
        raise ValueError(f"expected {expected}, got {len(text)} characters: {text[:20]!r} ...")
    match = _NUMBER.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"expected {expected}, got {text!r}")
    digits, unit = match.groups()
    return Fraction(re.sub("[_,]", "", digits)), unit.lower()
