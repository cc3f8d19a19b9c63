"""A tree by hand for publishers to follow, and what tests of streams have in common."""

import time
from contextlib import contextmanager

import numpy as np
import pytest

pytest.importorskip("zmq")
pytest.importorskip("msgspec")

from kvpool.dtypes import KVDType
from kvpool.events import EventPublisher, EventSubscriber
from kvpool.events.past import PastBatches
from kvpool.events.sockets import EventSockets
from kvpool.events.wording import Wording
from kvpool.following.contract import StoredRun
from kvpool.layout import KVCacheLayout
from kvpool.page_keys import PageKeys
from kvpool.snapshot import Fingerprint

LOOPBACK = "tcp://127.0.0.1:0"
PATIENCE_S = 30.0


def page_keys(page_size, model="m"):
    """Keys of a small model."""
    layout = KVCacheLayout(1, 1, 8)
    return PageKeys(Fingerprint.of(model, layout, page_size, KVDType.of("float32"), 1.0, 1.0))


class HandFollower:
    """Tells subscribers what a test says; the next drain tells a new one what is there."""

    def __init__(self, page_size=4):
        self.keys = page_keys(page_size)
        self.page_size = page_size
        self.cached = {}  # key -> (parent key, tokens, extra_key), parents first
        self.subscribers, self.joining = [], []

    def subscribe(self, subscriber):
        self.joining.append(subscriber)

        def end():
            for those in (self.subscribers, self.joining):
                if subscriber in those:
                    those.remove(subscriber)

        return end

    def drain(self):
        for subscriber in self.joining:
            for key, (parent, tokens, extra_key) in self.cached.items():
                subscriber.on_stored(self._run([key], parent, tokens, extra_key))
        self.subscribers += self.joining
        self.joining = []
        for subscriber in list(self.subscribers):
            subscriber.on_caught_up()

    def store(self, tokens, extra_key=None):
        """Cache the whole pages of `tokens`; their keys."""
        keys = self.keys.of_tokens(np.array(tokens, np.int32), extra_key)
        known = next((i for i, key in enumerate(keys) if key not in self.cached), len(keys))
        parent, size = (keys[known - 1] if known else None), self.page_size
        if new := keys[known:]:
            told = self._run(new, parent, tokens[known * size : len(keys) * size], extra_key)
            for subscriber in self.subscribers:
                subscriber.on_stored(told)
        for i, key in enumerate(new, known):
            self.cached[key] = (parent, tokens[i * size : (i + 1) * size], extra_key)
            parent = key
        return keys

    def remove(self, keys):
        for key in keys:
            del self.cached[key]
        for subscriber in self.subscribers:
            subscriber.on_removed(np.arange(len(keys), dtype=np.int32), keys)

    def clear(self):
        self.cached.clear()
        for subscriber in self.subscribers:
            subscriber.on_cleared()

    def _run(self, keys, parent, tokens, extra_key):
        count = len(keys)
        rows = np.array(tokens, np.int32).reshape(count, self.page_size)
        numbers = np.arange(count)
        return StoredRun(
            numbers.astype(np.int32), keys, parent, rows, extra_key, numbers.astype(np.uint32)
        )


def publish(follower, *, endpoint=LOOPBACK, replay_endpoint=LOOPBACK, **options):
    """A publisher of a follower, as a pool makes them."""
    chosen = {
        "topic": "",
        "hash_as": "bytes",
        "lora_name": None,
        "data_parallel_rank": None,
        "replay_batches": 1000,
        "replay_bytes": 1 << 20,
        "hwm": 1000,
        "announce_interval_s": 0.0,
    } | options
    names = ("topic", "hash_as", "lora_name", "data_parallel_rank")
    topic, hash_as, lora_name, rank = (chosen[name] for name in names)
    sockets = EventSockets(
        endpoint,
        replay_endpoint,
        allow_remote=False,
        hwm=chosen["hwm"],
        replay_hwm=2 * chosen["replay_batches"] + 2,
    )
    return EventPublisher(
        follower,
        sockets,
        Wording.of(topic, "cpu", hash_as, lora_name, rank),
        PastBatches(chosen["replay_batches"], chosen["replay_bytes"]),
        chosen["announce_interval_s"],
    )


@contextmanager
def subscribed(publisher, **options):
    """A subscriber of a publisher and, unless told, of its replays."""
    replay = options.pop("replay_endpoint", publisher.replay_endpoint)
    options = {"check_interval_s": 0.2} | options
    with EventSubscriber(publisher.endpoint, replay, **options) as subscriber:
        yield subscriber


def hear(publisher, subscriber, *views):
    """Announce until a subscriber without replays has been heard of, and has read all."""
    give_up = time.monotonic() + PATIENCE_S
    batch = None
    while batch is None:
        assert time.monotonic() < give_up
        publisher.announce()
        publisher.flush()
        batch = subscriber.read(0.05)
    while batch is not None:
        for view in views:
            view.apply(batch)
        batch = subscriber.read(0.05)


def read_until(subscriber, is_enough, *views):
    """Batches up to the first at which `is_enough()` holds, put into `views`."""
    batches, give_up = [], time.monotonic() + PATIENCE_S
    while not is_enough():
        assert time.monotonic() < give_up, f"{len(batches)} batches, and nothing more"
        batch = subscriber.read(0.1)
        if batch is not None:
            batches.append(batch)
            for view in views:
                view.apply(batch)
    return batches


def read_up_to(subscriber, sequence, *views):
    """Batches up to the one with this number."""
    latest = []

    def is_enough():
        return bool(latest) and latest[-1] >= sequence

    class Noting:
        def apply(self, batch):
            latest.append(batch.sequence)

    return read_until(subscriber, is_enough, Noting(), *views)


def tokens(number, pages=1):
    """The tokens of a prefix that no other number shares."""
    return [1000 * number + i for i in range(4 * pages)]


def cached(view, numbers, pages=1):
    """Which of the prefixes a view has, whole."""
    return [number for number in numbers if view.matched_len(tokens(number, pages)) == 4 * pages]
