"""PoolPages: raw pages, the cached prefixes as a whole, and looking after the ledger."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvpool import paging
from kvpool.explain import Explanation
from kvpool.numbers import whole_number
from kvpool.owners import PageOwners, page_owners
from kvpool.pool.core import PoolCore
from kvpool.request import ExtraKey, RequestWatcher
from kvpool.words import exhausted, page_owner


class PoolPages(PoolCore):
    """Calls of a pool that speak of pages, not of requests."""

    # ---- raw pages

    def alloc(self, num_tokens: int) -> NDArray[np.int64]:
        """Take pages for `num_tokens`, evicting where it must.

        Returns
        -------
        ndarray
            int64 slots on the host, page-aligned length; pages need not be contiguous.

        Raises
        ------
        KVCacheExhaustedError
            Not so many pages are free or evictable.
        """
        try:
            self._gate.enter()
            num_tokens = whole_number(num_tokens, "num_tokens", at_least=1)
            num_pages = paging.num_pages_for_length(num_tokens, self._page_size)
            slots = None
            if num_pages <= self.num_pages:
                slots = self._requests.ledger.take_slots(num_pages)
                while slots is None and self._requests.makes_way(num_pages):
                    slots = self._requests.ledger.take_slots(num_pages)
            if slots is None:
                raise exhausted(
                    self._requests.ledger,
                    f"allocating {num_tokens} tokens",
                    needed=num_pages,
                    num_pages=num_pages,
                )
            return slots
        finally:
            self._gate.leave()

    def free(self, slots: Any) -> None:
        """Give back whole pages that `alloc` took.

        Parameters
        ----------
        slots : sequence of int
            All slots of each page, each page once.

        Raises
        ------
        ValueError
            A page that is not whole, stands twice, or was not taken by `alloc`: names page and
            owner.
        """
        try:
            self._gate.enter()
            pages = self._whole_pages(slots)
            bad = self._requests.ledger.give(pages)
            if bad >= 0:
                page = int(pages[bad])
                twice = page in pages[:bad]
                owner = (
                    "given twice in this call"
                    if twice
                    else f"owner: {page_owner(self._requests.ledger, page)}"
                )
                raise ValueError(f"page {page} was not taken by alloc ({owner})")
        finally:
            self._gate.leave()

    def _whole_pages(self, slots: Any) -> NDArray[np.int32]:
        found = np.asarray(slots)
        if found.dtype.kind not in "iu" and found.size:
            raise TypeError(f"slots must be integers, got dtype {found.dtype}")
        if found.ndim != 1:
            raise ValueError(f"slots must be one-dimensional, got shape {found.shape}")
        if found.size % self._page_size:
            raise ValueError(f"{found.size} slots are no whole pages of {self._page_size}")
        grouped = found.astype(np.int64).reshape(-1, self._page_size)
        expected = grouped[:, :1] + np.arange(self._page_size)
        if (grouped != expected).any():
            grouped = np.sort(grouped.ravel()).reshape(-1, self._page_size)
            expected = grouped[:, :1] + np.arange(self._page_size)
        ragged = (grouped != expected).any(axis=1) | (grouped[:, 0] % self._page_size != 0)
        outside = (grouped[:, 0] < 0) | (grouped[:, 0] >= self._num_slots)
        if outside.any():
            slot = grouped[np.argmax(outside), 0]
            raise ValueError(
                f"page {slot // self._page_size} (slot {slot}) is none of the pool's "
                f"{self.num_pages} pages"
            )
        if ragged.any():
            page = grouped[np.argmax(ragged), 0] // self._page_size
            raise ValueError(f"the slots of page {page} are not whole, or stand twice")
        return (grouped[:, 0] // self._page_size).astype(np.int32)

    # ---- prefix reuse

    @property
    def prefix_reuse_enabled(self) -> bool:
        """Whether binds match and finishes insert; a request bound while off never inserts."""
        return self._prefix_reuse

    @prefix_reuse_enabled.setter
    def prefix_reuse_enabled(self, enabled: bool) -> None:
        self._gate.check()
        self._prefix_reuse = bool(enabled)

    def reset_prefix_cache(self) -> int:
        """Forget all cached prefixes, after new weights for instance.

        Unlocked pages are free at once; locked ones leave the index at once and are freed at their
        last unlock. A request bound before the reset inserts nothing.

        Returns
        -------
        int
            Tokens whose pages were freed.
        """
        try:
            self._gate.enter()
            return self._requests.ledger.reset()
        finally:
            self._gate.leave()

    # ---- looking after it

    def page_owner(self, page: int) -> str:
        """The owner of a page in words: free, a request, the tree, a prefetch, taken or scratch.

        May walk.
        """
        try:
            self._gate.enter()
            return page_owner(self._requests.ledger, whole_number(page, "page"))
        finally:
            self._gate.leave()

    def page_owners(self) -> PageOwners:
        """Who has each page, for all pages at once: NumPy arrays, a copy.

        One pass over free list, tree and requests, a few milliseconds for 100,000 pages. For the
        scheduler thread, as every call; `kvpool.inspect.page_map` draws it.
        """
        try:
            self._gate.enter()
            return page_owners(self._requests.ledger)
        finally:
            self._gate.leave()

    def watch(self, watcher: RequestWatcher) -> Callable[[], None]:
        """Tell `watcher` of every bind with a prompt, and of every finish and checkpoint.

        An instrument's door: `kvpool.inspect.PrefixHits` counts hits through it. The watcher must
        not call the pool. A pool that nobody watches pays a look at an empty list.

        Returns
        -------
        callable
            Call it to stop; a second time it does nothing.
        """
        gate = self._gate
        try:
            gate.enter()
            stop_telling = self._requests.watch(watcher)
        finally:
            gate.leave()

        def stop() -> None:
            if gate.closed:
                return
            try:
                gate.enter()
                stop_telling()
            finally:
                gate.leave()

        return stop

    def explain(self, prompt: Any, extra_key: ExtraKey = None) -> Explanation:
        """Why a bind of `prompt` would match as much as it does now, for a person to read.

        It changes nothing, not even recency. A question, not a step of a loop: it walks the whole
        tree, every namespace and bound request, and the remembered evictions, each once.

        Parameters
        ----------
        prompt : sequence of int
            Token ids ``[n]``, as for a bind.
        extra_key : str, bytes, int or None
            Namespace.

        Returns
        -------
        Explanation
            ``print`` it, or read its fields.

        Raises
        ------
        ValueError
            Empty prompt, a token beyond int32.
        TypeError
            Tokens that are no integers.
        """
        try:
            self._gate.enter()
            return self._requests.explain(prompt, extra_key, reuse=self._prefix_reuse)
        finally:
            self._gate.leave()

    def check(self) -> None:
        """Verify ledger, tree and locks, O(pages).

        Raises
        ------
        KVCacheStateError
            Naming the page and its claimants, or the node whose locks do not add up.
        """
        try:
            self._gate.enter()
            self._requests.check()
        finally:
            self._gate.leave()
