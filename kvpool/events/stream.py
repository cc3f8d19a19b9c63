"""EventStream: changes of a tree become numbered batches, are sent, and are kept for replays."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from kvpool.events.guests import msgspec, zmq
from kvpool.events.namespaces import Namespace
from kvpool.events.past import PastBatches
from kvpool.events.wire import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Event,
    EventBatch,
    sequence_bytes,
)
from kvpool.events.wording import Wording
from kvpool.following.contract import StoredRun
from kvpool.request import ExtraKey

# Lists of tokens are made under the GIL, 30 ns each with their bytes: after so many the scheduler,
# if it waits, shall have its turn, and not after Python's switch interval.
_TOKENS_AT_ONCE = 1024
_HASHES_AT_ONCE = 1024
_PAUSE_S = 2e-5
_MOST_NAMESPACES = 4096  # remembered


class EventStream:
    """Numbers, encodes and sends; told by one thread at a time, and asked by any.

    Parameters
    ----------
    publish : zmq.Socket
        PUB; used under a lock, so that it may be used by several threads.
    wording : Wording
        See there.
    past : PastBatches
        Where batches are kept.
    """

    def __init__(self, publish: zmq.Socket[bytes], wording: Wording, past: PastBatches) -> None:
        self._publish: zmq.Socket[bytes] | None = publish
        self._wording, self._past = wording, past
        self._lock = threading.RLock()
        self._encode = msgspec.msgpack.Encoder().encode
        self._namespaces: dict[tuple[type, ExtraKey], Namespace] = {}
        self._events: list[Event] = []
        self._num_entries = 0  # tokens and hashes in them
        self._sequence = 0
        self._counts = dict.fromkeys(
            ("stored_pages", "removed_pages", "clears", "events", "bytes", "dropped_batches"), 0
        )

    # ---- what happened

    def stored(self, run: StoredRun) -> None:
        """Pages came."""
        namespace, hash_of = self._namespace(run.extra_key), self._wording.hash_of
        num_pages, page_size = run.tokens.shape
        parent = None if run.parent_key is None else hash_of(run.parent_key)
        at_once = max(1, _TOKENS_AT_ONCE // page_size)
        for begin in range(0, num_pages, at_once):
            hashes = [hash_of(key) for key in run.keys[begin : begin + at_once]]
            tokens = run.tokens[begin : begin + at_once].reshape(-1).tolist()
            event = BlockStored(
                hashes,
                parent,
                tokens,
                page_size,
                medium=self._wording.medium,
                lora_name=namespace.lora_name,
                extra_keys=namespace.extra_keys(len(hashes), begins=parent is None),
                cache_salt=namespace.cache_salt,
            )
            parent = hashes[-1]
            self._add(event, "stored_pages", len(hashes), len(tokens))

    def removed(self, keys: list[bytes]) -> None:
        """Pages went."""
        for begin in range(0, len(keys), _HASHES_AT_ONCE):
            hashes = [self._wording.hash_of(key) for key in keys[begin : begin + _HASHES_AT_ONCE]]
            event = BlockRemoved(hashes, self._wording.medium)
            self._add(event, "removed_pages", len(hashes), len(hashes))

    def cleared(self) -> None:
        """All went; the event begins a batch, so that a replay can begin with it."""
        with self._lock:
            self.flush()
            self._add(AllBlocksCleared(), "clears", 1, 1)

    def flush(self) -> None:
        """Send what there is as one batch."""
        with self._lock:
            if not self._events:
                return
            events, self._events, self._num_entries = self._events, [], 0
            batch = EventBatch(time.time(), events, self._wording.data_parallel_rank)
            payload = self._encode(batch)
            sequence, self._sequence = self._sequence, self._sequence + 1
            anew = isinstance(events[0], AllBlocksCleared)
            self._past.append(sequence, payload, anew=anew)
            self._counts["events"] += len(events)
            self._counts["bytes"] += len(payload)
            self._send(sequence, payload)

    def end(self) -> None:
        """Send nothing more: the socket is about to be closed."""
        with self._lock:
            self._publish = None

    def _send(self, sequence: int, payload: bytes) -> None:
        if self._publish is None:
            return
        try:
            self._publish.send_multipart(
                (self._wording.topic, sequence_bytes(sequence), payload), zmq.NOBLOCK
            )
        except zmq.Again:  # a PUB socket drops instead; a replay has it
            self._counts["dropped_batches"] += 1

    def _add(self, event: Event, count: str, num: int, num_entries: int) -> None:
        with self._lock:
            self._events.append(event)
            self._counts[count] += num
            self._num_entries += num_entries
            if self._num_entries < _TOKENS_AT_ONCE:
                return
            self.flush()
        time.sleep(_PAUSE_S)

    def _namespace(self, extra_key: ExtraKey) -> Namespace:
        key = (type(extra_key), extra_key)
        found = self._namespaces.get(key)
        if found is None:
            if len(self._namespaces) >= _MOST_NAMESPACES:
                self._namespaces.clear()
            lora_name = self._wording.adapter_of(extra_key)
            found = self._namespaces[key] = Namespace(extra_key, lora_name)
        return found

    # ---- what can be asked

    def since(self, sequence: int) -> tuple[list[tuple[int, bytes]], bool]:
        """As `PastBatches.since`."""
        with self._lock:
            return self._past.since(sequence)

    def stats(self) -> dict[str, int]:
        """What was published."""
        with self._lock:
            return {
                "batches": self._sequence,
                **self._counts,
                "replay_batches": len(self._past),
                "replay_bytes": self._past.num_bytes,
            }


class StreamFeed:
    """Tells a stream what a follower tells; one subscription of it.

    Parameters
    ----------
    stream : EventStream
        Told until `end`.
    """

    def __init__(self, stream: EventStream) -> None:
        self._stream: EventStream | None = stream
        self.error: BaseException | None = None

    def end(self) -> None:
        """Tell no more."""
        self._stream = None

    def on_stored(self, run: StoredRun) -> None:
        """Pages came."""
        self._tell(lambda stream: stream.stored(run))

    def on_removed(self, page_ids: NDArray[np.int32], keys: list[bytes]) -> None:
        """Pages went."""
        self._tell(lambda stream: stream.removed(keys))

    def on_cleared(self) -> None:
        """Everything went."""
        self._tell(EventStream.cleared)

    def on_caught_up(self) -> None:
        """Send what was told."""
        self._tell(EventStream.flush)

    def _tell(self, what: Callable[[EventStream], None]) -> None:
        stream = self._stream
        if stream is None:
            return
        try:
            what(stream)
        except BaseException as error:
            self.error = error
            raise
