"""PoisonedLedger: the verbs that move pages, each followed by a look at them."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvpool.calm import undisturbed
from kvpool.errors import KVCacheCorruptionError
from kvpool.poison.books import PageBooks
from kvpool.poison.stored import StoredPages
from kvpool.poison.tree import PoisonedTree
from kvpool.request import ExtraKey
from kvpool.words import page_owner
from kvpool_ext.lease import PageLease
from kvpool_ext.ledger import PageLedger
from kvpool_ext.tokens import as_tokens


class PoisonedLedger(PageLedger):
    """The ledger of a poisoned pool; made by `poisoned_ledger`.

    What raises `KVCacheCorruptionError` has bound nothing, and given back what it took; a lease of
    `bind` is the table's to release, as with every error after it.
    """

    books: PageBooks

    # ---- bind

    @undisturbed
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
            self._check_bound(lease)
        return lease

    @undisturbed
    def bind_alone(
        self, tokens: Any, capacity: int, extra_key: ExtraKey, reuse: bool
    ) -> PageLease | None:
        """As `PageLedger.bind_alone`, and a look at the pages that came."""
        self.books.check_can_write()
        try:
            lease = super().bind_alone(tokens, capacity, extra_key, reuse)
        finally:
            self.books.settle()
        if lease is not None:
            self._check_bound(lease)
        return lease

    def _check_bound(self, lease: PageLease) -> None:
        pages, who = lease.pages(), f"request {lease.tag}"
        self.books.hand_out(pages[lease.matched_pages :], who, self.check)
        self.check_cached(pages[: lease.matched_pages], f"a bind of {who}")

    @undisturbed
    def bind_equal(
        self, batch_size: int, num_pages: int, extra_key: ExtraKey, publishes: bool
    ) -> tuple[list[PageLease], list[int]] | None:
        """As `PageLedger.bind_equal`; where a page is found damaged, nothing stays bound."""
        self.books.check_can_write()
        try:
            bound = super().bind_equal(batch_size, num_pages, extra_key, publishes)
        finally:
            self.books.settle()
        leases = [] if bound is None else bound[0]
        try:
            for lease in leases:
                self.books.hand_out(lease.pages(), f"request {lease.tag}", self.check)
        except BaseException:
            for lease in reversed(leases):
                self.take_back(lease)
            raise
        return bound

    @undisturbed
    def take_back(self, lease: PageLease) -> None:
        """As `PageLedger.take_back`."""
        self.books.check_can_write()
        try:
            super().take_back(lease)
        finally:
            self.books.settle()

    @undisturbed
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

    @undisturbed
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

    @undisturbed
    def shrink(self, lease: PageLease, num_pages: int) -> None:
        """As `PageLedger.shrink`."""
        self.books.check_can_write()
        try:
            super().shrink(lease, num_pages)
        finally:
            self.books.settle()

    @undisturbed
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

    @undisturbed
    def unfork(self, lease: PageLease, child: PageLease, shared_pages: int) -> None:
        """As `PageLedger.unfork`."""
        try:
            super().unfork(lease, child, shared_pages)
        finally:
            self.books.settle()

    # ---- into the tree, and back

    @undisturbed
    def checkpoint(self, lease: PageLease, tokens: Any, reuse: bool) -> int:
        """As `PageLedger.checkpoint`, of pages that were written."""
        return self._publish(super().checkpoint, lease, as_tokens(tokens), reuse)

    @undisturbed
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

    @undisturbed
    def release(self, lease: PageLease) -> None:
        """As `PageLedger.release`."""
        self.books.check_can_write()
        try:
            super().release(lease)
        finally:
            self.books.settle()

    # ---- raw pages

    @undisturbed
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

    @undisturbed
    def take_slots(self, num_pages: int) -> NDArray[np.int64] | None:
        """As `PageLedger.take_slots`."""
        pages = self.take(num_pages)
        if pages is None:
            return None
        slots = pages[:, None] * np.int64(self.page_size) + np.arange(self.page_size)
        return slots.ravel()

    @undisturbed
    def give(self, pages: NDArray[np.int32]) -> int:
        """As `PageLedger.give`."""
        self.books.check_can_write()
        try:
            return super().give(pages)
        finally:
            self.books.settle()

    @undisturbed
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
