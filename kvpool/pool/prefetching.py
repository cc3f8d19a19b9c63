"""Prefetching: the scheduler's side of prefetches, where taken pages become the tree's.

All that changes the ledger or the tree is here, in the scheduler's thread. What a prefetch goes
through, in pages:

===================  ========================================  ===================================
part                 owner                                     what becomes of it
===================  ========================================  ===================================
[0, local)           the tree, locked while the fetch lives    unlocked at its end
[local, published)   the tree, locked as well                  unlocked at its end
[published, found)   the fetch, written                        the tree's, or given back where the
                                                               tree has its own meanwhile
[found, end)         the fetch, or nobody knows yet            written later, or given back
===================  ========================================  ===================================
"""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvpool.calm import undisturbed
from kvpool.numbers import whole_number
from kvpool.pool.prefetch import Prefetch
from kvpool.request import ExtraKey
from kvpool.tiers.epoch import TreeEpoch
from kvpool.tiers.fetch import Fetch
from kvpool.tiers.flow import TierFlow
from kvpool_ext.gate import Gate
from kvpool_ext.ledger import PageLedger
from kvpool_ext.radix import RadixCache

_COUNTERS = (
    "prefetches",
    "prefetch_refused",
    "prefetch_cancelled",
    "prefetch_gave_way",
    "prefetch_published_pages",
    "prefetch_duplicate_pages",
    "prefetch_returned_pages",
)


class Prefetching:
    """Prefetches of one pool.

    Parameters
    ----------
    ledger : PageLedger
        The pool's.
    gate : Gate
        The pool's.
    max_pages : int
        Pages that all prefetches may hold together.

    Attributes
    ----------
    arrivals : deque
        What the background, or a finalizer, wants looked at: fetches, and marks to be made.
    epoch : TreeEpoch
        Whether the tree is still of the weights that the page keys name.
    flow : TierFlow or None
        The background; None before it is there, and once it is closed.
    """

    def __init__(self, ledger: PageLedger, gate: Gate, max_pages: int) -> None:
        self.arrivals: deque[Any] = deque()
        self.flow: TierFlow | None = None
        self.epoch = TreeEpoch(ledger.tree)
        self.page_size = ledger.page_size
        self.max_pages = max_pages
        self.counts = dict.fromkeys(_COUNTERS, 0)
        self._ledger, self._gate = ledger, gate
        self._fetches: dict[int, Fetch] = {}  # that have not ended, the oldest first

    # ---- begin

    @undisturbed
    def start(self, tokens: NDArray[np.int32], extra_key: ExtraKey, publishes: bool) -> Prefetch:
        """Take pages for what follows the local match of `tokens`, and have them fetched."""
        tree, size = self._ledger.tree, self.page_size
        num_whole = (tokens.size - 1) // size
        tokens = tokens[: num_whole * size]
        found = tree.match_prefix(tokens, extra_key)
        local_ids: NDArray[np.int32] = found.pages
        fetch = Fetch(
            self.counts["prefetches"] + 1, tokens, extra_key, local_ids, publishes, tree.epoch
        )
        self.counts["prefetches"] += 1
        flow, num_missing = self.flow, num_whole - local_ids.size
        if num_missing == 0:
            return self._nothing(fetch, refused=False)
        if flow is None or self.epoch.is_over or flow.is_forked:
            return self._nothing(fetch, refused=True)
        mark = flow.mark()
        if flow.needs_marks and mark is None:
            return self._nothing(fetch, refused=True)
        try:
            if local_ids.size:
                tree.inc_lock_ref(found.node)
                fetch.node = self._ledger.fetch_nodes[fetch.number] = found.node
            page_ids = self._take(num_missing)
            if page_ids is None:
                self._end(fetch)
                return self._nothing(fetch, refused=True)
            fetch.give_pages(page_ids, mark)
            self._ledger.fetching.update(dict.fromkeys(page_ids.tolist(), fetch.number))
            self._fetches[fetch.number] = fetch
            flow.fetcher.add(fetch)
            return Prefetch(self, fetch)
        except BaseException:
            if not fetch.ended:
                self._end(fetch)
            raise

    def _take(self, num_pages: int) -> NDArray[np.int32] | None:
        ledger = self._ledger
        room = min(
            self.max_pages - len(ledger.fetching),
            ledger.allocator.num_free + ledger.evictable_pages,
        )
        return ledger.take(min(num_pages, room)) if room > 0 else None

    def _nothing(self, fetch: Fetch, *, refused: bool) -> Prefetch:
        self.counts["prefetch_refused"] += refused
        fetch.end(fetch.local_ids.size)
        return Prefetch(self, fetch)

    # ---- arrivals

    def poll(self) -> int:
        """Publish what has arrived, and give back what was dropped; the tokens published."""
        num_pages = 0
        while self.arrivals:
            item = self.arrivals.popleft()
            if not isinstance(item, Fetch):
                item.give()
            elif not item.ended:
                num_pages += self._arrived(item)
        return num_pages * self.page_size

    @undisturbed
    def _arrived(self, fetch: Fetch) -> int:
        if fetch.dropped:
            self._end(fetch)
            return 0
        if not fetch.publishes:
            return 0
        # Before the number of pages: it does not grow after that.
        is_done = fetch.done.is_set()
        try:
            num_pages = self._bring_in(fetch, fetch.num_verified)
        except BaseException:
            is_done = True
            raise
        finally:
            if is_done:
                self._end(fetch)
        return num_pages

    # ---- end

    def publish(self, fetch: Fetch, num_pages: int | None) -> int:
        """As `Prefetch.publish`, but in pages."""
        if num_pages is not None:
            num_pages = whole_number(num_pages, "num_pages")
        return fetch.num_available if fetch.ended else self._publish(fetch, num_pages)

    def _publish(self, fetch: Fetch, num_pages: int | None) -> int:
        try:
            self._gate.enter()
            num_found = fetch.num_available
            if num_pages is None:
                num_pages = num_found
            elif num_pages > num_found:
                raise ValueError(
                    f"num_pages must be at most the {num_found} pages that have arrived, got "
                    f"{num_pages}: wait for more, or agree on fewer"
                )
            return self._bring_in_and_end(fetch, num_pages - fetch.local_ids.size)
        finally:
            self._gate.leave()

    @undisturbed
    def _bring_in_and_end(self, fetch: Fetch, num_pages: int) -> int:
        if not fetch.ended:
            self._bring_in(fetch, num_pages)
            self._end(fetch)
        return fetch.num_available

    def cancel(self, fetch: Fetch) -> None:
        """As `Prefetch.cancel`."""
        if not fetch.ended:
            self._cancel(fetch)

    def _cancel(self, fetch: Fetch) -> None:
        try:
            self._gate.enter()
            if fetch.page_ids.size:
                self.counts["prefetch_cancelled"] += 1
            self._end_calmly(fetch)
        finally:
            self._gate.leave()

    @undisturbed
    def _end_calmly(self, fetch: Fetch) -> None:
        if not fetch.ended:
            self._end(fetch)

    @undisturbed
    def give_way(self) -> bool:
        """End the youngest prefetch, for a call that is short of pages; False if there is none.

        What it has brought is not lost: in the tree it can be evicted as all else.
        """
        if not self._fetches:
            return False
        fetch = self._fetches[next(reversed(self._fetches))]
        self.counts["prefetch_gave_way"] += 1
        if fetch.publishes:
            self._bring_in(fetch, fetch.num_verified)
        self._end(fetch)
        return True

    def end_all(self) -> None:
        """End every prefetch, the oldest first."""
        for fetch in list(self._fetches.values()):
            self._end_calmly(fetch)
        self.arrivals.clear()

    def forget_all(self) -> None:
        """End every prefetch of a pool that is closed: there is nobody to give pages to."""
        for fetch in self._fetches.values():
            fetch.end(0)
        self._fetches.clear()
        self.arrivals.clear()

    # ---- pages from one owner to the next

    def _bring_in(self, fetch: Fetch, num_pages: int) -> int:
        """Insert the first `num_pages` of a fetch; how many of them the tree did not have."""
        tree, first = self._ledger.tree, fetch.num_published
        if num_pages <= first or tree.epoch != fetch.epoch:
            return 0
        num_local = fetch.local_ids.size
        try:
            done = tree.insert(
                fetch.tokens[: (num_local + num_pages) * self.page_size],
                np.concatenate([fetch.local_ids, fetch.page_ids[:num_pages]]),
                fetch.extra_key,
            )
        except MemoryError:
            return 0  # the next poll tries again; a fetch that is done gives its pages back
        cached = min(max(done.prefix_len // self.page_size - num_local, first), num_pages)
        fetch.num_published = num_pages
        for page in fetch.page_ids[cached:num_pages].tolist():
            del self._ledger.fetching[page]
        self._give(fetch.page_ids[first:cached])
        self._move_lock(tree, fetch, done.node)
        self.counts["prefetch_duplicate_pages"] += cached - first
        self.counts["prefetch_published_pages"] += num_pages - cached
        return num_pages - cached

    def _move_lock(self, tree: RadixCache, fetch: Fetch, node: int) -> None:
        tree.inc_lock_ref(node)
        before, fetch.node = fetch.node, node
        self._ledger.fetch_nodes[fetch.number] = node
        if before is not None:
            tree.dec_lock_ref(before)

    def _end(self, fetch: Fetch) -> None:
        """Let go of all that a fetch holds; waits for one small copy at most."""
        is_current = self._ledger.tree.epoch == fetch.epoch
        rest = fetch.end(fetch.local_ids.size + fetch.num_published if is_current else 0)
        self._fetches.pop(fetch.number, None)
        self.counts["prefetch_returned_pages"] += rest.size
        self._give(rest)
        node, fetch.node = fetch.node, None
        self._ledger.fetch_nodes.pop(fetch.number, None)
        if node is not None:
            self._ledger.tree.dec_lock_ref(node)

    def _give(self, page_ids: NDArray[np.int32]) -> None:
        for page in page_ids.tolist():
            self._ledger.fetching.pop(page, None)
        self._ledger.give(page_ids)
