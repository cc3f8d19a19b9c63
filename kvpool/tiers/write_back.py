"""WriteBack: which cached pages go to the tiers, and when; told of the tree by its follower.

``"insert"``: pages go as soon as they come to the tree. ``"evict"``: where free pages get short,
those go that eviction would take next. Nothing is pinned and eviction waits for nothing: a page
that leaves the tree before it was copied is not written, and counted.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvpool.following.contract import StoredRun
from kvpool.tiers.known import KnownKeys
from kvpool.tiers.write_queue import CachedPage, WriteQueue

POLICIES = ("insert", "evict", "none")


class Follower(Protocol):
    """What write-back asks the follower of the tree; any thread may."""

    def still_cached(
        self, page_ids: NDArray[np.int32], generations: NDArray[np.uint32]
    ) -> NDArray[np.bool_]:
        """Which pages have stayed in the tree."""

    def next_victims(self, num_pages: int) -> NDArray[np.int32]:
        """Cached pages in the order in which eviction would take them."""

    def describe(
        self, page_ids: NDArray[np.int32]
    ) -> tuple[list[bytes | None], NDArray[np.int32], NDArray[np.uint32]]:
        """Keys, tokens and generations; a key is None where the page is not known."""

    def subscribe(self, subscriber: WriteBack) -> Callable[[], None]:
        """Tell `subscriber` of all changes; call what it returns to stop."""

    def drain(self) -> None:
        """Tell subscribers of everything so far, in the calling thread."""


class WriteBack:
    """A subscriber that chooses pages for a `WriteQueue`.

    Parameters
    ----------
    policy : str
        One of `POLICIES`.
    queue : WriteQueue
        Where chosen pages go.
    known : sequence of KnownKeys
        What each tier has: a page that all have is not chosen.
    low_pages : int
        For ``"evict"``: free pages below which the next victims are written.
    count_free : callable
        Free pages now; called in any thread.
    """

    def __init__(
        self,
        policy: str,
        queue: WriteQueue,
        known: list[KnownKeys],
        low_pages: int,
        count_free: Callable[[], int],
    ) -> None:
        self.policy = policy
        self.num_lost = 0
        self._queue, self._known = queue, known
        self._low_pages, self._count_free = low_pages, count_free
        self._looks_for_victims = threading.Event()
        self._changed = False

    # ---- told by the follower

    def on_stored(self, run: StoredRun) -> None:
        """Pages came to the tree."""
        self._changed = True
        if self.policy != "insert":
            return
        parts = zip(
            run.page_ids.tolist(), run.generations.tolist(), run.keys, run.tokens, strict=True
        )
        if chosen := self._not_everywhere(parts):
            self._queue.add(chosen)

    def on_removed(self, page_ids: NDArray[np.int32], keys: list[bytes]) -> None:
        """Pages left the tree; those that no tier has are lost."""
        self._changed = True
        if self.policy != "none":
            had = np.zeros(len(keys), np.bool_)
            for known in self._known:
                had |= known.have(keys)
                # A tier may have let go of them before they come back: then it is asked.
                known.discard(keys)
            self.num_lost += len(keys) - int(had.sum())

    def on_cleared(self) -> None:
        """All pages left the tree."""
        self._changed = True

    def on_caught_up(self) -> None:
        """Everything was told; a look at what eviction would take, if that may have changed."""
        if self.policy != "evict" or not self._changed:
            return
        self._changed = False
        if self._count_free() < self._low_pages:
            self._looks_for_victims.set()
            self._queue.wake()

    # ---- in the writer's thread

    def choose_victims(self, follower: Follower, num_pages: int | None = None) -> None:
        """Queue the pages that eviction would take next, if it is time or `num_pages` says so."""
        if num_pages is None:
            if not self._looks_for_victims.is_set():
                return
            self._looks_for_victims.clear()
            num_pages = self._low_pages
        page_ids = follower.next_victims(num_pages)
        keys, tokens, generations = follower.describe(page_ids)
        parts = [
            (page, generation, key, row)
            for page, generation, key, row in zip(
                page_ids.tolist(), generations.tolist(), keys, tokens, strict=True
            )
            if key is not None
        ]
        # What is next to go comes first, and the queue drops the oldest where it is full.
        self._queue.add(self._not_everywhere(parts)[: self._queue.max_pages])

    def _not_everywhere(
        self, parts: Iterable[tuple[int, int, bytes, NDArray[np.int32]]]
    ) -> list[CachedPage]:
        pages = [CachedPage(*part) for part in parts]
        everywhere = np.ones(len(pages), np.bool_)
        for known in self._known:
            everywhere &= known.have([page.key for page in pages])
        return [page for page, has in zip(pages, everywhere.tolist(), strict=True) if not has]
