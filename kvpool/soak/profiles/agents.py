"""Agents: deep shared prefixes, tool calls that branch, namespaces and priorities."""

from __future__ import annotations

from typing import ClassVar

from kvpool.soak.lineage import cut, length_of
from kvpool.soak.profiles.base import Profile, Session

TOOLS_SEED = 1 << 21


class Agents(Profile):
    """Plans that branch into tool calls: a long prefix, many short ends, checkpoints between."""

    most_bound = 16
    weights: ClassVar[dict[str, int]] = {
        "bind": 14,
        "step": 14,
        "prefill": 10,
        "decode": 12,
        "read": 6,
        "finish": 8,
        "abort": 3,
        "abort_in_pass": 2,
        "abort_in_finish": 1,
        "checkpoint": 10,
        "fork": 4,
        "extend": 2,
        "shrink": 2,
        "toggle": 1,
        "reset": 1,
    }

    def new_session(self) -> Session:
        """The descriptions of all tools, then the task."""
        tools = 1 + 7 * self.longest // 13
        key = self.draw.integer(0, 3) if self.draw.chance(40) else 0
        priority = self.draw.item((0, 0, 1, 5, -2))
        return Session([[TOOLS_SEED, tools], [self.fresh(), self.length(32)]], key, priority)

    def go_on(self, session: Session) -> None:
        """A tool's answer; or a step back in the plan, to try another branch."""
        if self.draw.chance(30):
            session.text = cut(session.text, self.draw.integer(1, length_of(session.text)))
        super().go_on(session)
