"""Tiers: pools that come and go over tiers that stay, and that now and then misbehave."""

from __future__ import annotations

from typing import ClassVar

from kvpool.soak.bound import KEYS
from kvpool.soak.drawing import Draw
from kvpool.soak.lineage import cut, length_of
from kvpool.soak.player import Player
from kvpool.soak.profiles.adversarial import Adversarial
from kvpool.soak.profiles.base import Session
from kvpool.soak.trace import Operation


class Tiers(Adversarial):
    """What is fetched is bound soon after, or too early; some episodes have only good tiers.

    What a bind finds depends on when pages arrive, and the operations on what it found: here the
    same seed makes the same pools, and begins with the same traffic.
    """

    page_sizes = (1, 2, 4, 16, 16, 32)
    weights: ClassVar[dict[str, int]] = {
        "bind": 24,
        "prefill": 40,
        "step": 10,
        "decode": 6,
        "window": 4,
        "read": 4,
        "finish": 30,
        "abort": 3,
        "abort_in_pass": 1,
        "abort_in_finish": 1,
        "checkpoint": 10,
        "fork": 4,
        "extend": 2,
        "shrink": 1,
        "misuse": 1,
        "raw_pages": 3,
        "by_hand": 4,
        "exclusive": 1,
        "meddle": 1,
        "toggle": 1,
        "rarely": 1,
        "attach": 8,
        "detach": 1,
        "fetch": 20,
        "go_on_with_fetch": 24,
        "poll": 3,
        "flush": 6,
        "make_room": 3,
        "round_trip": 4,
        "upset": 5,
        "renew": 1,
        "misuse_tiers": 1,
    }

    def __init__(self, player: Player, draw: Draw) -> None:
        super().__init__(player, draw)
        self._is_wild = draw.chance(50)
        self._fetched: Session | None = None

    def next(self) -> Operation:
        """The next operation; tiers are there from the beginning, mostly."""
        if self.player.store is None and self.draw.chance(50):
            return self.attach() or ["check_now"]
        return super().next()

    def bind(self) -> Operation | None:
        """A prompt that was fetched, as often as any other."""
        session, self._fetched = self._fetched, None
        if session is None or self.draw.chance(30):
            return super().bind()
        text = [*session.text, [self.fresh(), self.length(16)]]
        return ["bind", self.fresh(), text, self.some_room(), session.key, 0, self.fresh()]

    def attach(self) -> Operation | None:
        """Tiers of a policy, in an order, with more or less room; in place of what is no use."""
        if self.player.is_attached:
            return ["close_tiers"] if self.player.is_halted else None
        narrow = self.draw.integer(0, 31) if self.draw.chance(40) else 0
        if not self._is_wild:
            narrow &= ~4  # a time-out too short for a tier that hangs
        policy = self.draw.item((0, 0, 0, 1, 1, 2))
        return ["attach_tiers", policy, self.draw.integer(0, 2), narrow]

    def toggle(self) -> Operation | None:
        """Reuse is not off for long: without it nothing is fetched."""
        return ["toggle_reuse", int(not self.player.reuse or self.draw.chance(60))]

    def rarely(self) -> Operation | None:
        """Everybody goes; or the pool does, and the next one has the same tiers."""
        return ["reopen"] if self.draw.chance(70) else ["abort_all"]

    def detach(self) -> Operation | None:
        """Let go of them, at any time."""
        return ["close_tiers"] if self.player.is_attached else None

    def some_text(self) -> Session:
        """What was said in a session, or a part of it; or what nobody has said."""
        if not self.sessions or self.draw.chance(8):
            return self.new_session()
        session = self.draw.item(self.sessions)
        text = [list(part) for part in session.text]
        if self.draw.chance(20):
            text = cut(text, self.draw.integer(1, length_of(text)))
        key = session.key if self.draw.chance(95) else self.draw.integer(0, len(KEYS) - 1)
        return Session(text, key)

    def fetch(self) -> Operation | None:
        """Ahead of a bind."""
        if not self.player.is_attached and self.draw.chance(90):
            return None
        self._fetched = found = self.some_text()
        publishes = int(self.draw.chance(70))
        return ["prefetch", self.fresh(), found.text, found.key, publishes]

    def go_on_with_fetch(self) -> Operation | None:
        """Wait for one, publish what it has, cancel it, forget it."""
        fetches = list(self.player.fetches)
        if not fetches:
            return None
        handle = self.draw.item(fetches)
        what = self.draw.integer(0, 9)
        if what < 5:
            return ["wait_for_fetch", handle]
        if what < 7:
            return ["publish_fetch", handle, self.draw.integer(-2, 6)]
        return ["cancel_fetch" if what == 7 else "drop_fetch", handle]

    def poll(self) -> Operation | None:
        """Whatever has come; or a look at the counters."""
        return ["poll_tiers"] if self.draw.chance(60) else ["look_at_tiers"]

    def flush(self) -> Operation | None:
        """So that what was published is in the tiers."""
        return ["flush_tiers"] if self.player.is_attached else None

    def make_room(self) -> Operation | None:
        """Everything that can go goes: what was in the tree is in the tiers only."""
        return ["evict_all"]

    def round_trip(self) -> Operation | None:
        """Out of the tree, and back from the tiers."""
        found = self.some_text()
        return ["round_trip", found.text, found.key]

    def upset(self) -> Operation | None:
        """A tier misbehaves for a while."""
        if not self._is_wild:
            return None
        return ["upset_tier", self.draw.integer(0, 7), self.draw.integer(1, 12)]

    def renew(self) -> Operation | None:
        """A reset of the cache: the weights are new, or the tiers go on."""
        return ["renew", self.draw.integer(0, 1)]

    def misuse_tiers(self) -> Operation | None:
        """A mistake, or an abort."""
        if self.draw.chance(30):
            return ["interrupt_prefetch", self.new_session().text]
        return ["misuse_tiers", self.draw.integer(0, 99), self.draw.integer(0, 9)]
