"""EventPublisher: a follower's subscriber that publishes what it is told."""

from __future__ import annotations

import math
import os
import threading
import time
import weakref
from collections.abc import Callable
from typing import Protocol

from kvpool.errors import KVCacheStateError
from kvpool.events.past import PastBatches
from kvpool.events.replays import ReplayServer
from kvpool.events.sockets import EventSockets
from kvpool.events.stream import EventStream, StreamFeed
from kvpool.events.wording import Wording
from kvpool.following.contract import TreeSubscriber

_PATIENCE_S = 5.0


class Follower(Protocol):
    """What a publisher needs of `TreeFollower`."""

    def subscribe(self, subscriber: TreeSubscriber) -> Callable[[], None]:
        """Tell it what is there, and from then on what changes; gives the call that ends it."""

    def drain(self) -> None:
        """Tell all changes so far."""


class EventPublisher:
    """A stream of events of one pool; `KVCachePool.publish_events` makes it.

    It works in the follower's thread, and in one of its own for replays. Its first batch, of
    number 0, clears everything and tells what is cached; its last one, at `close`, clears
    everything. After a fork it is closed in the child, and goes on in the parent.

    Parameters
    ----------
    follower : TreeFollower
        Of the pool.
    sockets : EventSockets
        Closed by `close`.
    wording : Wording
        How events say what they say.
    past : PastBatches
        Keeps batches for replays.
    announce_interval_s : float
        Seconds at least between two announcements that replays cause.
    """

    def __init__(
        self,
        follower: Follower,
        sockets: EventSockets,
        wording: Wording,
        past: PastBatches,
        announce_interval_s: float,
    ) -> None:
        self.endpoint = sockets.endpoint
        self.replay_endpoint = sockets.replay_endpoint
        self._pid = os.getpid()
        self._follower, self._sockets = follower, sockets
        self._stream = EventStream(sockets.publish, wording, past)
        # Held while a subscription is replaced; never asked for by who tells a feed.
        self._subscribing = threading.Lock()
        self._closed = False
        self._announce_interval_s = announce_interval_s
        self._announced_at = -math.inf
        self._num_announcements = 0
        self._feed = StreamFeed(self._stream)
        # Not sent yet: what is there is told in the same batch, if it is little.
        self._stream.cleared()
        self._unsubscribe = follower.subscribe(self._feed)
        self._replays: ReplayServer | None = None
        if sockets.replay is not None:
            announce = weakref.WeakMethod(self._announce_for_replay)
            self._replays = ReplayServer(sockets.replay, wording.topic, self._stream, announce)
        self._abandon = weakref.finalize(
            self, _abandon, self._pid, self._stream, self._replays, sockets
        )

    @property
    def closed(self) -> bool:
        """Whether it was closed, or belongs to the process that this one was forked from."""
        return self._closed or os.getpid() != self._pid

    def announce(self) -> None:
        """Have all subscribers told everything anew: a clear, then all pages that are cached.

        For subscribers who lack something, and for those who came late and cannot ask for a
        replay. The follower's thread does it soon, `flush` waits for it. Any thread may call it,
        but none that is being told of changes.

        Raises
        ------
        KVCacheStateError
            It is closed.
        """
        with self._subscribing:
            if self.closed:
                raise KVCacheStateError("the publisher of events is closed")
            self._announce()

    def flush(self) -> None:
        """Have all changes up to now published when it returns; any thread may call it."""
        if self.closed:
            raise KVCacheStateError("the publisher of events is closed")
        self._follower.drain()
        self._stream.flush()

    def stats(self) -> dict[str, int]:
        """What was published since it was made, and what is kept for replays.

        ``batches`` (also the next sequence number), ``events``, ``stored_pages``,
        ``removed_pages``, ``clears`` (the first batch's too), ``bytes``, ``dropped_batches``
        (ZeroMQ would not take them at all; what it drops for one slow subscriber only that one
        sees), ``replay_batches`` and ``replay_bytes`` kept now, ``replays``, ``replayed_batches``,
        ``refused_replays`` (requests that were none), ``announcements``, ``failed`` (1 if an error
        has ended the stream).

        Raises
        ------
        KVCacheStateError
            It belongs to the process that this one was forked from.
        """
        if os.getpid() != self._pid:
            raise KVCacheStateError(
                f"the publisher belongs to process {self._pid}, and this is its fork {os.getpid()}"
            )
        replays = self._replays
        return {
            **self._stream.stats(),
            "replays": replays.num_requests if replays else 0,
            "replayed_batches": replays.num_replayed if replays else 0,
            "refused_replays": replays.num_refused if replays else 0,
            "announcements": self._num_announcements,
            "failed": int(self._feed.error is not None),
        }

    def close(self, linger_s: float = 1.0) -> None:
        """Tell subscribers that nothing is cached any more, and close; a second one does nothing.

        What is not followed any more is not promised any more. In a child after a fork it does
        nothing.

        Parameters
        ----------
        linger_s : float
            Seconds that the last batches may take to leave for slow subscribers.
        """
        if not (math.isfinite(linger_s) and linger_s >= 0):
            raise ValueError(f"linger_s must be finite and at least 0, got {linger_s}")
        if self.closed:
            return
        with self._subscribing:
            if self._closed:
                return
            self._closed = True
            self._end_subscription()
            self._stream.cleared()
            self._stream.flush()
            self._stream.end()
        self._abandon.detach()
        if self._replays is None or self._replays.stop(_PATIENCE_S):
            self._sockets.close(linger_s)

    def _announce(self) -> None:
        self._end_subscription()
        self._announced_at = time.monotonic()
        self._num_announcements += 1
        self._stream.cleared()
        self._feed = StreamFeed(self._stream)
        self._unsubscribe = self._follower.subscribe(self._feed)

    def _announce_for_replay(self) -> None:
        with self._subscribing:
            waited = time.monotonic() - self._announced_at
            if not self._closed and waited >= self._announce_interval_s:
                self._announce()
                self._follower.drain()

    def _end_subscription(self) -> None:
        self._feed.end()
        self._unsubscribe()

    def __enter__(self) -> EventPublisher:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _abandon(
    process_id: int, stream: EventStream, replays: ReplayServer | None, sockets: EventSockets
) -> None:
    """Close what nobody closed: a publisher was collected, or the interpreter ends."""
    if os.getpid() != process_id:
        return
    stream.end()
    if replays is None:
        sockets.close(0)
    else:
        replays.abandon(lambda: sockets.close(0))
