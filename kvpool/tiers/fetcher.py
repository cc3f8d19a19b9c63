"""Fetcher: the thread that reads pages from tiers into the pages that prefetches have taken."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from functools import partial

import numpy as np
from numpy.typing import NDArray

from kvpool.page_keys import PageKeys
from kvpool.tiers.copies import PageCopies
from kvpool.tiers.ending import LONGEST_SLEEP_S, ends_within
from kvpool.tiers.fetch import Fetch
from kvpool.tiers.stack import TierStack

_log = logging.getLogger("kvpool.tiers")
# Copied under a fetch's lock at once: what a cancellation may have to wait for.
_LOCKED_BYTES = 1 << 20


class Fetcher:
    """Takes fetches in their order; they are bounded by the pages that they hold.

    Parameters
    ----------
    stack : TierStack
        Where from.
    copies : PageCopies
        Where to; of this thread alone.
    keys : PageKeys
        Names the pages.
    arrive : callable
        Called with a fetch that has something to publish, in this thread.
    """

    def __init__(
        self,
        stack: TierStack,
        copies: PageCopies,
        keys: PageKeys,
        arrive: Callable[[Fetch], None],
    ) -> None:
        self.num_fetched = 0
        self.num_failed = 0
        self._stack, self._copies, self._keys, self._arrive = stack, copies, keys, arrive
        self._at_once = max(1, _LOCKED_BYTES // stack.records.record_bytes)
        self._queue: deque[Fetch] = deque()
        self._changed = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="kvpool-prefetch", daemon=True)
        self._thread.start()

    def add(self, fetch: Fetch) -> None:
        """Queue a fetch."""
        with self._changed:
            self._queue.append(fetch)
            self._changed.notify_all()

    def close(self) -> None:
        """Take no more; the thread ends after the chunk that it is at."""
        with self._changed:
            self._closing = True
            self._queue.clear()
            self._changed.notify_all()

    def join(self, timeout_s: float) -> bool:
        """Wait for the thread after `close`; whether it has ended."""
        return ends_within(self._thread, timeout_s)

    def _run(self) -> None:
        while (fetch := self._next()) is not None:
            try:
                self._fetch(fetch)
            except Exception:
                # Costs the hits that this fetch would have had.
                self.num_failed += 1
                _log.exception("prefetch %d failed", fetch.number)
            finally:
                fetch.finish()
                if fetch.publishes:
                    self._arrive(fetch)

    def _next(self) -> Fetch | None:
        with self._changed:
            while not (self._queue or self._closing):
                self._changed.wait(LONGEST_SLEEP_S)
            return None if self._closing else self._queue.popleft()

    def _fetch(self, fetch: Fetch) -> None:
        if fetch.ended:
            return
        keys = self._keys.of_tokens(fetch.tokens, fetch.extra_key, pause=True)
        num_local, num_pages = fetch.local_ids.size, fetch.page_ids.size
        tokens = fetch.tokens.reshape(-1, self._keys.page_size)[num_local:][:num_pages]

        self._stack.read(keys[num_local:][:num_pages], tokens, partial(self._deliver, fetch))

    def _deliver(self, fetch: Fetch, first: int, rows: NDArray[np.uint8]) -> bool:
        kv = self._stack.records.kv(rows)
        for begin in range(0, len(rows), self._at_once):
            part = kv[begin : begin + self._at_once]
            write = partial(self._copies.write, kv=part, mark=fetch.mark)
            if self._closing or not fetch.fill(first + begin, len(part), write):
                return False
        self.num_fetched += len(rows)
        if fetch.publishes:
            self._arrive(fetch)
        return True
