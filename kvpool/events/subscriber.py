"""EventSubscriber: a stream of events as it should have arrived."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from hashlib import blake2b

from kvpool.errors import KVCacheStateError
from kvpool.events.connection import StreamConnection
from kvpool.events.guests import msgspec
from kvpool.events.namespaces import is_text
from kvpool.events.wire import EventBatch, ReceivedBatch, message_of
from kvpool.numbers import INT32_MAX, positive_seconds, whole_number

_decode = msgspec.msgpack.Decoder(EventBatch).decode


class EventSubscriber:
    """Receives a stream in order, once, with what was missed fetched by replays.

    It starts at what the publisher has kept, notices gaps and a publisher that began anew, and
    asks once in a while whether the last batches were lost. One thread uses it.

    Parameters
    ----------
    endpoint : str
        The publisher's.
    replay_endpoint : str, optional
        Without one, what is missed is lost, and said to be.
    topic : str
        Topics that begin like this.
    hwm : int
        Batches that may wait here to be read, before the publisher drops some.
    replay_timeout_s : float
        Seconds that an answer may take.
    check_interval_s : float
        Quiet seconds after which it asks whether there is more.

    Raises
    ------
    ValueError, TypeError
        An endpoint that is none, a number out of range.
    """

    def __init__(
        self,
        endpoint: str,
        replay_endpoint: str | None = None,
        *,
        topic: str = "",
        hwm: int = 100_000,
        replay_timeout_s: float = 1.0,
        check_interval_s: float = 1.0,
    ) -> None:
        whole_number(hwm, "hwm", 1, INT32_MAX)
        _check_endpoint(endpoint, "endpoint")
        if replay_endpoint is not None:
            _check_endpoint(replay_endpoint, "replay_endpoint")
        if not isinstance(topic, str):
            raise TypeError(f"topic must be a str, got {type(topic).__name__}")
        if not is_text(topic):
            raise ValueError(f"topic must be text that UTF-8 can hold, got {topic!r}")
        positive_seconds(replay_timeout_s, "replay_timeout_s")
        positive_seconds(check_interval_s, "check_interval_s")
        self._connection: StreamConnection | None = StreamConnection(
            endpoint, replay_endpoint, topic.encode(), hwm
        )
        self._replay_timeout_s, self._check_interval_s = replay_timeout_s, check_interval_s
        self._ready: deque[ReceivedBatch] = deque()
        self._next = 0
        self._latest_live = -1  # of the subscription, which brings them in order
        # Those that a replay brought and the subscription has not: digest by sequence.
        self._replayed: dict[int, bytes] = {}
        self._asks_at = 0.0
        self._restarted = self._received_any = False
        self._undecoded = 0  # before the next batch
        self._counts = dict.fromkeys(
            ("batches", "missed_batches", "replays", "failed_replays", "restarts", "bad_messages"),
            0,
        )

    @property
    def connected(self) -> bool:
        """Whether the publisher was there when it was read last."""
        return self._open().is_there

    def read(self, timeout_s: float | None = None) -> ReceivedBatch | None:
        """The next batch; None if there is none within `timeout_s`, by default it waits for ever.

        A replay that is asked for meanwhile may take `replay_timeout_s` longer.
        """
        give_up = None if timeout_s is None else time.monotonic() + timeout_s
        connection = self._open()
        while not self._ready:
            frames = connection.receive()
            if frames is not None:
                self._take(frames)
                continue
            if connection.lost():
                self._begin_anew()
            now = time.monotonic()
            if connection.can_replay and now >= self._asks_at:
                self._ask()
                continue
            if give_up is not None and now >= give_up:
                return None
            until = [when for when in (give_up,) if when is not None]
            if connection.can_replay:
                until.append(self._asks_at)
            connection.wait(min(until) - now if until else 3600.0)
        return self._ready.popleft()

    def stats(self) -> dict[str, int]:
        """Counts since it was made.

        ``batches`` read, ``missed_batches`` lost for good, ``replays`` asked for,
        ``failed_replays`` among them, ``restarts`` of the stream, ``bad_messages`` that were none.
        """
        return dict(self._counts)

    def close(self) -> None:
        """Close its sockets; a second close does nothing."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def __enter__(self) -> EventSubscriber:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # ---- what arrives

    def _take(self, frames: list[bytes]) -> None:
        """A message of the subscription."""
        message = message_of(frames)
        if message is None or message[0] < 0:
            self._counts["bad_messages"] += 1
            return
        sequence, payload = message
        if sequence <= self._latest_live:
            self._begin_anew()
        elif sequence < self._next:
            if self._replayed.get(sequence) == _digest(payload):
                self._note_live(sequence)
                return
            self._begin_anew()
        if sequence > self._next and self._open().can_replay:
            self._ask()
        self._note_live(sequence)
        if sequence >= self._next:
            self._deliver(sequence, payload)

    def _ask(self) -> None:
        """Ask for all from the next batch on, and take what comes."""
        self._counts["replays"] += 1
        batches, complete = self._open().replay(self._next, self._replay_timeout_s)
        self._counts["failed_replays"] += not complete
        for sequence, payload in batches:
            if sequence >= self._next:
                self._deliver(sequence, payload)
                self._replayed[sequence] = _digest(payload)
        self._asks_at = time.monotonic() + self._check_interval_s

    def _deliver(self, sequence: int, payload: bytes) -> None:
        missed = sequence - self._next + self._undecoded
        self._next = sequence + 1
        self._asks_at = time.monotonic() + self._check_interval_s
        try:
            batch = _decode(payload)
        except (msgspec.DecodeError, msgspec.ValidationError):
            self._counts["bad_messages"] += 1
            self._undecoded = missed + 1
            return
        self._undecoded = 0
        self._counts["batches"] += 1
        self._counts["missed_batches"] += missed
        restarted, self._restarted, self._received_any = self._restarted, False, True
        self._ready.append(
            ReceivedBatch(
                sequence, missed, restarted, batch.ts, batch.events, batch.data_parallel_rank
            )
        )

    def _note_live(self, sequence: int) -> None:
        self._latest_live = sequence
        if self._replayed:
            for known in [known for known in self._replayed if known <= sequence]:
                del self._replayed[known]

    def _begin_anew(self) -> None:
        """Numbers start again: another publisher, or the same one after the line was cut."""
        self._counts["restarts"] += self._received_any
        self._restarted = self._restarted or self._received_any
        self._next, self._latest_live, self._undecoded = 0, -1, 0
        self._replayed.clear()
        self._asks_at = 0.0

    def _open(self) -> StreamConnection:
        if self._connection is None:
            raise KVCacheStateError("the subscriber is closed")
        return self._connection


def read_events(
    endpoint: str,
    replay_endpoint: str | None = None,
    *,
    topic: str = "",
    quiet_s: float | None = None,
) -> Iterator[ReceivedBatch]:
    """Batches of a stream, one after another, as an `EventSubscriber` reads them.

    Parameters
    ----------
    endpoint, replay_endpoint, topic
        As `EventSubscriber`.
    quiet_s : float, optional
        Ends after so many seconds without a batch; by default never.
    """
    with EventSubscriber(endpoint, replay_endpoint, topic=topic) as subscriber:
        while (batch := subscriber.read(quiet_s)) is not None:
            yield batch


def _check_endpoint(endpoint: str, name: str) -> None:
    if not isinstance(endpoint, str):
        raise TypeError(f"{name} must be a str, got {type(endpoint).__name__}")
    if endpoint.startswith("tcp://") and endpoint.endswith(":0"):
        raise ValueError(
            f"{name} {endpoint!r} has port 0, by which a publisher asks for any free one: give "
            f"what its `{name}` says"
        )


def _digest(payload: bytes) -> bytes:
    return blake2b(payload, digest_size=16).digest()
