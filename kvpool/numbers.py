"""Numbers of callers and files: checked once, and plain integers from then on.

A NumPy scalar would wrap in sums and products, and a float or a bool would pass for an integer.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

INT32_MAX = 2**31 - 1
INT64_MAX = 2**63 - 1
_MANY_BITS = 256


def whole_number(value: Any, name: str, at_least: int = 0, at_most: int | None = None) -> int:
    """`value` as an int, if it is an integer in ``at_least .. at_most``.

    Raises
    ------
    TypeError
        No integer; a bool is none.
    ValueError
        Out of range.
    """
    if type(value) is not int:
        if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, np.integer)):
            raise TypeError(f"{name} must be an int, got {type(value).__name__}")
        value = int(value)
    if value < at_least:
        raise ValueError(f"{name} must be at least {at_least}, got {shown(value)}")
    if at_most is not None and value > at_most:
        raise ValueError(f"{name} must be in {at_least} .. {at_most}, got {shown(value)}")
    number: int = value
    return number


def positive_seconds(value: Any, name: str) -> float:
    """`value` as a float, if it is a number of seconds above 0 that ends.

    Raises
    ------
    TypeError
        No number; a bool is none.
    ValueError
        Not above 0, infinite, or not a number at all.
    """
    if isinstance(value, (bool, np.bool_)) or not isinstance(
        value, (int, float, np.integer, np.floating)
    ):
        raise TypeError(f"{name} must be a number of seconds, got {type(value).__name__}")
    if not (value > 0 and math.isfinite(value)):
        raise ValueError(f"{name} must be finite and above 0, got {value}")
    return float(value)


def counted(number: int, noun: str) -> str:
    """A number with what it counts.

    >>> counted(1, "token"), counted(12_031, "request")
    ('1 token', '12,031 requests')
    """
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def shown(value: int) -> str:
    """`value` in digits, or how long it is: Python refuses to print more than 4,300 of them."""
    if -(1 << _MANY_BITS) < value < 1 << _MANY_BITS:
        return str(value)
    return f"a{' negative' if value < 0 else ''} number of {value.bit_length()} bits"
