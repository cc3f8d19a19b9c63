"""The tree's content rebuilt from events alone, and compared with its nodes, under all traffic."""

import random
import threading

import numpy as np
import pytest

pytest.importorskip("zmq")
pytest.importorskip("msgspec")

from kvpool.events import AllBlocksCleared, BlockRemoved, BlockStored, CacheView
from tests.helpers.events import LOOPBACK, read_up_to, subscribed
from tests.helpers.pools import case_pool

PAGE = 4
NAMESPACES = (None, "a", "1", 1, b"1", 2**80, "\ud800")


def publish(pool, **options):
    return pool.publish_events(LOOPBACK, replay_endpoint=LOOPBACK, **options)


def prefixes(pool):
    """(type, namespace, tokens up to its end) of every cached page, from the tree's own nodes."""
    nodes = {node.node: node for node in pool.radix.nodes()}

    def path(node):
        above = nodes.get(node.parent)
        return (path(above) if above else ()) + tuple(node.tokens.tolist())

    return {
        (type(node.extra_key), node.extra_key, path(node)[: node.start + end])
        for node in nodes.values()
        if not node.detached
        for end in range(PAGE, len(node.tokens) + 1, PAGE)
    }


class SlowView:
    """The slow twin of `CacheView`: every page with all that is above it, spelled out."""

    def __init__(self):
        self.pages = {}

    def apply(self, batch):
        assert not batch.missed
        for event in batch.events:
            if isinstance(event, AllBlocksCleared):
                self.pages.clear()
            elif isinstance(event, BlockRemoved):
                for name in event.block_hashes:
                    del self.pages[name]
            else:
                assert isinstance(event, BlockStored)
                self.store(event)

    def store(self, event):
        if event.parent_block_hash is None:
            keys = event.extra_keys[0] if event.extra_keys else ()
            key, tokens = keys, ()
        else:
            key, tokens = self.pages[event.parent_block_hash]
        for i, name in enumerate(event.block_hashes):
            tokens = (*tokens, *event.token_ids[i * PAGE : (i + 1) * PAGE])
            assert self.pages.get(name, (key, tokens)) == (key, tokens)
            self.pages[name] = (key, tokens)

    def matched_len(self, prompt, keys):
        lengths = [
            len(tokens)
            for key, tokens in self.pages.values()
            if key == keys and tokens == tuple(prompt[: len(tokens)])
        ]
        return max(lengths, default=0)


def keys_of(extra_key):
    """Extra keys of a namespace's first page."""
    odd = {2**80: ("int", format(2**80, "x")), "\ud800": ("str", b"\xed\xa0\x80")}
    return () if extra_key is None else odd.get(extra_key, (extra_key,))


def traffic(pool, rng, calls):
    """Random calls that change the tree, with evictions, resets and forks among them."""
    bound = []
    for _ in range(calls):
        choice = rng.random()
        if choice < 0.6 or not bound:
            length = rng.randrange(1, 40)
            prompt = [rng.randrange(2) for _ in range(length)]
            key, capacity = rng.choice(NAMESPACES), length + rng.randrange(12)
            if pool.would_fit(prompt, capacity, extra_key=key):
                request = pool.bind_request(prompt, capacity, extra_key=key)
                pool.mark_written(request, length)
                bound.append((request, prompt))
                continue
        if not bound:
            continue
        request, prompt = bound.pop(rng.randrange(len(bound)))
        if choice > 0.98:
            pool.reset_prefix_cache()
        if choice > 0.9:
            pool.checkpoint_request(request, prompt)
            pool.unbind_request(request)
        elif choice > 0.85:
            pool.radix.match_prefix(prompt)
            slots = pool.radix.evict(PAGE)
            pool.free((slots[:, None] * PAGE + np.arange(PAGE)).reshape(-1).astype(np.int64))
            pool.unbind_request(request)
        else:
            pool.finish_request(request, prompt)
    for request, _ in bound:
        pool.unbind_request(request)


@pytest.mark.parametrize("hash_as", ["bytes", "int"])
@pytest.mark.parametrize("seed", range(3))
def test_content_rebuilt_from_events_is_the_trees(make_pool, seed, hash_as):
    rng = random.Random(seed)
    pool = case_pool(make_pool, PAGE, 40)
    traffic(pool, rng, 20)  # what is there before anybody subscribes
    publisher = publish(pool, hash_as=hash_as)
    view, slow = CacheView(), SlowView()
    with subscribed(publisher) as subscriber:
        for _ in range(15):
            traffic(pool, rng, 25)
            publisher.flush()
            read_up_to(subscriber, publisher.stats()["batches"] - 1, view, slow)
            cached = prefixes(pool)
            assert len(view) == len(cached)
            assert set(view) == set(slow.pages)
            assert {(keys_of(key), tokens) for _, key, tokens in cached} == {*slow.pages.values()}
            for key in NAMESPACES:
                prompt = [rng.randrange(2) for _ in range(30)]
                length = view.matched_len(prompt, key)
                assert length == slow.matched_len(prompt, keys_of(key))
                assert length == pool.radix.match_prefix(prompt, key).length
    assert pool.stats()["evicted_pages"] > 50
    assert view.unknown_removals == 0
    assert publisher.stats()["failed"] == 0


def test_content_is_right_while_everything_happens_at_once(make_pool):
    """Traffic here, the follower's thread, replays, announcements, and two readers."""
    pool = case_pool(make_pool, PAGE, 40)
    publisher = publish(pool, replay_batches=20, announce_interval_s=0.0)
    views, end = [CacheView(), CacheView()], threading.Event()

    def read(view):
        with subscribed(publisher, check_interval_s=0.01) as subscriber:
            while (batch := subscriber.read(0.1)) is not None or not end.is_set():
                if batch is not None:
                    view.apply(batch)

    def announce():
        while not end.wait(0.02):
            publisher.announce()

    threads = [threading.Thread(target=read, args=(view,)) for view in views]
    threads.append(threading.Thread(target=announce))
    for thread in threads:
        thread.start()
    try:
        traffic(pool, random.Random(7), 3000)
        publisher.flush()
    finally:
        end.set()
        for thread in threads:
            thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    publisher.flush()
    for view in views:
        with subscribed(publisher) as subscriber:
            # What an announcement told after the readers had gone.
            read_up_to(subscriber, publisher.stats()["batches"] - 1, view)
        assert view.complete
        assert len(view) == len(prefixes(pool))
    assert publisher.stats()["failed"] == 0
