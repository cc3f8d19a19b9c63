"""Aborts in the middle of a call: tokens that raise when they are read."""

from __future__ import annotations

from kvpool.soak.calls import Said


class Interrupted(KeyboardInterrupt):
    """An abort in the middle of a call."""


class Stop:
    """A token that aborts whoever reads it."""

    def __index__(self) -> int:
        raise Interrupted


def with_stop(tokens: list[int]) -> Said:
    """Tokens behind which an abort waits."""
    return Said([*tokens, Stop()], lambda: f"[{', '.join([*map(str, tokens), 'Stop()'])}]")
