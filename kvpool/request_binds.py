"""RequestBinds: how requests come into the table, one crossing into the ledger each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvpool.errors import KVCacheExhaustedError
from kvpool.paging import num_pages_for_length
from kvpool.request import ExtraKey, Request
from kvpool.request_counts import RequestCounts
from kvpool.words import exhausted
from kvpool_ext.ledger import PageLedger
from kvpool_ext.namespaces import as_namespace
from kvpool_ext.tokens import as_tokens


class RequestBinds(RequestCounts):
    """Binds and forks of `kvpool.requests.RequestTable`, which says what its arguments are."""

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        num_layers: int,
        eviction: str = "lru",
        *,
        eviction_history: int | None = None,
    ) -> None:
        super().__init__(
            self._make_ledger(num_pages, page_size, num_layers, eviction, eviction_history)
        )
        self.page_size = page_size
        self.num_pages = num_pages
        self._by_id = self.ledger.leases
        # Ends the youngest prefetch and says so; False where there is none.
        self.give_way: Callable[[], bool] = _nobody

    def bind(
        self, prompt: Any, total_capacity: int, extra_key: ExtraKey, priority: int, reuse: bool
    ) -> Request:
        """Bind strictly: all of `total_capacity`, or KVCacheExhaustedError and no change."""
        # First what runs code of others: a bind in it must not be taken for this one.
        prompt, watchers = as_tokens(prompt), iter(self.watchers if reuse else ())
        if extra_key is not None:
            extra_key = as_namespace(extra_key)
        last_tag, lease = self.ledger.last_tag, None
        try:
            lease = self.ledger.bind(prompt, total_capacity, extra_key, priority, reuse)
            while (
                lease is None
                and self._has_prefetches
                and self.ledger.would_fit(prompt, total_capacity, extra_key, reuse)
                and self.give_way()
            ):
                lease = self.ledger.bind(prompt, total_capacity, extra_key, priority, reuse)
            if lease is not None:
                for watcher in watchers:
                    watcher.on_bind(lease)
                return lease
        except BaseException:
            self._take_back(lease, last_tag)
            raise
        what, needed = f"binding {total_capacity} tokens", self.ledger.needed_pages
        num_pages = self._pages(total_capacity)
        raise self._refused("no_pages", what, needed=needed, num_pages=num_pages)

    def _take_back(self, lease: Request | None, last_tag: int) -> None:
        """End what was bound in a call that raises; nobody would know its id.

        An interrupt may come before the lease has its name here.
        """
        lease = lease or self._by_id.get(last_tag + 1)
        if lease is not None and lease.live:
            self.ledger.take_back(lease)

    def bind_alone(
        self, prompt: Any, total_capacity: int, extra_key: ExtraKey, reuse: bool
    ) -> Request:
        """Release every other request, then bind as much of `total_capacity` as there is.

        Raises
        ------
        ValueError
            Not even the prompt fits, with reuse on; then nothing was released. With reuse off the
            request gets what there is, as by `bind_equal`.
        """
        prompt, extra_key = as_tokens(prompt), as_namespace(extra_key)
        self._end_prefetches()
        num_tokens = prompt.size
        matched, room = self.ledger.room_if_alone(prompt, extra_key, reuse)
        wanted = self.ledger.pages_for(num_tokens, total_capacity)
        capacity = min(wanted, matched + room) * self.page_size
        if capacity < num_tokens and not reuse:
            return self.bind_equal(1, total_capacity, extra_key, False)[0][0]
        if capacity < num_tokens:
            raise ValueError(
                f"a prompt of {num_tokens} tokens cannot fit: {capacity} slots are the most that "
                "releasing all other requests gives"
            )
        watchers = iter(self.watchers if reuse else ())
        last_tag, lease = self.ledger.last_tag, None
        try:
            lease = self.ledger.bind_alone(prompt, capacity, extra_key, reuse)
            if lease is not None:
                for watcher in watchers:
                    watcher.on_bind(lease)
                return lease
        except BaseException:
            self._take_back(lease, last_tag)
            raise
        # A clean-up that the collector ran has changed what there is.
        return self.bind_alone(prompt, total_capacity, extra_key, reuse)

    def bind_equal(
        self, batch_size: int, capacity: int, extra_key: ExtraKey, reuse: bool
    ) -> tuple[list[Request], list[int]]:
        """Release every other request, then bind `batch_size` blank ones, clamped equally.

        Returns
        -------
        tuple of list
            The requests, and their ids.
        """
        self._end_prefetches()
        _, room = self.ledger.room_if_alone([], extra_key, False)
        num_pages = min(self._pages(capacity), room // batch_size)
        if num_pages == 0:
            what, least = f"binding {batch_size} requests", batch_size
            raise self._refused("no_pages", what, needed=least, num_pages=least, free=room)
        bound = self.ledger.bind_equal(batch_size, num_pages, extra_key, reuse)
        return bound or self.bind_equal(batch_size, capacity, extra_key, reuse)

    def fork(self, request: Request, total_capacity: int) -> Request:
        """A second request over the same written tokens.

        Its partial page, if there is one, stands where that of `request` does and is to be copied.
        """
        valid_len = self.valid_len(request)
        if total_capacity < max(1, valid_len):
            raise ValueError(
                f"total_capacity is {total_capacity} tokens, request {request.tag} has "
                f"{valid_len} written"
            )
        shared = valid_len // self.page_size
        num_pages = self._pages(total_capacity)
        lease = None
        if num_pages <= self.num_pages:
            lease = self.ledger.fork(request, shared, num_pages, valid_len)
            while lease is None and self.makes_way(num_pages - shared):
                lease = self.ledger.fork(request, shared, num_pages, valid_len)
        if lease is None:
            what, needed = f"forking with {total_capacity} tokens", num_pages - shared
            raise self._refused("fork", what, needed=needed, num_pages=num_pages)
        if valid_len % self.page_size:
            lease.entered_pages = shared + 1
        return lease

    def makes_way(self, num_pages: int) -> bool:
        """Whether a prefetch was ended for a call that is short of `num_pages` private pages.

        None is ended where all of them together would not be enough.
        """
        if not self._has_prefetches:
            return False
        ledger = self.ledger
        room = ledger.allocator.num_free + ledger.evictable_pages + ledger.room_of_fetches()
        return num_pages <= room and self.give_way()

    def _end_prefetches(self) -> None:
        while self._has_prefetches and self.give_way():
            pass

    @property
    def _has_prefetches(self) -> bool:
        """Whether some hold pages, or only a lock: of those that have just brought their last."""
        return bool(self.ledger.fetching or self.ledger.fetch_nodes)

    def _refused(self, cause: str, what: str, **numbers: Any) -> KVCacheExhaustedError:
        error = exhausted(self.ledger, what, **numbers)
        self.failures_by_cause[cause if error.can_ever_fit else "too_large"] += 1
        return error

    def valid_len(self, request: Request) -> int:
        """Leading tokens written on every layer and not taken back."""
        return self.ledger.lengths.minimum(request.row)

    def _make_ledger(self, *arguments: Any) -> PageLedger:
        return PageLedger(*arguments)

    def _pages(self, num_tokens: int) -> int:
        return num_pages_for_length(num_tokens, self.page_size)


def _nobody() -> bool:
    return False
