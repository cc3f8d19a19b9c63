"""PageBooks: which pages should be poison now, and what the cached ones were hashed to.

It trusts nobody's word for what was given back: after each verb the free list is compared with the
one before, so a page that any path frees, also one that raises, is found and poisoned.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvpool.errors import KVCacheCorruptionError, KVCacheStateError
from kvpool.poison.stored import StoredPages
from kvpool_ext.pages import PageAllocator


class PageBooks:
    """What poison mode knows of each page; poisons all of them at first.

    Parameters
    ----------
    allocator : PageAllocator
        Whose free list is followed.
    stored : StoredPages
        The bits of the pages.

    Attributes
    ----------
    is_free : ndarray
        bool ``[num_pages]``, the free list as it was settled last.
    is_cached : ndarray
        bool ``[num_pages]``, pages of the tree, each with a hash.
    """

    def __init__(self, allocator: PageAllocator, stored: StoredPages) -> None:
        self.stored = stored
        self._allocator = allocator
        self.is_free = np.ones(allocator.num_pages, np.bool_)
        self.is_cached = np.zeros(allocator.num_pages, np.bool_)
        self._hashes = np.zeros(allocator.num_pages, np.uint32)
        # Off the free list, and not yet looked at by whoever has them: between the two, a clean-up
        # that the collector runs may settle as well.
        self._leaving = np.zeros(allocator.num_pages, np.bool_)
        stored.fill(np.arange(allocator.num_pages))

    # ---- pages come and go

    def check_can_write(self) -> None:
        """KVCacheStateError in a graph capture, which would record the poison."""
        try:
            self.stored.device.check_upload()
        except KVCacheStateError:
            raise KVCacheStateError(
                "poison mode writes to pages that are handed out or given back, and the stream is "
                "in graph capture: bind, extend, finish and unbind outside of it"
            ) from None

    def settle(self) -> None:
        """Poison what has become free since the last time, and forget what it was hashed to."""
        now = self._free_now()
        freed = np.flatnonzero(now & ~self.is_free)
        self._leaving |= self.is_free & ~now
        self._leaving &= ~now
        self.forget(freed)
        self.stored.fill(freed)
        # Last: after an interrupt the next call finds the same pages again.
        self.is_free = now

    def hand_out(self, pages: NDArray[Any], to: str, confirm: Callable[[], None]) -> None:
        """`pages` were handed out: from the free list as poison, or evicted just now.

        Afterwards all of them are poison.

        Parameters
        ----------
        pages : ndarray
            int32 ``[n]``.
        to : str
            Who has them now.
        confirm : callable
            Raises RuntimeError if the ledger is out of sync. After an interrupt these books may
            not know of a cached page, so a page that they miss is no proof.

        Raises
        ------
        KVCacheCorruptionError
            A page that was written while it was free, or that somebody else has.
        """
        was_free = self._leaving[pages]
        self._leaving[pages] = False
        free, other = pages[was_free], pages[~was_free]
        held = other[~self.is_cached[other]]
        if held.size:
            try:
                confirm()
            except RuntimeError as error:
                raise KVCacheCorruptionError(
                    f"page {held[0]} was handed out to {to} while it was neither free nor cached "
                    f"({error})",
                    int(held[0]),
                ) from None
        written = free[~self.stored.are_poison(free)]
        self.forget(other)
        self.stored.fill(np.concatenate([other, written]))
        if written.size:
            raise KVCacheCorruptionError(
                f"page {written[0]} was written after it was given back, or before it was handed "
                f"out: found when it went to {to} ({written.size} of {free.size} free pages)",
                int(written[0]),
            )

    # ---- the tree's pages

    def remember(self, pages: NDArray[Any]) -> None:
        """`pages` have entered the tree."""
        self._hashes[pages] = self.stored.hashes(pages)
        self.is_cached[pages] = True
        self._leaving[pages] = False

    def forget(self, pages: NDArray[Any]) -> None:
        """`pages` have left the tree."""
        self.is_cached[pages] = False

    def changed(self, pages: NDArray[Any]) -> NDArray[Any]:
        """Those of the tree's `pages` whose bytes are not what entered it."""
        known: NDArray[Any] = pages[self.is_cached[pages]]
        changed: NDArray[Any] = known[self.stored.hashes(known) != self._hashes[known]]
        return changed

    # ---- looking after it

    def check(self) -> None:
        """Verify every free page and every cached one; O(bytes of the pool).

        Raises
        ------
        KVCacheCorruptionError
            Naming the page.
        """
        self.settle()
        free = np.flatnonzero(self.is_free)
        written = free[~self.stored.are_poison(free)]
        if written.size:
            raise KVCacheCorruptionError(
                f"page {written[0]} is free and was written after it was given back, or before "
                "it was handed out",
                int(written[0]),
            )
        changed = self.changed(np.flatnonzero(self.is_cached))
        if changed.size:
            raise KVCacheCorruptionError(
                f"page {changed[0]} is cached, and its bytes changed since", int(changed[0])
            )

    def _free_now(self) -> NDArray[np.bool_]:
        now = np.zeros(self._allocator.num_pages, np.bool_)
        now[self._allocator.free_pages()] = True
        return now
