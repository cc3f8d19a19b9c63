"""Profile: traffic of one kind, one operation at a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvpool.soak.bound import KEYS, Bound
from kvpool.soak.drawing import Draw
from kvpool.soak.lineage import cut, length_of
from kvpool.soak.player import Player
from kvpool.soak.reading import DOORS
from kvpool.soak.trace import Operation, PoolShape
from kvpool_ext.eviction import EVICTION_POLICIES

MAX_PARTS = 48  # of a session's text; then it is over
DTYPES = ("float32", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")


@dataclass
class Session:
    """A conversation: what was said, under which namespace."""

    text: list[list[int]]
    key: int = 0
    priority: int = 0


class Profile:
    """Draws the next operation from the player's state; knows nothing that the trace needs.

    Subclasses say how sessions begin and go on, and how often which move is made.

    Parameters
    ----------
    player : Player
        Whose pool the traffic is for.
    draw : Draw
        Where choices come from.
    """

    page_sizes: tuple[int, ...] = (1, 2, 4, 16, 16, 32, 64)
    most_bound = 12
    weights: ClassVar[dict[str, int]] = {}

    def __init__(self, player: Player, draw: Draw) -> None:
        self.player = player
        self.draw = draw
        self._count = 0
        self._seen_refusals = 0
        self.sessions: list[Session] = []
        self.longest = min(player.shape.num_slots, max(3 * player.page_size, 768))
        # Names, not bound methods: what is over must be gone at once, not at a collection.
        self._moves = [name for name, weight in self.weights.items() for _ in range(weight)]

    @classmethod
    def draw_shape(cls, draw: Draw) -> PoolShape:
        """A pool: small ones as likely as large ones, and often too small for the traffic."""
        page_size = draw.item(cls.page_sizes)
        most_bits = 12 if page_size <= 16 else 16 - page_size.bit_length()
        num_pages = draw.integer(1, 1 << draw.integer(0, max(most_bits, 1)))
        dtype = draw.item(DTYPES)
        return PoolShape(
            num_layers=draw.integer(1, 3),
            num_pages=num_pages,
            page_size=page_size,
            num_kv_heads=draw.integer(1, 2),
            head_dim=draw.item((4, 8)),
            dtype=dtype,
            eviction=draw.item(EVICTION_POLICIES),
            scale=draw.integer(1, 2) if dtype.startswith("float8") else 1,
            max_batch_size=draw.item((1, 4, 8)),
            zero_rejected_kv=draw.chance(70),
            vocabulary=draw.item((1 << 32, 50_000, 50_000, 2)),
        )

    def next(self) -> Operation:
        """The next operation."""
        bound = self.player.bound
        pressed = self.player.refusals > self._seen_refusals
        self._seen_refusals = self.player.refusals
        if bound and (len(bound) >= self.most_bound or (pressed and self.draw.chance(60))):
            return self.end() or ["check_now"]
        for _ in range(20):
            operation: Operation | None = getattr(self, self.draw.item(self._moves))()
            if operation is not None:
                return operation
        return self.bind() or ["check_now"]

    # ---- small choices

    def fresh(self) -> int:
        """A number that was not there before: a handle, or a seed of a text."""
        self._count += 1
        return self._count

    def pick(self) -> Bound | None:
        """One of the bound requests."""
        bound = list(self.player.bound.values())
        return self.draw.item(bound) if bound else None

    def pick_some(self, most: int) -> list[Bound]:
        """Some of the bound requests, in any order."""
        bound = list(self.player.bound.values())
        count = min(len(bound), self.draw.integer(1, most))
        picked = []
        for _ in range(count):
            picked.append(bound.pop(self.draw.integer(0, len(bound) - 1)))
        return picked

    def length(self, most: int) -> int:
        """Tokens: a few, or about a page boundary; at least 1."""
        size, draw = self.player.page_size, self.draw
        if draw.chance(40):
            return draw.integer(1, max(1, min(most, 24)))
        pages = draw.integer(0, max(1, min(most, self.longest) // size))
        return max(1, min(most, pages * size + draw.integer(-1, 1)))

    def some_room(self) -> int:
        """Tokens to reserve behind a prompt."""
        return self.length(max(1, self.longest // 4)) if self.draw.chance(80) else 0

    # ---- moves that most traffic has

    def new_session(self) -> Session:
        """How a session begins."""
        key = self.draw.integer(0, len(KEYS) - 1) if self.draw.chance(20) else 0
        return Session([[self.fresh(), self.length(self.longest // 2)]], key)

    def go_on(self, session: Session) -> None:
        """What is said next in a session."""
        session.text.append([self.fresh(), self.length(max(1, self.longest // 8))])

    def bind(self) -> Operation | None:
        """The next turn of a session, new or old."""
        draw = self.draw
        if self.sessions and draw.chance(75):
            session = draw.item(self.sessions)
            self.go_on(session)
            if length_of(session.text) > self.longest or len(session.text) > MAX_PARTS:
                self.sessions.remove(session)
                session.text = cut(session.text, self.longest)[:MAX_PARTS]
        else:
            session = self.new_session()
        text = [list(part) for part in session.text]
        tail = self.fresh()
        handle = self.fresh()
        more = self.some_room()
        return ["bind", handle, text, more, session.key, session.priority, tail]

    def step(self) -> Operation | None:
        """A forward pass: prefill chunks and decodes share it."""
        rows = [bound for bound in self.pick_some(8) if bound.room]
        if not rows:
            return None
        lengths = []
        for bound in rows:
            left = bound.prompt_len - bound.valid_len
            lengths.append(self.length(left) if left > 0 else 1)
        form = self.draw.integer(0, 31) if self.draw.chance(30) else 0
        return ["write", [bound.handle for bound in rows], lengths, form]

    def prefill(self) -> Operation | None:
        """All that is left of a prompt in one pass."""
        bound = self.pick()
        left = 0 if bound is None else bound.prompt_len - bound.valid_len
        return None if bound is None or left <= 0 else ["write", [bound.handle], [left], 0]

    def decode(self) -> Operation | None:
        """One token for every request whose prompt is there."""
        rows = [b for b in self.player.bound.values() if b.room and b.valid_len >= b.prompt_len]
        if not rows:
            return None
        handles = [bound.handle for bound in rows]
        if self.draw.chance(30):
            return ["decode_graph", handles, self.draw.integer(0, 1)]
        return ["write", handles, [1] * len(rows), self.draw.item((0, 2, 4, 6))]

    def read(self) -> Operation | None:
        """Some requests through one of the doors."""
        rows = self.pick_some(4)
        if not rows:
            return None
        return ["read", [bound.handle for bound in rows], self.draw.integer(0, len(DOORS) - 1)]

    def finish(self) -> Operation | None:
        """The answer is complete; the session remembers it."""
        bound = self.pick()
        if bound is None:
            return None
        self.remember(bound)
        drop = self.draw.integer(-2, 3) if self.draw.chance(40) else 0
        return ["finish", bound.handle, drop]

    def remember(self, bound: Bound) -> None:
        """Keep what a request has said as a session."""
        if bound.valid_len and len(self.sessions) < 16:
            text = bound.lineage.text_upto(bound.valid_len)
            priority = self.draw.item((0, 0, 1, -2))
            self.sessions.append(Session(text, bound.lineage.key, priority))
        elif self.sessions and self.draw.chance(50):
            self.sessions.pop(0)

    def abort(self) -> Operation | None:
        """The caller goes away, wherever the request stands."""
        bound = self.pick()
        return None if bound is None else ["abort", bound.handle]

    def end(self) -> Operation | None:
        """Somebody has to go."""
        return self.abort() if self.draw.chance(30) else self.finish()

    def abort_in_pass(self) -> Operation | None:
        """A pass that stops behind some layer, which an abort or the same pass may follow."""
        bound = self.pick()
        if bound is None:
            return None
        layers = self.draw.integer(1, self.player.shape.num_layers)
        return ["write_part", bound.handle, self.length(64), layers]

    def checkpoint(self) -> Operation | None:
        """Share what is written so far."""
        bound = self.pick()
        drop = self.draw.integer(-1, 3) if self.draw.chance(30) else 0
        return None if bound is None else ["checkpoint", bound.handle, drop]

    def fork(self) -> Operation | None:
        """Another request over the same tokens."""
        bound = self.pick()
        if bound is None:
            return None
        return ["fork", bound.handle, self.fresh(), self.length(64), self.fresh()]

    def extend(self) -> Operation | None:
        """More room."""
        bound = self.pick()
        return None if bound is None else ["extend", bound.handle, self.length(128)]

    def shrink(self) -> Operation | None:
        """Less room."""
        bound = self.pick()
        return None if bound is None else ["shrink", bound.handle, self.draw.integer(0, 64)]

    def reset(self) -> Operation | None:
        """New weights, while requests are bound."""
        return ["reset"]

    def toggle(self) -> Operation | None:
        """Reuse on or off, on more often."""
        return ["toggle_reuse", int(self.draw.chance(75))]

    def abort_in_bind(self) -> Operation | None:
        """An abort while a bind runs."""
        return ["interrupt_bind", [[self.fresh(), self.length(32)]], self.length(32)]

    def abort_in_finish(self) -> Operation | None:
        """An abort while a finish or checkpoint runs."""
        bound = self.pick()
        return (
            None if bound is None else ["interrupt_finish", bound.handle, self.draw.integer(0, 1)]
        )
