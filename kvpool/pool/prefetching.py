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

import contextlib
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
from kvpool_ext.fetching import begin_fetch, bring_in, end_fetch
from kvpool_ext.gate import Gate
from kvpool_ext.ledger import PageLedger

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
        num_pages = min(num_missing, self.max_pages - len(self._ledger.fetching))
        try:
            self._fetches[fetch.number] = fetch
            node = found.node if local_ids.size else None
            page_ids = begin_fetch(self._ledger, fetch.number, node, num_pages)
            if page_ids is None:
                del self._fetches[fetch.number]
                return self._nothing(fetch, refused=True)
            fetch.give_pages(page_ids, mark)
            flow.fetcher.add(fetch)
            return Prefetch(self, fetch)
        except BaseException:
            self._end(fetch)
            raise

    def _nothing(self, fetch: Fetch, *, refused: bool) -> Prefetch:
        self.counts["prefetch_refused"] += refused
        fetch.end(fetch.local_ids.size)
        return Prefetch(self, fetch)

    def holds(self, fetch: Fetch) -> bool:
        """Whether a fetch may still have pages or a lock; any thread."""
        return fetch.number in self._fetches

    # ---- arrivals

    def poll(self) -> int:
        """Publish what has arrived, and give back what was dropped; the tokens published."""
        num_pages = 0
        while self.arrivals:
            # It goes when it has been seen to: what an interrupt leaves is for the next call.
            item = self.arrivals[0]
            try:
                if not isinstance(item, Fetch):
                    item.give()
                elif self.holds(item):
                    num_pages += self._arrived(item)
            except Exception:
                self._strike(item)
                raise
            self._strike(item)
        return num_pages * self.page_size

    def _strike(self, item: Any) -> None:
        # A clean-up that the collector ran may have polled too.
        with contextlib.suppress(ValueError):
            self.arrivals.remove(item)

    @undisturbed
    def _arrived(self, fetch: Fetch) -> int:
        if fetch.dropped or fetch.ended:
            self._end(fetch)
            return 0
        if not fetch.publishes:
            return 0
        # Before the number of pages: it does not grow after that.
        is_done = fetch.is_done
        try:
            return self._bring_in(fetch, fetch.num_verified)
        except BaseException:
            is_done = True
            raise
        finally:
            if is_done:
                self._end(fetch)

    # ---- end

    def publish(self, fetch: Fetch, num_pages: int | None) -> int:
        """As `Prefetch.publish`, but in pages."""
        if num_pages is not None:
            num_pages = whole_number(num_pages, "num_pages")
        return self._publish(fetch, num_pages) if self.holds(fetch) else fetch.num_available

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
        if self.holds(fetch):
            if not fetch.ended:
                self._bring_in(fetch, num_pages)
            self._end(fetch)
        return fetch.num_available

    def cancel(self, fetch: Fetch) -> None:
        """As `Prefetch.cancel`."""
        if self.holds(fetch):
            self._cancel(fetch)

    def _cancel(self, fetch: Fetch) -> None:
        try:
            self._gate.enter()
            self.counts["prefetch_cancelled"] += 1
            self._end_calmly(fetch)
        finally:
            self._gate.leave()

    @undisturbed
    def _end_calmly(self, fetch: Fetch) -> None:
        if self.holds(fetch):
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
        if fetch.publishes and not fetch.ended:
            self._bring_in(fetch, fetch.num_verified)
        return self._end(fetch)

    def end_all(self) -> None:
        """End every prefetch, the oldest first."""
        self.arrivals.clear()
        for fetch in list(self._fetches.values()):
            self._end_calmly(fetch)

    def forget_all(self) -> None:
        """End every prefetch of a pool that is closed: there is nobody to give pages to."""
        for fetch in self._fetches.values():
            fetch.end(0)
        self._fetches.clear()
        self.arrivals.clear()

    # ---- pages from one owner to the next

    def _bring_in(self, fetch: Fetch, num_pages: int) -> int:
        """Insert the first `num_pages` of a fetch; how many of them the tree did not have."""
        tree = self._ledger.tree
        if num_pages <= fetch.num_published or tree.epoch != fetch.epoch:
            return 0
        num_local = fetch.local_ids.size
        try:
            num_brought, num_duplicates = bring_in(
                self._ledger,
                fetch.number,
                fetch.tokens[: (num_local + num_pages) * self.page_size],
                np.concatenate([fetch.local_ids, fetch.page_ids[:num_pages]]),
                num_local,
                fetch.extra_key,
            )
        except MemoryError:
            return 0  # the next poll tries again; a fetch that is done gives its pages back
        fetch.num_published = num_pages
        self.counts["prefetch_duplicate_pages"] += num_duplicates
        self.counts["prefetch_published_pages"] += num_brought
        return num_brought

    def _end(self, fetch: Fetch) -> bool:
        """Let go of all that a fetch holds, waiting for one small copy at most; whether it has.

        What an interrupt leaves, or a copy of this very thread that is under way, the next call
        does.
        """
        has_ended = False
        try:
            is_current = self._ledger.tree.epoch == fetch.epoch
            num_left = fetch.local_ids.size + fetch.num_published if is_current else 0
            has_ended = fetch.end(num_left)
            if has_ended:
                page_ids = fetch.page_ids if fetch.page_ids.size else None
                num_pages = end_fetch(self._ledger, fetch.number, page_ids)
                self.counts["prefetch_returned_pages"] += num_pages
                self._fetches.pop(fetch.number, None)
        finally:
            if self.holds(fetch):
                fetch.dropped = True
                self.arrivals.append(fetch)
        return has_ended
