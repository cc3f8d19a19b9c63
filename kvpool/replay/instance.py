"""Instance: one pool of a cell, its books without its tensors, and the tiers below it."""

from __future__ import annotations

from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from kvpool.errors import KVCacheExhaustedError
from kvpool.following.follower import TreeFollower
from kvpool.page_keys import PageKeys
from kvpool.paging import num_pages_for_length
from kvpool.replay.prompt import Prompt
from kvpool.replay.tiers import InstanceTiers, TierModel
from kvpool.request import Request
from kvpool.requests import RequestTable

# The journal is read after each call: it holds what one request moves, and must not drop that.
_UNREAD_BYTES = 1 << 40


class Instance:
    """What an engine does with its pool, call by call.

    Parameters
    ----------
    num_pages, page_size : int
        Of its pool.
    policy : str
        What is evicted first.
    eviction_history : int, optional
        Tokens of evicted prefixes that the pool remembers, for its explanations.

    Attributes
    ----------
    table : RequestTable
        The books.
    host : TierModel or None
        Its own tier.
    requests_in_flight, tokens_in_flight : int
        What is bound now.
    num_requests, prompt_tokens : int
        What it has served.
    bookkeeping_s : float
        Seconds inside of kvpool's calls: bind, mark_written, checkpoint, finish.
    """

    def __init__(
        self, num_pages: int, page_size: int, policy: str, eviction_history: int | None = None
    ) -> None:
        self.table = RequestTable(
            num_pages, page_size, 1, eviction=policy, eviction_history=eviction_history
        )
        self.host: TierModel | None = None
        self.requests_in_flight = self.tokens_in_flight = 0
        self.num_requests = self.prompt_tokens = 0
        self.bookkeeping_s = 0.0
        self._page_size = page_size
        self._tiers: InstanceTiers | None = None
        self._follower: TreeFollower | None = None

    def attach(
        self, host: TierModel | None, remote: TierModel | None, write: str, keys: PageKeys
    ) -> None:
        """Put tiers below, one or both, before the first request."""
        self.host = host
        self._tiers = InstanceTiers(host, remote, write)
        self._follower = TreeFollower(self.table.ledger, keys, max_bytes=_UNREAD_BYTES)
        self._follower.subscribe(self._tiers)

    def close(self) -> None:
        """Follow the tree no more; AssertionError if the tiers were not told of everything."""
        if self._follower is None:
            return
        self._follower.close()
        found = self._follower.stats()
        if found["losses"] or found["dropped_subscribers"]:
            raise AssertionError(f"the tiers missed changes of the tree: {found}")

    # ---- looking, which changes nothing

    def fits_alone(self, num_tokens: int) -> bool:
        """Whether a request of so many tokens fits when nothing else is in flight."""
        return num_pages_for_length(num_tokens, self._page_size) <= self.table.num_pages

    def would_fit(self, prompt: Prompt, num_tokens: int) -> bool:
        """Whether a request fits now."""
        ledger = self.table.ledger
        return ledger.would_fit(prompt.tokens, num_tokens, prompt.extra_key, True)

    def near_pages(self, prompt: Prompt) -> int:
        """Pages of a prompt that the pool has, or the host tier behind them."""
        num_pages = self._local_pages(prompt)
        if self.host is not None:
            while num_pages < prompt.most_matched and prompt.keys[num_pages] in self.host:
                num_pages += 1
        return num_pages

    def uncut_len(self, prompt: Prompt) -> int:
        """What a prompt would match without the rule of n - 1; 0 where that makes no difference.

        It is what a prompt of one token more matches, and a walk that changes nothing says it.
        """
        if prompt.length % self._page_size:
            return 0
        ledger = self.table.ledger
        num_pages, _ = ledger.room_if_alone(prompt.and_one_more, prompt.extra_key, True)
        if (
            self._tiers is not None
            and num_pages == prompt.most_matched
            and self._tiers.has(prompt.keys[num_pages])
        ):
            num_pages += 1
        return num_pages * self._page_size

    def used_pages(self) -> tuple[int, int]:
        """Pages that are not free, and those of them that requests in flight hold."""
        num_used = self.table.num_pages - self.table.free_pages
        return num_used, num_used - self.table.ledger.evictable_pages

    # ---- kvpool's calls, and their time

    def fetch(self, prompt: Prompt) -> tuple[int, int]:
        """Bring what the tiers have behind the local match into the tree; it must fit.

        As a prefetch that has arrived: the match is locked, pages are taken for what was found,
        and the tree gets them.

        Returns
        -------
        tuple of int
            Pages that came from the host tier, and from the shared store.
        """
        if self._tiers is None:
            return 0, 0
        num_local = self._local_pages(prompt)
        if num_local >= prompt.most_matched:
            return 0, 0
        found = self._tiers.read_run(prompt.keys[num_local : prompt.most_matched])
        num_found = sum(found)
        if num_found:
            self._take_in(prompt, num_local, num_found)
        return found

    def bind(self, prompt: Prompt, num_tokens: int, may_wait: bool) -> Request | None:
        """Bind a request; None where others have to end first, an error where none can."""
        start = perf_counter()
        try:
            lease = self.table.bind(prompt.tokens, num_tokens, prompt.extra_key, 0, True)
        except KVCacheExhaustedError:
            if not may_wait:
                raise
            return None
        finally:
            self.bookkeeping_s += perf_counter() - start
        self.requests_in_flight += 1
        self.tokens_in_flight += num_tokens
        self.num_requests += 1
        self.prompt_tokens += prompt.length
        return lease

    def prefill(self, lease: Request, prompt: Prompt, checkpoints: bool) -> None:
        """Have the prompt computed."""
        start = perf_counter()
        self.table.mark_written(lease, prompt.length)
        if checkpoints:
            self.table.checkpoint(lease, prompt.tokens, True)
        self.bookkeeping_s += perf_counter() - start
        self._tell()

    def finish(self, lease: Request, tokens: NDArray[np.int32]) -> None:
        """End a request with all its tokens."""
        start = perf_counter()
        self.table.mark_written(lease, tokens.size)
        self.table.finish(lease, tokens, True)
        self.bookkeeping_s += perf_counter() - start
        self.requests_in_flight -= 1
        self.tokens_in_flight -= tokens.size
        self._tell()

    # ----

    def _local_pages(self, prompt: Prompt) -> int:
        ledger = self.table.ledger
        num_pages, _ = ledger.room_if_alone(prompt.tokens, prompt.extra_key, True)
        return num_pages

    def _take_in(self, prompt: Prompt, num_local: int, num_found: int) -> None:
        ledger, tree = self.table.ledger, self.table.ledger.tree
        match = tree.match_prefix(prompt.tokens[: num_local * self._page_size], prompt.extra_key)
        tree.inc_lock_ref(match.node)
        try:
            pages = ledger.take(num_found)
        finally:
            tree.dec_lock_ref(match.node)
        if pages is None:
            raise AssertionError(f"{num_found} pages for a request that fits were not there")
        num_tokens = (num_local + num_found) * self._page_size
        tree.insert(
            prompt.tokens[:num_tokens], np.concatenate([match.pages, pages]), prompt.extra_key
        )

    def _tell(self) -> None:
        if self._follower is not None:
            self._follower.drain()
