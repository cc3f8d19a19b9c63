"""Stage: a pool under test, what must be true of it, and the checks after every operation."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvpool.pool import KVCachePool
from kvpool.soak.blank import look_at_blank
from kvpool.soak.bound import KEYS, Bound
from kvpool.soak.cached import Cached
from kvpool.soak.calls import Calls, Said
from kvpool.soak.finding import Finding
from kvpool.soak.lineage import Lineage, Text
from kvpool.soak.prints import RowCode
from kvpool.soak.store import Fetching, Store
from kvpool.soak.trace import PoolShape

MAX_PAST = 32  # ended requests whose rows are still recognised where they must not be
_SUMS = ("pages_free", "pages_private", "pages_tree", "pages_taken")


class Stage:
    """The state that the verbs of `Player` share.

    Parameters
    ----------
    shape : PoolShape
        Of the pool.
    device : str
        Where it lives.
    script : list of str, optional
        Takes the calls as Python.
    """

    def __init__(
        self, shape: PoolShape, device: str = "cpu", script: list[str] | None = None
    ) -> None:
        self.shape = shape
        self.device_name = device
        self.calls = Calls(script)
        self.num_operations = self.num_checks = 0
        self.rows_read = self.bytes_read = 0
        self.refusals = self.evicted = self.hits = self.matched_tokens = 0
        self.ended_evicted = self.fetched = 0
        self.store: Store | None = None
        self.weights = self.attached_weights = 0
        self.cached = Cached(shape.page_size)
        self._numbers: dict[int, int] = {}
        self._open()

    def _open(self) -> None:
        """Make the pool, of which nothing is known yet."""
        self.pool: KVCachePool = self.shape.make(self.device_name)
        self.calls.say(f"pool = {self.shape.source(self.device_name)}")
        self.calls.names.update({"pool": self.pool, "pool.radix": self.pool.radix})
        self.code = RowCode(
            self.shape.dtype,
            self.pool.compute_dtype,
            self.shape.num_layers,
            self.shape.num_kv_heads,
            self.shape.head_dim,
            self.shape.scale,
        )
        self.bound: dict[int, Bound] = {}
        self.past: deque[tuple[int, Lineage]] = deque(maxlen=MAX_PAST)
        self.taken: dict[int, NDArray[np.int32]] = {}
        self.locks: dict[int, int] = {}
        self.reuse = True
        self.kept_step: tuple[int, ...] | None = None
        self.counts = {
            "prefix_prompt_tokens": 0,
            "prefix_match_tokens": 0,
            "prefix_insert_tokens": 0,
            "bind_failures": 0,
        }
        self.evicted = 0
        self.cached.clear_tree()
        self.fetches: dict[int, Fetching] = {}
        self.num_resets = self.most_fetching = 0
        self.is_attached = self.is_halted = self.may_fetch = self.has_dropped = False

    # ---- words that several verbs use

    @property
    def page_size(self) -> int:
        """Tokens per page."""
        return self.shape.page_size

    def whole(self, length: int) -> int:
        """`length` down to whole pages."""
        return length - length % self.page_size

    def rounded(self, length: int) -> int:
        """`length` up to whole pages."""
        return -(-length // self.page_size) * self.page_size

    def lineage(self, text: Text, tail: int, key: int) -> Lineage:
        """A new lineage, by the weights of now."""
        key %= len(KEYS)
        return Lineage(text, tail, key, self.shape.vocabulary, self.code, self.weights)

    def cache_was_reset(self) -> None:
        """Nothing is cached, who is bound inserts nothing, and tiers wait for a word."""
        self.cached.clear_tree()
        self.num_resets += 1
        self.is_halted = self.is_attached
        for bound in self.bound.values():
            bound.inserts = False

    def count_fetched(self) -> None:
        """The tiers are about to be closed."""
        if self.is_attached:
            self.fetched += self.calls.names["tiers"].stats()["prefetch_published_pages"]

    def rows_of(self, handles: list[int]) -> list[Bound]:
        """Those of the requests that are bound, each once."""
        return [self.bound[handle] for handle in dict.fromkeys(handles) if handle in self.bound]

    def activate(self, rows: list[Bound]) -> Any:
        """A step of these rows, under the name ``step``."""
        return self.calls.let("step", "pool", "activate_step", *[b.request_id for b in rows])

    def forget(self, bound: Bound) -> None:
        """The request has ended."""
        del self.bound[bound.handle]
        self.past.append((bound.handle, bound.lineage))

    def forget_all(self) -> None:
        """All requests have ended."""
        for bound in list(self.bound.values()):
            self.forget(bound)

    def wrong_capacity(self, method: str, request_id: int, asked: int, given: int) -> Finding:
        """The finding that a request has another capacity than it was given."""
        return self.calls.fail(
            f"the capacity after {method}",
            f"{asked} asked, {given} given",
            f"pool.request({request_id}).capacity != {given}, {given}",
        )

    def to_host(self, array: Any) -> NDArray[Any]:
        """An array of the pool's device on the host."""
        return self.pool.device.to_host(array)

    def on_device(self, array: NDArray[Any], text: str = "") -> Said:
        """A host array where the pool wants it."""
        placed = self.pool.device.to_device(array)
        return Said(placed, lambda: f"on_device({text or _array_text(array)})")

    # ---- what always holds

    def check_sums(self) -> None:
        """What must be true after every operation; a few microseconds."""
        stats, bound = self.pool.stats(), self.bound
        expect = self.calls.expect
        total = sum([stats[name] for name in _SUMS])
        if total != self.shape.num_pages:
            asked = f"sum(pool.stats()[name] for name in {_SUMS})"
            expect(self.shape.num_pages, total, "the sum of free, private, tree and taken", asked)
        expected = {
            **self.counts,
            "pages_free": self.pool.free_pages,
            "requests_bound": len(bound),
            "pages_taken": sum([pages.size for pages in self.taken.values()])
            + stats["pages_fetching"],
        }
        if not bound:
            expected["pages_private"] = 0
            if not self.locks and not self.may_fetch:
                expected["pages_evictable"] = stats["pages_tree"]
        for name, value in expected.items():
            if stats[name] != value:
                expect(value, stats[name], name, f"pool.stats()[{name!r}]")
        if stats["evicted_pages"] < self.evicted:
            found = stats["evicted_pages"]
            asked = f"pool.stats()['evicted_pages'] >= {self.evicted}"
            raise self.calls.fail("evicted_pages fell", f"{self.evicted} to {found}", asked)
        self.evicted = stats["evicted_pages"]
        if self.store is not None and self.store.errors:
            raise Finding("an error in the background", self.store.errors[0])
        if stats["pages_fetching"] and not self.may_fetch:
            expect(0, stats["pages_fetching"], "pages_fetching", "pool.stats()['pages_fetching']")

    def check_request(self, bound: Bound) -> None:
        """What the pool says of one request is what must be."""
        info = self.pool.request(bound.request_id)
        asked = f"pool.request({bound.request_id})"
        expect = self.calls.expect
        expect(bound.valid_len, info.valid_len, "valid_len", f"{asked}.valid_len")
        expect(bound.capacity, info.capacity, "capacity", f"{asked}.capacity")
        expect(bound.shared, info.shared_len, "shared_len", f"{asked}.shared_len")
        if bound.matched is not None:
            expect(bound.matched, info.matched_len, "matched_len", f"{asked}.matched_len")
        if bound.entered > bound.looked_at:
            look_at_blank(self, bound, info.page_ids)
            bound.looked_at = bound.entered

    def check(self) -> None:
        """The pool's own check, and all bound requests."""
        self.num_checks += 1
        mark = self.calls.mark()
        self.calls.call("pool", "check")
        for bound in self.bound.values():
            self.check_request(bound)
        self.calls.unsay(mark)

    # ---- rows as arguments and as answers

    def rows(
        self, layer: int, spans: list[tuple[Bound, int, int]], shape: tuple[int, ...]
    ) -> tuple[Said, Said]:
        """K and V of spans of requests, in the compute dtype, as `put` takes them."""
        return self._said(layer, spans, shape, self.code.computed, "rows")

    def stored_rows(self, layer: int, spans: list[tuple[Bound, int, int]]) -> tuple[Said, Said]:
        """K and V of spans of requests as the buffers hold them."""
        count = sum(end - start for _, start, end in spans)
        shape = (count, self.shape.num_kv_heads, self.shape.head_dim)
        return self._said(layer, spans, shape, self.code.stored, "stored")

    def _said(
        self,
        layer: int,
        spans: list[tuple[Bound, int, int]],
        shape: tuple[int, ...],
        values: NDArray[Any],
        name: str,
    ) -> tuple[Said, Said]:
        parts = [bound.lineage.codes(layer, start, end) for bound, start, end in spans]
        codes = parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)
        both = values[codes]
        place = self.pool.device.to_device

        k, v = (place(side.reshape(shape)) for side in both)
        return (
            Said(k, lambda: self.rows_text(layer, 0, spans, shape, name)),
            Said(v, lambda: self.rows_text(layer, 1, spans, shape, name)),
        )

    def rows_text(
        self,
        layer: int,
        side: int,
        spans: list[tuple[Bound, int, int]],
        shape: tuple[int, ...],
        name: str = "rows",
    ) -> str:
        """How a script spells rows: fingerprints are numbered as they come up."""
        prints = [p for b, start, end in spans for p in b.lineage.prints(start, end).tolist()]
        numbers = [self._numbers.setdefault(p, len(self._numbers) + 1) for p in prints]
        return f"{name}({numbers}, {layer}, {side}, {shape})"


def _array_text(array: NDArray[Any]) -> str:
    return f"np.array({array.tolist()!r}, np.{array.dtype})"
