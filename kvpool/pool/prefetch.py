"""Prefetch: what a caller has of pages on their way from tiers to the pool."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING

from kvpool.tiers.fetch import Fetch

if TYPE_CHECKING:
    from kvpool.pool.prefetching import Prefetching


class Prefetch:
    """Pages on their way; made by `KVCachePool.prefetch`.

    Nothing has to be done with it: pages go to the tree by themselves, as they arrive, with the
    next `bind_request`, `prefetch` or `poll_tiers`. With ``publish=False`` they wait for
    `publish`. A context: leaving it publishes what has arrived, or gives it back with
    ``publish=False``, and ends the rest.

    `publish` and `cancel` are calls of the scheduler's thread; any thread may read and `wait`.
    """

    __slots__ = ("__weakref__", "_fetch", "_prefetching")

    def __init__(self, prefetching: Prefetching, fetch: Fetch) -> None:
        self._prefetching = prefetching
        self._fetch = fetch

    @property
    def local_len(self) -> int:
        """Tokens from the start that the tree had when `prefetch` was called."""
        return self._fetch.local_ids.size * self._prefetching.page_size

    @property
    def found_len(self) -> int:
        """Tokens from the start that the tree has or tiers brought, verified so far."""
        return self._fetch.num_available * self._prefetching.page_size

    @property
    def done(self) -> bool:
        """Whether `found_len` will not grow any more."""
        return self._fetch.is_done

    def wait(self, timeout_s: float | None = None) -> int:
        """Wait until it is done, or for `timeout_s`; `found_len` then.

        For callers who have nothing better to do: a bind never waits. Tiers have time-outs, so
        that it ends without one too. In a forked child nothing comes, and it returns at once.
        """
        self._fetch.wait(timeout_s)
        return self.found_len

    def publish(self, num_pages: int | None = None) -> int:
        """Bring what has arrived to the tree, end the rest, and give its pages back.

        Parameters
        ----------
        num_pages : int, optional
            Pages from the start of the prompt, those that the tree had included, at most
            ``found_len / page_size``; default all that arrived. Ranks that agreed on the smallest
            number pass it, and have the same page ids then.

        Returns
        -------
        int
            Tokens from the start that the tree has now: 0 after a reset.

        Raises
        ------
        ValueError
            More pages than have arrived.
        """
        return self._prefetching.publish(self._fetch, num_pages) * self._prefetching.page_size

    def cancel(self) -> None:
        """End it, and give back the pages that have not been published. Waits for no tier."""
        self._prefetching.cancel(self._fetch)

    def __enter__(self) -> Prefetch:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._fetch.publishes and error is None:
            self.publish()
        else:
            self.cancel()

    def __del__(self) -> None:
        # Any thread may drop it: the scheduler's gives its pages back, with its next call.
        # An interrupt may have come before it had one.
        fetch: Fetch | None = getattr(self, "_fetch", None)
        if fetch is None:
            return
        if not fetch.publishes and self._prefetching.holds(fetch):
            fetch.dropped = True
            self._prefetching.arrivals.append(fetch)

    def __repr__(self) -> str:
        state = "done" if self.done else "on its way"
        return f"Prefetch({self.local_len} tokens local, {self.found_len} found, {state})"
