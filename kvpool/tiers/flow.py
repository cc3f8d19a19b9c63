"""TierFlow: lanes, threads and buffers between one pool and its tiers; the background side.

Nothing here enters the gate of the pool or touches its tree. It holds the pool's buffers, not the
pool: a pool that is dropped stops its flow.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

from kvpool.page_keys import PageKeys
from kvpool.storage import KVStorage
from kvpool.tiers.arena import StagingArena
from kvpool.tiers.breaker import CircuitBreaker
from kvpool.tiers.calls import TierCall
from kvpool.tiers.contract import Tier
from kvpool.tiers.copies import PageCopies
from kvpool.tiers.epoch import TreeEpoch
from kvpool.tiers.fetcher import Fetcher
from kvpool.tiers.lane import Lane
from kvpool.tiers.marks import MarkWanted
from kvpool.tiers.records import PageRecords
from kvpool.tiers.settings import TierSettings
from kvpool.tiers.stack import TierStack
from kvpool.tiers.write_back import Follower, WriteBack
from kvpool.tiers.write_queue import WriteQueue
from kvpool.tiers.writer import Writer

_MAX_CALLS = 64
_LEAST_KNOWN = 1 << 16


class TierFlow:
    """All that runs in the background for the tiers of one pool.

    Parameters
    ----------
    tiers : sequence of Tier
        The fastest first.
    storage : KVStorage
        The pool's buffers.
    keys : PageKeys
        Names of its pages.
    follower : Follower
        Of its tree.
    arrivals : deque
        What the scheduler's thread has to look at: fetches with pages to publish, wanted marks.
    settings : TierSettings
        The options.
    epoch : TreeEpoch
        Whether the tree is still of the weights that the keys name.
    count_free : callable
        Free pages of the pool now; any thread.
    """

    def __init__(
        self,
        tiers: Sequence[Tier],
        storage: KVStorage,
        keys: PageKeys,
        follower: Follower,
        arrivals: deque[Any],
        settings: TierSettings,
        epoch: TreeEpoch,
        count_free: Callable[[], int],
    ) -> None:
        records = PageRecords(keys.fingerprint)
        arena = StagingArena(
            *settings.staging(len(tiers), records.record_bytes), records.record_bytes
        )
        with ExitStack() as started:  # where a thread cannot be started, those before it end
            lanes = [self._lane(tier, arena, settings, started) for tier in tiers]
            max_known = max(_LEAST_KNOWN, 4 * settings.queue_pages)
            self.stack = TierStack(lanes, records, arena, max_known, settings.timeout_s)
            self._process_id = os.getpid()
            self._follower = follower
            self._policy = settings.write
            self._num_pages = storage.num_slots // storage.page_size
            self._queue = WriteQueue(settings.queue_pages)
            self._choice = WriteBack(
                settings.write, self._queue, self.stack.known, settings.low_pages, count_free
            )
            fetch_copies, write_copies = PageCopies(storage), PageCopies(storage)
            wanted = MarkWanted(arrivals, write_copies.stream, settings.timeout_s)
            self.fetcher = Fetcher(self.stack, fetch_copies, keys, arrivals.append)
            started.callback(self.fetcher.close)
            self.mark = fetch_copies.stream.mark
            self.needs_marks = fetch_copies.stream.needs_marks
            self._writer = Writer(
                self._queue,
                self._choice,
                self.stack,
                write_copies,
                follower,
                epoch,
                wanted.take,
            )
            started.callback(self._queue.close)
            self._unsubscribe: Callable[[], None] | None = None
            if self._policy != "none":
                self._unsubscribe = follower.subscribe(self._choice)
            started.pop_all()

    @staticmethod
    def _lane(tier: Tier, arena: StagingArena, settings: TierSettings, started: ExitStack) -> Lane:
        lane = Lane(
            tier,
            arena.memory,
            timeout_s=settings.timeout_s,
            max_calls=_MAX_CALLS,
            breaker=CircuitBreaker(settings.max_failures, settings.retry_s),
        )
        started.callback(lane.stop)
        return lane

    def flush(self, timeout_s: float) -> bool:
        """Write what is due, and wait for it; whether all was done in time.

        By policy ``"evict"`` everything is due that eviction could take now.
        """
        if self._policy == "none":
            return True
        give_up = time.monotonic() + timeout_s
        self._follower.drain()
        while self._policy == "evict":
            tried, settled = self._writer.num_tried, self._num_settled()
            self._choice.choose_victims(self._follower, self._num_pages)
            if not self._queue.wait_until_idle(give_up - time.monotonic()):
                return False
            if self._writer.num_tried == tried:
                return True
            if self._num_settled() == settled:
                return False  # no tier takes them
        return self._queue.wait_until_idle(give_up - time.monotonic())

    def _num_settled(self) -> int:
        """Pages that were written, or that the tiers turned out to have."""
        counts = self._writer.counts
        return counts["write_pages"] + counts["write_known"]

    def counters(self) -> dict[str, int]:
        """What the flow counts, all tiers together."""
        return {
            "fetched_pages": self.fetcher.num_fetched,
            "failed_fetches": self.fetcher.num_failed,
            "write_queue_pages": len(self._queue),
            "write_dropped": self._queue.num_dropped,
            "write_lost": self._choice.num_lost,
            **self._writer.counts,
        }

    def tier_counters(self) -> dict[str, dict[str, int]]:
        """What is counted of each tier, by its name: its lane, its pages, and its own numbers."""
        found = {}
        for lane, pages in zip(self.stack.lanes, self.stack.counters(), strict=True):
            own = lane.ask(TierCall("stats")) or {}
            found[lane.name] = {**own, **pages, **lane.stats()}
        return found

    @property
    def is_forked(self) -> bool:
        """Whether this process is a fork of the one that made the threads: it has none of them."""
        return os.getpid() != self._process_id

    def stop(self) -> None:
        """Let go of everything at once; threads end when their calls return."""
        if self.is_forked:
            return
        self._queue.close()
        self.fetcher.close()
        for lane in self.stack.lanes:
            lane.stop()

    def close(self, timeout_s: float) -> bool:
        """`stop`, and wait for the threads; whether all ended in time."""
        give_up = time.monotonic() + timeout_s
        if self.is_forked:
            return True
        self.stop()
        if self._unsubscribe is not None:
            self._unsubscribe()
        threads: list[Fetcher | Writer | Lane] = [self.fetcher, self._writer, *self.stack.lanes]
        ended = [each.join(give_up - time.monotonic()) for each in threads]
        return all(ended)
