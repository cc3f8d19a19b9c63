"""Streams over real sockets: order, gaps and replays, late, slow and several subscribers."""

import pytest

pytest.importorskip("msgspec")
pytest.importorskip("zmq")

import msgspec
import zmq

from kvpool.events import (
    AllBlocksCleared,
    BlockStored,
    CacheView,
    EventBatch,
    EventSubscriber,
    read_events,
)
from tests.helpers.events import (
    PATIENCE_S,
    HandFollower,
    cached,
    publish,
    read_up_to,
    subscribed,
    tokens,
)


@pytest.fixture
def follower():
    return HandFollower()


def test_a_late_subscriber_is_told_all_by_a_replay(follower):
    with publish(follower) as publisher:
        for number in range(5):
            follower.store(tokens(number))
            publisher.flush()
        view = CacheView()
        assert not view.complete
        with subscribed(publisher) as subscriber:
            batches = read_up_to(subscriber, 4, view)
        assert [batch.sequence for batch in batches] == list(range(5))
        assert isinstance(batches[0].events[0], AllBlocksCleared)
        assert cached(view, range(6)) == list(range(5))
        assert view.complete


def test_what_came_before_is_told_and_batches_follow_in_order(follower):
    for number in range(3):
        follower.store(tokens(number))
    with publish(follower) as publisher, subscribed(publisher) as subscriber:
        view = CacheView()
        for number in range(3, 60):
            follower.store(tokens(number))
            publisher.flush()
        batches = read_up_to(subscriber, publisher.stats()["batches"] - 1, view)
        assert [batch.sequence for batch in batches] == list(range(len(batches)))
        assert not any(batch.missed or batch.restarted for batch in batches)
        assert cached(view, range(61)) == list(range(60))


def test_a_gap_is_filled_by_a_replay(follower):
    """A subscriber that reads nothing for long, and whose queues hold four batches."""
    with publish(follower, hwm=2) as publisher:
        view = CacheView()
        with subscribed(publisher, hwm=2, check_interval_s=0.1) as subscriber:
            publisher.flush()
            read_up_to(subscriber, 0, view)
            for number in range(400):
                follower.store(tokens(number))
                publisher.flush()
            batches = read_up_to(subscriber, 400, view)
            assert subscriber.stats()["replays"] >= 1
        assert [batch.sequence for batch in batches] == list(range(1, 401))
        assert cached(view, range(401)) == list(range(400))


def test_a_gap_without_replays_is_said_and_healed_when_all_is_told_anew():
    follower, view = HandFollower(), CacheView()
    with publish(follower) as publisher:
        publisher.flush()
        for number in range(3):
            follower.store(tokens(number))
            publisher.flush()
        publisher.announce()
        publisher.flush()
        with subscribed(publisher) as subscriber:
            made = read_up_to(subscriber, 4)
    with zmq.Context() as context, context.socket(zmq.PUB) as peer:
        peer.linger = 0
        port = peer.bind_to_random_port("tcp://127.0.0.1")
        with EventSubscriber(f"tcp://127.0.0.1:{port}") as subscriber:
            latest = None
            while latest is None:  # until it is heard of
                send(peer, made[0])
                latest = subscriber.read(0.05)
            for batch in (made[1], made[3]):
                send(peer, batch)
            read_up_to(subscriber, 3, view)
            assert subscriber.stats()["missed_batches"] == 1
            assert not view.complete
            assert cached(view, range(4)) == [2]
            send(peer, made[4])
            read_up_to(subscriber, 4, view)
            assert view.complete
            assert cached(view, range(4)) == [0, 1, 2]


def send(peer, batch):
    """A batch as its publisher sent it."""
    payload = msgspec.msgpack.encode(EventBatch(batch.ts, batch.events))
    peer.send_multipart([b"", batch.sequence.to_bytes(8, "big"), payload])


def test_more_than_is_kept_is_announced_once_and_kept(follower):
    with publish(follower, replay_batches=3) as publisher:
        for number in range(10):
            follower.store(tokens(number))
            publisher.flush()
        assert publisher.stats()["replay_batches"] == 3
        for _ in range(2):
            view = CacheView()
            with subscribed(publisher) as subscriber:
                batch = subscriber.read(PATIENCE_S)
                view.apply(batch)
                # Batches 0 to 9, of which 7 to 9 were kept; then all of it anew.
                assert (batch.sequence, batch.missed) == (10, 10)
                assert cached(view, range(11)) == list(range(10))
                assert view.complete
        assert publisher.stats()["announcements"] == 1


def test_announcements_for_replays_have_their_distance(follower):
    with publish(follower, replay_batches=1, announce_interval_s=3600.0) as publisher:
        for _ in range(2):
            for number in range(5):
                follower.store(tokens(number))
                publisher.flush()
                follower.clear()
            publisher.flush()
            follower.store(tokens(9))
            publisher.flush()
            with subscribed(publisher) as subscriber:
                assert subscriber.read(PATIENCE_S).missed > 0
        assert publisher.stats()["announcements"] == 1


def test_two_subscribers_and_one_that_leaves(follower):
    with publish(follower) as publisher:
        views = [CacheView(), CacheView()]
        with subscribed(publisher) as first:
            with subscribed(publisher) as second:
                follower.store(tokens(1))
                publisher.flush()
                read_up_to(first, 0, views[0])
                read_up_to(second, 0, views[1])
            follower.store(tokens(2))
            publisher.flush()
            read_up_to(first, 1, views[0])
        assert cached(views[0], range(4)) == [1, 2]
        assert cached(views[1], range(4)) == [1]


def test_a_req_socket_gets_the_first_batch_that_it_asked_for(follower):
    with publish(follower) as publisher, zmq.Context() as context:
        publisher.flush()
        with context.socket(zmq.REQ) as req:
            req.linger = 0
            req.connect(publisher.replay_endpoint)
            req.send((0).to_bytes(8, "big"))
            assert req.poll(10_000)
            topic, sequence, payload = req.recv_multipart()
            assert (topic, sequence) == (b"", bytes(8))
            assert payload


def test_long_runs_are_cut_into_batches_that_fit_together(follower):
    with publish(follower) as publisher:
        publisher.flush()
        keys = follower.store(tokens(1, 3000))
        publisher.flush()
        view = CacheView()
        with subscribed(publisher) as subscriber:
            batches = read_up_to(subscriber, publisher.stats()["batches"] - 1, view)
        stored = [e for batch in batches for e in batch.events if isinstance(e, BlockStored)]
        assert len(stored) > 3
        assert max(len(event.token_ids) for event in stored) == 1024
        assert [h for event in stored for h in event.block_hashes] == keys
        assert cached(view, [1], 3000) == [1]
        follower.remove(keys[::-1])
        publisher.flush()
        with subscribed(publisher) as subscriber:
            view = CacheView()
            read_up_to(subscriber, publisher.stats()["batches"] - 1, view)
        assert len(view) == 0


def test_read_events_ends_when_it_is_quiet(follower):
    with publish(follower) as publisher:
        follower.store(tokens(1))
        publisher.flush()
        follower.store(tokens(2))
        publisher.flush()
        batches = [*read_events(publisher.endpoint, publisher.replay_endpoint, quiet_s=0.3)]
    assert [batch.sequence for batch in batches] == [0, 1]


def test_stats_add_up(follower):
    with publish(follower, topic="t") as publisher:
        publisher.flush()
        keys = follower.store(tokens(1, 3))
        follower.remove(keys[2:])
        publisher.flush()
        with subscribed(publisher, topic="t") as subscriber:
            read_up_to(subscriber, 1)
            assert subscriber.stats()["batches"] == 2
        stats = publisher.stats()
    assert stats["batches"] == stats["replay_batches"] == 2
    assert (stats["stored_pages"], stats["removed_pages"], stats["clears"]) == (3, 1, 1)
    assert stats["events"] == 3
    assert stats["bytes"] == stats["replay_bytes"]
    assert (stats["replays"], stats["replayed_batches"]) == (1, 2)
