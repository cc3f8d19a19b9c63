"""Beam: forks, pruned and reordered; and parallel samples of one prompt."""

from __future__ import annotations

from typing import ClassVar

from kvpool.soak.profiles.base import Profile
from kvpool.soak.trace import Operation


class Beam(Profile):
    """A few prompts, many forks of each, which decode together and are pruned."""

    most_bound = 24
    weights: ClassVar[dict[str, int]] = {
        "bind": 3,
        "prefill": 8,
        "step": 8,
        "decode": 30,
        "read": 8,
        "fork": 18,
        "reorder": 6,
        "prune": 10,
        "finish": 3,
        "abort": 2,
        "abort_in_pass": 2,
        "checkpoint": 3,
        "extend": 3,
        "shrink": 1,
        "back": 2,
        "reset": 1,
    }

    def prune(self) -> Operation | None:
        """The worst beam goes."""
        return self.abort() if len(self.player.bound) > 2 else None

    def reorder(self) -> Operation | None:
        """The best beam twice: a fork of the longest."""
        bound = max(self.player.bound.values(), key=lambda b: b.valid_len, default=None)
        if bound is None:
            return None
        return ["fork", bound.handle, self.fresh(), max(1, bound.room), self.fresh()]

    def back(self) -> Operation | None:
        """A beam tries another token."""
        bound = self.pick()
        how = self.draw.integer(0, 2)
        return None if bound is None else ["truncate", bound.handle, 1, how, self.fresh()]
