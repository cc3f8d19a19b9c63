"""Speculative: windows of drafts, trees of drafts, rejects and what is published of them."""

from __future__ import annotations

from typing import ClassVar

from kvpool.soak.profiles.base import Profile
from kvpool.soak.trace import Operation


class Speculative(Profile):
    """Every decode is a window of drafts of which some are taken back."""

    most_bound = 8
    weights: ClassVar[dict[str, int]] = {
        "bind": 6,
        "prefill": 10,
        "step": 6,
        "decode": 4,
        "window": 26,
        "verify": 10,
        "tree": 8,
        "back": 6,
        "rewrite": 3,
        "raw": 4,
        "read": 6,
        "finish": 5,
        "abort": 2,
        "abort_in_pass": 2,
        "abort_in_finish": 1,
        "checkpoint": 6,
        "fork": 3,
        "extend": 4,
        "shrink": 1,
        "toggle": 1,
        "reset": 1,
    }

    def window(self) -> Operation | None:
        """Drafts in place, eager."""
        return self._window("speculate")

    def verify(self) -> Operation | None:
        """Drafts through the verify graph."""
        return self._window("verify_graph")

    def _window(self, verb: str) -> Operation | None:
        rows = [b for b in self.pick_some(4) if b.room and b.valid_len >= b.prompt_len]
        if not rows:
            return None
        most = min(bound.room for bound in rows)
        window = self.draw.integer(1, min(most, 8 if self.draw.chance(85) else 40))
        accepted = [self.draw.integer(0, window) for _ in rows]
        how = self.draw.integer(0, 15)
        return [verb, [bound.handle for bound in rows], window, accepted, how, self.fresh()]

    def tree(self) -> Operation | None:
        """Two branches of drafts, of which one moves to the front."""
        bound = self.pick()
        if bound is None or bound.room < 2:
            return None
        width = self.draw.integer(1, max(1, min(6, bound.room // 2)))
        return ["draft_tree", bound.handle, width, self.draw.integer(0, width), self.fresh()]

    def back(self) -> Operation | None:
        """A reject that comes a step later, or reaches into the prompt."""
        bound = self.pick()
        how, back = self.draw.integer(0, 2), self.length(32)
        return None if bound is None else ["truncate", bound.handle, back, how, self.fresh()]

    def rewrite(self) -> Operation | None:
        """The same tokens once more."""
        bound = self.pick()
        return None if bound is None else ["rewrite", bound.handle, self.length(16)]

    def raw(self) -> Operation | None:
        """A kernel of the caller's own writes."""
        bound = self.pick()
        return None if bound is None else ["write_raw", bound.handle, self.length(48)]
