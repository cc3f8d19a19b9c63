"""PoolTiers: the tiers of a pool, as its owner sees them."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

from kvpool.pool.prefetching import Prefetching
from kvpool.tiers.contract import Tier
from kvpool.tiers.flow import TierFlow
from kvpool_ext.gate import Gate

CLOSE_SECONDS = 0.5


class PoolTiers:
    """What `KVCachePool.attach_tiers` made; as `KVCachePool.tiers`.

    The tier objects stay their maker's: several pools may share them, and nothing here closes
    them.

    Attributes
    ----------
    tiers : tuple of Tier
        As they were given, the fastest first.
    model : str
        What the page keys say that the weights are.
    """

    def __init__(
        self,
        tiers: Sequence[Tier],
        model: str,
        prefetching: Prefetching,
        flow: TierFlow,
        gate: Gate,
    ) -> None:
        self.tiers = tuple(tiers)
        self.model = model
        self._prefetching, self._flow, self._gate = prefetching, flow, gate
        self._closed = False
        # Also where nobody closes it: its threads hold the buffers of the pool.
        self._stop = weakref.finalize(self, flow.stop)

    @property
    def is_halted(self) -> bool:
        """Whether the cache was reset since, so that nothing is written or fetched.

        After a reset the weights may be others, and the keys name the old ones. `resume` says that
        they are not.
        """
        return self._prefetching.epoch.is_over

    def resume(self) -> None:
        """Go on after a reset: the weights are still those that `model` names."""
        try:
            self._gate.enter()
            self._prefetching.epoch.renew()
        finally:
            self._gate.leave()

    def flush(self, timeout_s: float = 10.0) -> bool:
        """Write all cached pages that are due, and wait for it; whether all was done in time.

        By policy ``"evict"`` all are due that no request holds. What a tier refuses, or cannot
        take because it is not asked, is done too: see `stats`.
        """
        return self._flow.flush(timeout_s)

    def stats(self) -> dict[str, int]:
        """Counters of prefetch and write-back, since the tiers were attached; any thread."""
        return {**self._prefetching.counts, **self._flow.counters()}

    def stats_by_tier(self) -> dict[str, dict[str, int]]:
        """Counters of each tier by its name, with those that the tier keeps itself; any thread.

        A tier is asked for them as for all else: not while it is not asked, and no longer than
        the time-out.
        """
        return self._flow.tier_counters()

    @property
    def last_errors(self) -> dict[str, str]:
        """What went wrong last with each tier, by its name; empty for what never failed."""
        return {lane.name: lane.last_error for lane in self._flow.stack.lanes}

    @property
    def closed(self) -> bool:
        """Whether `close` was called, and has ended."""
        return self._closed

    def close(self, timeout_s: float = CLOSE_SECONDS) -> None:
        """End all prefetches and let go of the tiers; what is not written yet is not written.

        Waits for the threads no longer than `timeout_s`; a call of a tier that hangs is left to
        itself.
        """
        if not self.closed:
            self._close(timeout_s)

    def _close(self, timeout_s: float) -> None:
        try:
            self._gate.enter()
            self._prefetching.flow = None
            self._prefetching.end_all()
            self._flow.close(timeout_s)
            # Last: an interrupted one can be called again.
            self._closed = True
        finally:
            self._gate.leave()

    def forget(self) -> None:
        """`close`, for a pool that is closed itself."""
        if not self.closed:
            self._prefetching.flow = None
            self._prefetching.forget_all()
            self._flow.close(CLOSE_SECONDS)
            self._closed = True
