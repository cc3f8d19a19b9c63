"""PoisonedLedger and PoisonedTree: the verbs that move pages, each followed by a look at them."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvpool.errors import KVCacheCorruptionError
from kvpool.poison.books import PageBooks
from kvpool.poison.stored import StoredPages
from kvpool.request import ExtraKey
from kvpool.words import page_owner
from kvpool_ext.lease import PageLease
from kvpool_ext.ledger import PageLedger
from kvpool_ext.radix import RadixCache
from kvpool_ext.tokens import as_tokens
from kvpool_ext.views import InsertResult, MatchResult


class PoisonedTree(RadixCache):
    """The tree of a poisoned pool: what callers do to it directly is followed too.

    Pages that `evict` and `reset` hand to the caller keep their content, which may be on its way
    to another tier; they are poisoned when they are freed.
    """

    books: PageBooks
    ledger: weakref.ref[PoisonedLedger]

    @contextmanager
    def _in_a_call(self) -> Iterator[None]:
        # The looks at the books belong to the call: another thread must not come between.
        try:
            self.gate.enter()
            yield
        finally:
            self.gate.leave()

    def match_prefix(self, tokens: Any, extra_key: ExtraKey = None) -> MatchResult:
        """As `RadixCache.match_prefix`; KVCacheCorruptionError if a matched page has changed."""
        with self._in_a_call():
            found, ledger = super().match_prefix(tokens, extra_key), self.ledger()
            if ledger is not None:  # its pool is there
                ledger.check_cached(found.pages, "match_prefix")
            return found

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

    def evict(self, num_tokens: int) -> NDArray[np.int32]:
        """As `RadixCache.evict`."""
        with self._in_a_call():
            pages = super().evict(num_tokens)
            self.books.forget(pages)
            return pages

    def dec_lock_ref(self, node: int) -> None:
        """As `RadixCache.dec_lock_ref`; pages that a reset orphaned are poisoned."""
        with self._in_a_call():
            self.books.check_can_write()
            try:
                super().dec_lock_ref(node)
            finally:
                self.books.settle()

    def reset(self) -> NDArray[np.int32]:
        """As `RadixCache.reset`."""
        with self._in_a_call():
            pages = super().reset()
            self.books.forget(pages)
            return pages


class PoisonedLedger(PageLedger):
    """The ledger of a poisoned pool; made by `poisoned_ledger`.

    What raises `KVCacheCorruptionError` has bound nothing, and given back what it took; a lease of
    `bind` is the table's to release, as with every error after it.
    """

    books: PageBooks

    # ---- bind

    def bind(
        self, tokens: Any, capacity: int, extra_key: ExtraKey, priority: int, reuse: bool
    ) -> PageLease | None:
        """As `PageLedger.bind`, and a look at the pages that came."""
        self.books.check_can_write()
        try:
            lease = super().bind(tokens, capacity, extra_key, priority, reuse)
        finally:
            self.books.settle()
        if lease is not None:
            pages, who = lease.pages(), f"request {lease.tag}"
            self.books.hand_out(pages[lease.matched_pages :], who, self.check)
            self.check_cached(pages[: lease.matched_pages], f"a bind of {who}")
        return lease

    def bind_blank(self, num_pages: int, extra_key: ExtraKey, publishes: bool) -> PageLease | None:
        """As `PageLedger.bind_blank`."""
        self.books.check_can_write()
        try:
            lease = super().bind_blank(num_pages, extra_key, publishes)
        finally:
            self.books.settle()
        if lease is not None:
            try:
                self.books.hand_out(lease.pages(), f"request {lease.tag}", self.check)
            except BaseException:
                self.release(lease)
                raise
        return lease

    # ---- while bound

    def extend(self, lease: PageLease, num_pages: int) -> bool:
        """As `PageLedger.extend`."""
        self.books.check_can_write()
        had = lease.num_pages
        try:
            done = super().extend(lease, num_pages)
        finally:
            self.books.settle()
        try:
            self.books.hand_out(lease.pages()[had:], f"request {lease.tag}", self.check)
        except BaseException:
            self.shrink(lease, had)
            raise
        return done

    def shrink(self, lease: PageLease, num_pages: int) -> None:
        """As `PageLedger.shrink`."""
        self.books.check_can_write()
        try:
            super().shrink(lease, num_pages)
        finally:
            self.books.settle()

    def fork(
        self, lease: PageLease, num_shared: int, num_pages: int, valid_len: int
    ) -> PageLease | None:
        """As `PageLedger.fork`, and a look at what the child is told to have."""
        self.books.check_can_write()
        try:
            child = super().fork(lease, num_shared, num_pages, valid_len)
        finally:
            self.books.settle()
        if child is not None:
            pages, parent = child.pages(), lease.pages()
            try:
                self.books.hand_out(pages[num_shared:], f"request {child.tag}", self.check)
                shared, who = pages[:num_shared], f"a fork of request {lease.tag}"
                self.check_cached(shared, who)
                self.check_written(shared, who)
                rest = valid_len % self.page_size
                if rest:
                    self._check_page(int(parent[num_shared]), num_shared, rest, who)
            except BaseException:
                self.release(child)
                raise
        return child

    # ---- into the tree, and back

    def checkpoint(self, lease: PageLease, tokens: Any, reuse: bool) -> int:
        """As `PageLedger.checkpoint`, of pages that were written."""
        return self._publish(super().checkpoint, lease, as_tokens(tokens), reuse)

    def finish(self, lease: PageLease, tokens: Any, reuse: bool) -> int:
        """As `PageLedger.finish`, of pages that were written."""
        return self._publish(super().finish, lease, as_tokens(tokens), reuse)

    def _publish(self, verb: Any, lease: PageLease, tokens: NDArray[np.int32], reuse: bool) -> int:
        self.books.check_can_write()
        num_pages, pages = 0, lease.pages()
        if lease.live and reuse:
            num_pages = min(len(tokens), self.lengths.minimum(lease.row)) // self.page_size
            # Also what others cached meanwhile: it was declared written.
            entering = pages[lease.tree_pages : num_pages]
            self.check_written(entering, f"publishing request {lease.tag}", lease.tree_pages)
        try:
            inserted: int = verb(lease, tokens, reuse)
        finally:
            self.books.settle()
        self.books.remember(pages[num_pages - inserted // self.page_size : num_pages])
        return inserted

    def release(self, lease: PageLease) -> None:
        """As `PageLedger.release`."""
        self.books.check_can_write()
        try:
            super().release(lease)
        finally:
            self.books.settle()

    # ---- raw pages

    def take(self, num_pages: int) -> NDArray[np.int32] | None:
        """As `PageLedger.take`."""
        self.books.check_can_write()
        try:
            pages = super().take(num_pages)
        finally:
            self.books.settle()
        if pages is not None:
            try:
                self.books.hand_out(pages, "alloc", self.check)
            except BaseException:
                self.give(pages)
                raise
        return pages

    def give(self, pages: NDArray[np.int32]) -> int:
        """As `PageLedger.give`."""
        self.books.check_can_write()
        try:
            return super().give(pages)
        finally:
            self.books.settle()

    def reset(self) -> int:
        """As `PageLedger.reset`."""
        self.books.check_can_write()
        try:
            return super().reset()
        finally:
            self.books.settle()

    # ---- looks

    def check_cached(self, pages: NDArray[np.int32], what: str) -> None:
        """KVCacheCorruptionError if one of the tree's `pages` is not what entered the tree."""
        changed = self.books.changed(pages)
        if changed.size:
            page = int(changed[0])
            poisoned = self.books.stored.first_poison(page) is not None
            how = "holds poison: it was given back" if poisoned else "changed since it was cached"
            raise KVCacheCorruptionError(
                f"{what} met page {page}, which {how} ({changed.size} of {pages.size} pages; "
                f"owner: {page_owner(self, page)})",
                page,
            )

    def check_written(self, pages: NDArray[np.int32], what: str, first: int = 0) -> None:
        """KVCacheCorruptionError if one of `pages`, from page index `first` on, has poison."""
        poisoned = np.flatnonzero(self.books.stored.have_poison(pages))
        if poisoned.size:
            i = int(poisoned[0])
            self._check_page(int(pages[i]), first + i, self.page_size, what)

    def _check_page(self, page: int, index: int, num_tokens: int, what: str) -> None:
        found = self.books.stored.first_poison(page, num_tokens)
        if found is not None:
            layer, offset = found
            raise KVCacheCorruptionError(
                f"{what}: position {index * self.page_size + offset} of layer {layer} was "
                f"declared written and never was, page {page} holds poison there "
                f"(owner: {page_owner(self, page)})",
                page,
            )


def poisoned_ledger(stored: StoredPages, *arguments: Any) -> PoisonedLedger:
    """A ledger over stored pages, with its tree; `arguments` are those of `PageLedger`."""
    ledger = PoisonedLedger(*arguments, tree_class=PoisonedTree)
    ledger.books = PageBooks(ledger.allocator, stored)
    tree = ledger.tree
    assert isinstance(tree, PoisonedTree)
    # Weakly: a pool that is dropped gives its memory back at once, not at a collection.
    tree.books, tree.ledger = ledger.books, weakref.ref(ledger)
    return ledger
