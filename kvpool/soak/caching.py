"""TreeVerbs: what a caller does to the pool beside its requests."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvpool.errors import KVCacheExhaustedError, KVCacheStateError
from kvpool.soak.bound import KEYS, Bound
from kvpool.soak.lineage import Text, tokens_of
from kvpool.soak.stage import Stage

MAX_LOCKS = 4
# Calls that a closed pool refuses.
_CLOSED: tuple[tuple[str, tuple[Any, ...]], ...] = (
    ("bind_request", ([1], 1)),
    ("check", ()),
    ("stats", ()),
    ("prefetch", ([1],)),
    ("poll_tiers", ()),
)


class TreeVerbs(Stage):
    """Operations on raw pages, on the tree, and on the pool as a whole."""

    def toggle_reuse(self, enabled: int) -> None:
        """Prefix reuse on or off."""
        self.reuse = bool(enabled)
        self.calls.say(f"pool.prefix_reuse_enabled = {self.reuse}")
        self.pool.prefix_reuse_enabled = self.reuse

    def reset(self) -> None:
        """Forget the cache, while requests may be bound."""
        before = self.pool.free_slots
        freed = self.calls.call("pool", "reset_prefix_cache")
        self.calls.expect(before + freed, self.pool.free_slots, "free_slots", "pool.free_slots")
        self.cache_was_reset()

    def reopen(self) -> None:
        """Close: every call says so; then another pool of the same shape."""
        for bound in list(self.bound.values()):
            self.forget(bound)
        self.count_fetched()
        self.calls.call("pool", "close")
        self.calls.call("pool", "close")
        refused = self.calls.refused
        for method, args in _CLOSED:
            refused(KVCacheStateError, "pool", method, *args)
        self._forget_fetches()
        self.ended_evicted += self.evicted
        self._open()

    def check_now(self) -> None:
        """The pool's own check, asked for by the traffic."""
        self.check()

    # ---- raw pages

    def alloc(self, handle: int, num_tokens: int) -> None:
        """Take pages."""
        if handle in self.taken or num_tokens < 1:
            return
        found = self.calls.attempt(KVCacheExhaustedError, "pool", "alloc", num_tokens)
        if isinstance(found, KVCacheExhaustedError):
            self.refusals += 1
            return
        self.calls.expect(self.rounded(num_tokens), found.size, "slots of alloc", "found.size")
        self.taken[handle] = (found[:: self.page_size] // self.page_size).astype(np.int32)

    def free(self, handle: int) -> None:
        """Give them back."""
        pages = self.taken.pop(handle, None)
        if pages is not None and pages.size:
            self.calls.call("pool", "free", self._slots(pages))

    def double_free(self, handle: int) -> None:
        """Give them back twice: the second time is refused."""
        pages = self.taken.pop(handle, None)
        if pages is not None and pages.size:
            self.calls.call("pool", "free", self._slots(pages))
            self.calls.refused(ValueError, "pool", "free", self._slots(pages))

    # ---- the tree as a caller sees it

    def tree_match(self, handle: int, text: Text, key: int) -> None:
        """Match by hand, and hold what was found."""
        if handle in self.locks:
            return
        tokens = tokens_of(text, self.shape.vocabulary)
        found = self.calls.let(
            "match", "pool.radix", "match_prefix", tokens, KEYS[key % len(KEYS)]
        )
        if found.length > self.whole(tokens.size) or found.length % self.page_size:
            most = self.whole(tokens.size)
            raise self.calls.fail(
                "a match by hand",
                f"{found.length} of {tokens.size} tokens",
                f"match.length in range(0, {most + 1}, {self.page_size})",
            )
        if found.length and len(self.locks) < MAX_LOCKS:
            self.calls.call("pool.radix", "inc_lock_ref", found.node)
            self.locks[handle] = found.node

    def tree_unlock(self, handle: int) -> None:
        """Let go of it."""
        node = self.locks.pop(handle, None)
        if node is not None:
            self.calls.call("pool.radix", "dec_lock_ref", node)

    def tree_insert(self, handle: int, text: Text, key: int, tail: int) -> None:
        """Pages that the caller took and filled become the tree's, but for duplicates."""
        pages = self.taken.get(handle)
        if pages is None or not pages.size:
            return
        lineage = self.lineage(text, tail, key)
        length = pages.size * self.page_size
        slots, tokens = self._slots(pages), lineage.tokens(length).copy()
        owner = Bound(-1, 0, lineage, 0, 0, None, 0, [], False)
        for layer in range(self.shape.num_layers):
            k, v = self.stored_rows(layer, [(owner, 0, length)])
            where = self.on_device(slots)
            self.calls.put("pool", "key_layer", layer, where, k)
            self.calls.put("pool", "value_layer", layer, where, v)
        self.past.append((handle, lineage))
        found = self.calls.call("pool.radix", "insert", tokens, pages, KEYS[key % len(KEYS)])
        if found.prefix_len % self.page_size or not 0 <= found.prefix_len <= length:
            raise self.calls.fail(
                "an insert by hand",
                f"{found.prefix_len} of {length} were cached",
                f"found.prefix_len in range(0, {length + 1}, {self.page_size})",
            )
        self.cached.publish(lineage, length)
        # Of what was cached already, the caller keeps its own pages.
        self.taken[handle] = pages[: found.prefix_len // self.page_size]

    def tree_evict(self, handle: int, num_tokens: int) -> None:
        """Evict by hand: the pages are taken, and the caller's."""
        if handle in self.taken or num_tokens < 0:
            return
        evictable = self.pool.radix.evictable_size
        pages = self.calls.call("pool.radix", "evict", num_tokens)
        expected = min(self.rounded(num_tokens), evictable) // self.page_size
        self.calls.expect(expected, pages.size, "pages of an evict by hand", "found.size")
        if pages.size:
            self.taken[handle] = pages

    def tree_reset(self, handle: int) -> None:
        """The tree's own reset hands its pages to the caller."""
        if handle in self.taken:
            return
        pages = self.calls.call("pool.radix", "reset")
        self.cache_was_reset()
        if pages.size:
            self.taken[handle] = pages

    def evict_all(self) -> None:
        """Every page that can go goes, and is free."""
        pages = self.calls.let("pages", "pool.radix", "evict", self.shape.num_slots)
        if pages.size:
            self.calls.call("pool", "free", self._slots(pages))
        self.calls.expect(
            0, self.pool.radix.evictable_size, "evictable_size", "pool.radix.evictable_size"
        )

    # ---- steps that outlive their time

    def keep_step(self, handles: list[int]) -> None:
        """Keep a step for later."""
        rows = self.rows_of(handles)
        if rows:
            ids = [bound.request_id for bound in rows]
            self.calls.let("kept", "pool", "activate_step", *ids)
            self.kept_step = tuple(bound.handle for bound in rows)

    def use_kept_step(self) -> None:
        """It lives exactly as long as its requests."""
        if self.kept_step is None:
            return
        kept: Any = self.calls.names["kept"]
        alive = {bound.request_id for bound in self.bound.values()}
        if alive.issuperset(kept.request_ids):
            self.calls.call("kept", "slot_indices", 1)
        else:
            self.calls.refused(KVCacheStateError, "kept", "slot_indices", 1)
            self.kept_step = None

    # ---- the end of an episode

    def wind_down(self) -> None:
        """Give everything back: then every page is free."""
        for handle in list(self.locks):
            self.tree_unlock(handle)
        self.calls.call("pool", "unbind_requests")
        for bound in list(self.bound.values()):
            self.forget(bound)
        for handle in list(self.taken):
            self.free(handle)
        self._end_fetches()
        self.calls.call("pool", "reset_prefix_cache")
        total = self.shape.num_pages
        self.calls.expect(total, self.pool.free_pages, "free_pages", "pool.free_pages")
        self.calls.expect(0, self.pool.radix.num_nodes, "num_nodes", "pool.radix.num_nodes")
        self.check()

    def _forget_fetches(self) -> None:
        """Fetching is another verb's."""
        raise NotImplementedError

    def _end_fetches(self) -> None:
        raise NotImplementedError

    def _slots(self, pages: NDArray[np.int32]) -> NDArray[np.int64]:
        offsets = np.arange(self.page_size, dtype=np.int64)
        return (pages[:, None] * np.int64(self.page_size) + offsets).ravel()
