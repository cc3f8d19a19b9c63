"""Adversarial: everything at once, at the edges, and much that must be refused."""

from __future__ import annotations

from typing import ClassVar

from kvpool.soak.bound import KEYS
from kvpool.soak.profiles.base import Session
from kvpool.soak.profiles.speculative import Speculative
from kvpool.soak.trace import Operation


class Adversarial(Speculative):
    """No engine does this. Capacity near zero, pages of one token and of thousands."""

    page_sizes: tuple[int, ...] = (1, 1, 2, 3, 4, 16, 256, 4096)
    most_bound = 10
    weights: ClassVar[dict[str, int]] = {
        "bind": 10,
        "prefill": 6,
        "step": 8,
        "decode": 4,
        "window": 4,
        "verify": 3,
        "tree": 3,
        "back": 3,
        "rewrite": 2,
        "raw": 3,
        "read": 6,
        "finish": 6,
        "abort": 3,
        "abort_in_pass": 2,
        "abort_in_bind": 2,
        "abort_in_finish": 2,
        "checkpoint": 4,
        "fork": 5,
        "extend": 3,
        "shrink": 3,
        "misuse": 12,
        "raw_pages": 8,
        "by_hand": 10,
        "exclusive": 3,
        "old_step": 4,
        "meddle": 1,
        "toggle": 2,
        "reset": 2,
        "rarely": 1,
    }

    def new_session(self) -> Session:
        """Few words, so that texts share by chance; sometimes more than the pool holds."""
        most = self.longest if self.draw.chance(80) else 2 * self.player.shape.num_slots
        length = self.length(min(most, 4 * self.longest))
        return Session([[self.draw.integer(0, 7), length]], self.draw.integer(0, len(KEYS) - 1))

    def some_room(self) -> int:
        """Also far more than there is."""
        return 1 << 31 if self.draw.chance(2) else super().some_room()

    def misuse(self) -> Operation | None:
        """One of many mistakes."""
        bound = self.pick() if self.draw.chance(60) else None
        handle = 0 if bound is None else bound.handle
        return ["misuse", self.draw.integer(0, 199), handle, self.draw.integer(0, 9)]

    def raw_pages(self) -> Operation | None:
        """Pages taken and given back, once or twice."""
        taken = list(self.player.taken)
        if not taken or self.draw.chance(40):
            return ["alloc", self.fresh(), self.length(self.longest // 2)]
        return [self.draw.item(("free", "free", "double_free")), self.draw.item(taken)]

    def by_hand(self) -> Operation | None:
        """Calls on the tree itself."""
        draw, player = self.draw, self.player
        text = draw.item(self.sessions).text if self.sessions else [[draw.integer(0, 7), 64]]
        key = draw.integer(0, len(KEYS) - 1)
        kind = draw.integer(0, 5)
        if kind == 0:
            return ["tree_match", self.fresh(), text, key]
        if kind == 1 and player.locks:
            return ["tree_unlock", draw.item(list(player.locks))]
        if kind == 2 and player.taken:
            handle = draw.item(list(player.taken))
            return ["tree_insert", handle, text, key, self.fresh()]
        if kind == 3:
            return ["tree_evict", self.fresh(), draw.integer(0, 3 * player.page_size)]
        if kind == 4 and draw.chance(20):
            return ["tree_reset", self.fresh()]
        return ["evict_all"] if kind == 5 and draw.chance(20) else None

    def exclusive(self) -> Operation | None:
        """Binds that make everybody else go."""
        if self.draw.chance(40):
            handles = [self.fresh() for _ in range(self.draw.integer(1, 4))]
            return ["bind_equal", handles, self.length(self.longest), self.fresh()]
        session = self.new_session()
        return [
            "bind_alone",
            self.fresh(),
            session.text,
            self.some_room(),
            session.key,
            self.fresh(),
        ]

    def old_step(self) -> Operation | None:
        """A step that is kept, and used when its requests may be gone."""
        if self.draw.chance(50):
            return ["use_kept_step"]
        return ["keep_step", [bound.handle for bound in self.pick_some(3)]]

    def meddle(self) -> Operation | None:
        """A second thread."""
        return ["meddle"]

    def rarely(self) -> Operation | None:
        """Everybody goes, or the pool is closed and made again."""
        return ["reopen"] if self.draw.chance(30) else ["abort_all"]
