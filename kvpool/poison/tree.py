"""PoisonedTree: what callers do to the tree of a poisoned pool themselves is followed too."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from kvpool.calm import undisturbed
from kvpool.poison.books import PageBooks
from kvpool.request import ExtraKey
from kvpool_ext.pages import PageAllocator
from kvpool_ext.radix import RadixCache
from kvpool_ext.tokens import as_tokens
from kvpool_ext.views import InsertResult, MatchResult


class LooksAtPages(Protocol):
    """What a tree needs of its ledger."""

    @property
    def allocator(self) -> PageAllocator:
        """The free list."""

    def check_cached(self, pages: NDArray[np.int32], what: str) -> None:
        """KVCacheCorruptionError if one of the tree's `pages` is not what entered the tree."""

    def check_written(self, pages: NDArray[np.int32], what: str, first: int = 0) -> None:
        """KVCacheCorruptionError if one of `pages`, from page index `first` on, has poison."""

    def room_if_alone(self, tokens: Any, extra_key: ExtraKey, reuse: bool) -> tuple[int, int]:
        """Pages that `tokens` would match, and those that would be left."""


class PoisonedTree(RadixCache):
    """The tree of a poisoned pool: what callers do to it directly is followed too.

    Pages that `evict` and `reset` hand to the caller keep their content, which may be on its way
    to another tier; they are poisoned when they are freed.
    """

    books: PageBooks
    ledger: weakref.ref[LooksAtPages]

    @contextmanager
    def _in_a_call(self) -> Iterator[None]:
        # The looks at the books belong to the call: another thread must not come between.
        try:
            self.gate.enter()
            yield
        finally:
            self.gate.leave()

    @undisturbed
    def match_prefix(self, tokens: Any, extra_key: ExtraKey = None) -> MatchResult:
        """As `RadixCache.match_prefix`; KVCacheCorruptionError if a matched page has changed."""
        with self._in_a_call():
            found, ledger = super().match_prefix(tokens, extra_key), self.ledger()
            if ledger is not None:  # its pool is there
                ledger.check_cached(found.pages, "match_prefix")
            return found

    @undisturbed
    def insert(
        self, tokens: Any, pages: Any, extra_key: ExtraKey = None, priority: int = 0
    ) -> InsertResult:
        """As `RadixCache.insert`; KVCacheCorruptionError if a page that would enter has poison."""
        with self._in_a_call():
            tokens, ledger = as_tokens(tokens), self.ledger()
            num_pages, page_ids = len(tokens) // self.page_size, np.asarray(pages)
            if page_ids.dtype.kind not in "iu":
                page_ids = pages
            elif page_ids.shape == (num_pages,) and num_pages and ledger is not None:
                # It leaves the last token out, and changes nothing.
                cached, _ = ledger.room_if_alone(np.append(tokens, np.int32(0)), extra_key, True)
                entering = page_ids[cached:]
                # Others are refused below.
                if np.isin(entering, ledger.allocator.taken_pages()).all():
                    ledger.check_written(entering, "insert", cached)
            done = super().insert(tokens, page_ids, extra_key, priority)
            first_new = done.prefix_len // self.page_size
            self.books.remember(np.asarray(page_ids, np.int32)[first_new:])
            return done

    @undisturbed
    def evict(self, num_tokens: int) -> NDArray[np.int32]:
        """As `RadixCache.evict`."""
        with self._in_a_call():
            pages = super().evict(num_tokens)
            self.books.forget(pages)
            return pages

    @undisturbed
    def dec_lock_ref(self, node: int) -> None:
        """As `RadixCache.dec_lock_ref`; pages that a reset orphaned are poisoned."""
        with self._in_a_call():
            self.books.check_can_write()
            try:
                super().dec_lock_ref(node)
            finally:
                self.books.settle()

    @undisturbed
    def reset(self) -> NDArray[np.int32]:
        """As `RadixCache.reset`."""
        with self._in_a_call():
            pages = super().reset()
            self.books.forget(pages)
            return pages
