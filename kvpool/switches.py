"""Switches: settings of the environment that are on or off."""

from __future__ import annotations

import os

_OFF = frozenset({"0", "false", "no", "off"})


def is_switched_on(name: str, default: bool) -> bool:
    """Whether the environment variable `name` is on; `default` where it is unset or empty.

    ``0``, ``false``, ``no`` and ``off`` are off, in any case of letters; all else is on.
    """
    text = os.environ.get(name, "").strip().lower()
    return text not in _OFF if text else default
