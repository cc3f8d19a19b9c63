"""Chat: sessions of many turns behind a shared system prompt."""

from __future__ import annotations

from typing import ClassVar

from kvpool.soak.profiles.base import Profile, Session

SYSTEM_SEED = 1 << 20


class Chat(Profile):
    """Histories grow turn by turn; users come back, think, or close the window."""

    weights: ClassVar[dict[str, int]] = {
        "bind": 10,
        "step": 22,
        "prefill": 8,
        "decode": 24,
        "read": 6,
        "finish": 8,
        "abort": 3,
        "abort_in_pass": 2,
        "abort_in_bind": 1,
        "abort_in_finish": 1,
        "checkpoint": 3,
        "extend": 2,
        "shrink": 1,
        "toggle": 1,
        "reset": 1,
    }

    def new_session(self) -> Session:
        """A system prompt that all share, of one of three assistants, and a first question."""
        which = self.draw.integer(0, 2)
        # As long in every session: it is the same prompt.
        system = 1 + (SYSTEM_SEED >> which) % max(1, self.longest // 3)
        key = which if self.draw.chance(25) else 0
        question = [self.fresh(), self.length(max(1, self.longest // 8))]
        return Session([[SYSTEM_SEED + which, system], question], key)
