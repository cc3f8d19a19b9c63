"""PoolTiering: tiers below a pool, and pages that are fetched from them ahead of a bind."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from kvpool.errors import KVCacheStateError
from kvpool.following import TreeFollower
from kvpool.page_keys import Partition
from kvpool.pool.attached import PoolTiers
from kvpool.pool.following import PoolFollowing
from kvpool.pool.prefetch import Prefetch
from kvpool.pool.prefetching import Prefetching
from kvpool.request import ExtraKey
from kvpool.snapshot.fingerprint import check_model
from kvpool.tiers.contract import Tier
from kvpool.tiers.flow import TierFlow
from kvpool.tiers.settings import TierSettings, check_tiers
from kvpool_ext.namespaces import as_namespace
from kvpool_ext.tokens import as_tokens

DEFAULT_STAGING_BYTES = 64 << 20


class PoolTiering(PoolFollowing):
    """Calls of a pool that have to do with tiers."""

    _tiers: PoolTiers | None = None
    _prefetching: Prefetching | None = None

    def attach_tiers(
        self,
        tiers: Sequence[Tier],
        *,
        model: str,
        partition: Partition | None = None,
        write: str = "insert",
        queue_pages: int | None = None,
        low_pages: int | None = None,
        max_fetching_pages: int | None = None,
        staging_bytes: int = DEFAULT_STAGING_BYTES,
        timeout_s: float = 2.0,
        max_failures: int = 3,
        retry_s: float = 1.0,
    ) -> PoolTiers:
        """Write cached pages to tiers from now on, and let `prefetch` read them back.

        Everything that a tier does happens in threads of its own; the calls of the pool wait for
        none of it.

        Parameters
        ----------
        tiers : sequence of Tier
            The fastest first. They stay the caller's, who closes them after the pool.
        model : str
            What tells these weights from any other's: a hash of them, or a name and a revision.
            Whoever has the same, and a pool of the same shape, shares pages.
        partition : Partition, optional
            Which layers and heads of the model this pool holds, where not all; what
            `publish_events` was told holds too.
        write : str
            ``"insert"``: pages are written when they come to the tree. ``"evict"``: those that
            eviction would take next, where free pages get short. ``"none"``: only read.
        queue_pages : int, optional
            Pages that may wait to be written, the oldest are dropped; default all of the pool's.
        low_pages : int, optional
            For ``"evict"``: free pages below which the next victims are written; default an
            eighth of the pool.
        max_fetching_pages : int, optional
            Pages that prefetches may hold together; default a quarter of the pool.
        staging_bytes : int
            Host memory through which pages move.
        timeout_s : float
            The longest that a call of a tier may take. What takes longer is let go of, and the
            tier is not asked again before it has returned.
        max_failures : int
            Failures in a row after which a tier is not asked for a while.
        retry_s : float
            Seconds until it is tried again, doubled each time up to half a minute.

        Returns
        -------
        PoolTiers
            Counters, `flush` and `close`; also as `tiers`.

        Raises
        ------
        ValueError
            An empty `model`, no tiers, two of one name, an option out of range, staging memory
            too little for the records of this pool, or events are published under another `model`
            or `partition`.
        TypeError
            What is no tier, or an option of another type.
        KVCacheStateError
            There are tiers already.
        """
        try:
            self._gate.enter()
            check_model(model)
            if not model:
                raise ValueError(
                    "model is empty: tiers outlive the pool and are shared, and without a name "
                    "the K and V of any model of this shape would be taken for this one's; give "
                    "a hash of the weights, or a name and a revision"
                )
            if self.tiers is not None:
                raise KVCacheStateError(
                    "the pool has tiers already: close them first, with pool.tiers.close()"
                )
            found = check_tiers(tiers)
            num_pages = self.num_pages
            settings = TierSettings(
                write,
                num_pages if queue_pages is None else queue_pages,
                -(-num_pages // 8) if low_pages is None else low_pages,
                max(1, num_pages // 4) if max_fetching_pages is None else max_fetching_pages,
                staging_bytes,
                timeout_s,
                max_failures,
                retry_s,
            )
            return self._attach(found, self._follow(model, partition), settings)
        finally:
            self._gate.leave()

    def _attach(
        self, tiers: list[Tier], follower: TreeFollower, settings: TierSettings
    ) -> PoolTiers:
        ledger, storage = self._requests.ledger, self._open_storage()
        keys, allocator = follower.keys, ledger.allocator
        prefetching = Prefetching(ledger, self._gate, settings.max_fetching_pages)
        prefetching.flow = TierFlow(
            tiers,
            storage,
            keys,
            follower,
            prefetching.arrivals,
            settings,
            prefetching.epoch,
            lambda: allocator.num_free,
        )
        self._requests.give_way = prefetching.give_way
        self._prefetching, self._arrivals = prefetching, prefetching.arrivals
        model = keys.fingerprint.model
        self._tiers = PoolTiers(tiers, model, prefetching, prefetching.flow, self._gate)
        return self._tiers

    @property
    def _is_followed(self) -> bool:
        return self.tiers is not None or super()._is_followed

    @property
    def tiers(self) -> PoolTiers | None:
        """What `attach_tiers` made; None without tiers, or once they are closed."""
        found = self._tiers
        return None if found is None or found.closed else found

    def prefetch(
        self, prompt: Any, extra_key: ExtraKey = None, *, publish: bool = True
    ) -> Prefetch:
        """Have the continuation of what is cached of `prompt` fetched from the tiers.

        Returns at once. The cached part is locked meanwhile, and pages are taken for the rest;
        what verifies goes to the tree with the next `bind_request`, `bind_with_prefix`,
        `prefetch` or `poll_tiers`. A bind that is short of pages ends prefetches, the youngest
        first. Without tiers, with prefix reuse off, after a reset, or where too many pages are
        under way already, it is done at once.

        Parameters
        ----------
        prompt : sequence of int
            Token ids ``[n]``, as for a bind; a copy is kept. At most ``n - 1`` tokens are
            fetched, as a bind matches.
        extra_key : str, bytes, int or None
            Namespace.
        publish : bool
            False: pages wait for `Prefetch.publish`. So that ranks which call the same have the
            same page ids, whatever their tiers had.

        Raises
        ------
        ValueError
            Empty prompt, a token beyond int32.
        TypeError
            Tokens that are no integers.
        """
        try:
            self._gate.enter()
            tokens = np.array(as_tokens(prompt), np.int32)
            if extra_key is not None:
                extra_key = as_namespace(extra_key)
            if tokens.size == 0:
                raise ValueError("the prompt is empty, expected at least one token")
            if self._prefetching is None:
                # Never started: it only says what the tree has.
                self._prefetching = Prefetching(self._requests.ledger, self._gate, 0)
            self._take_arrivals()
            if not self._prefix_reuse:
                tokens = tokens[:1]
            return self._prefetching.start(tokens, extra_key, bool(publish))
        finally:
            self._gate.leave()

    def poll_tiers(self) -> int:
        """Publish what has arrived from tiers, as binds do; the tokens that the tree gained.

        For loops that seldom bind. Waits for nothing.
        """
        try:
            self._gate.enter()
            return self._take_arrivals()
        finally:
            self._gate.leave()

    def _take_arrivals(self) -> int:
        return 0 if self._prefetching is None else self._prefetching.poll()

    def _stop_tiers(self) -> None:
        if self._tiers is not None:
            self._tiers.forget()
