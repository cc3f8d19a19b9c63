"""Request and RequestTable: what lives from bind to finish.

The only place of `kvpool` that moves pages between the free list, the tree and requests; the moves
themselves are one crossing each into `kvpool_ext.ledger`. What finish does with each part of a
request, half-open, in tokens:

===================  ==========================================  =================================
part                 owner until now                             finish
===================  ==========================================  =================================
[0, matched)         the tree                                    nothing; unlocked at the end
[matched, cached)    private, but meanwhile cached by another    the duplicates are freed
[cached, floor(valid))  private, or shared with forks            goes to the tree
[floor(valid), capacity)  private                                freed
===================  ==========================================  =================================

``valid``: leading tokens whose K/V was written on every layer and not taken back since.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from kvpool.errors import KVCacheStateError, UnknownRequestError
from kvpool.explain import Explanation, explain
from kvpool.numbers import whole_number
from kvpool.request import ExtraKey, Request, RequestInfo
from kvpool.request_binds import RequestBinds
from kvpool.words import exhausted, past_capacity


class RequestTable(RequestBinds):
    """All bound requests of a pool, and the page ledger behind them.

    Parameters
    ----------
    num_pages, page_size, num_layers : int
        Pages of the pool, tokens per page, and layers, each with a written length of its own.
    eviction : str
        Which cached page goes first, one of `EVICTION_POLICIES`.
    eviction_history : int, optional
        Evicted tokens to remember for `explain`, 0: none; unless told, as many as the pool holds,
        of more than 65,536 a sixteenth.
    """

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._by_id.values())

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._by_id

    def get(self, request_id: int) -> Request:
        """The request behind an id, or UnknownRequestError."""
        try:
            if type(request_id) is not int:
                request_id = whole_number(request_id, "request_id")
            return self._by_id[request_id]
        except (KeyError, TypeError, ValueError):
            shown = f"request {reprlib.repr(request_id)} is not bound"
            raise UnknownRequestError(f"{shown} ({len(self)} are; no id is reused)") from None

    def get_all(self, request_ids: Iterable[int]) -> list[Request]:
        """`get` of many ids at once."""
        try:
            return [*map(self._by_id.__getitem__, request_ids)]
        except (KeyError, TypeError):
            return [*map(self.get, request_ids)]

    # ---- while bound

    def capacity(self, request: Request) -> int:
        """Slots reserved, in tokens."""
        return request.num_pages * self.page_size

    def extend(self, request: Request, total_capacity: int) -> None:
        """Reserve up to `total_capacity`, all or nothing; less than there is changes nothing."""
        num_pages = self._pages(total_capacity)
        done = num_pages <= self.num_pages and self.ledger.extend(request, num_pages)
        while not done and self.makes_way(num_pages - request.num_pages):
            done = self.ledger.extend(request, num_pages)
        if not done:
            what = f"extending request {request.tag} to {total_capacity} tokens"
            needed = num_pages - request.num_pages
            raise exhausted(self.ledger, what, needed=needed, num_pages=num_pages)

    def shrink(self, request: Request, total_capacity: int) -> None:
        """Give back whole pages past `total_capacity` that hold no token; one page stays."""
        keep = max(self._pages(total_capacity), request.entered_pages, request.shared_pages, 1)
        if keep < request.num_pages:
            self.ledger.shrink(request, keep)

    def mark_written(self, request: Request, length: int) -> None:
        """Declare ``[0, length)`` present on every layer; only ever raises."""
        if not self.ledger.mark(request, length):
            raise past_capacity(self.ledger, request, length)

    def checkpoint(self, request: Request, tokens: Any, reuse: bool) -> int:
        """Insert what is written so far and keep the request bound."""
        return self._publish(self.ledger.checkpoint, request, tokens, reuse)

    def info(self, request: Request) -> RequestInfo:
        """A copy of what is known of a request."""
        return RequestInfo.of(request, self.valid_len(request), self.page_size)

    # ---- end

    def finish(self, request: Request, tokens: Any, reuse: bool) -> int:
        """Insert the written whole pages of `tokens`, then unbind."""
        return self._publish(self.ledger.finish, request, tokens, reuse)

    def _publish(
        self, verb: Callable[..., int], request: Request, tokens: Any, reuse: bool
    ) -> int:
        for watcher in self.watchers:
            watcher.on_publish(request)
        try:
            return verb(request, tokens, reuse)
        except RuntimeError as error:
            if type(error) is not RuntimeError:
                raise
            # Foreign tokens run code when they are read, and this code has ended the request.
            raise KVCacheStateError(str(error)) from None

    def unbind(self, request: Request) -> None:
        """Give all pages back; nothing is inserted."""
        self.ledger.release(request)

    def unbind_all(self) -> None:
        """Unbind every request, the oldest first."""
        for request in list(self):
            self.ledger.release(request)

    # ---- looking

    def explain(
        self, prompt: Any, extra_key: ExtraKey = None, *, reuse: bool = True
    ) -> Explanation:
        """Why a bind of `prompt` would match as much as it does now; changes nothing.

        Walks the whole tree and the history of evictions once.
        """
        return explain(self.ledger, prompt, extra_key, reuse)

    @property
    def free_pages(self) -> int:
        """Pages that nobody holds."""
        return self.ledger.allocator.num_free

    def check(self) -> None:
        """Verify ledger, tree, locks and lengths; KVCacheStateError says what is out of sync."""
        try:
            self.ledger.check()
        except RuntimeError as error:
            raise KVCacheStateError(str(error)) from None
        for request in self:
            valid, capacity = self.valid_len(request), self.capacity(request)
            shared_len = request.shared_pages * self.page_size
            if not shared_len <= valid <= capacity:
                raise KVCacheStateError(
                    f"request {request.tag} has valid_len {valid}, expected "
                    f"{shared_len} .. {capacity}"
                )
