"""Streams whose publisher dies or closes, and messages and requests that are none."""

import subprocess
import sys
import threading
import time

import pytest

pytest.importorskip("zmq")
pytest.importorskip("msgspec")

import zmq

from kvpool import KVCacheStateError
from kvpool.events import CacheView, EventSubscriber
from tests.helpers.events import (
    PATIENCE_S,
    HandFollower,
    cached,
    publish,
    read_until,
    read_up_to,
    subscribed,
    tokens,
)


@pytest.fixture
def follower():
    return HandFollower()


def test_a_publisher_that_is_killed_and_started_again_is_noticed(follower, tmp_path):
    endpoints = [f"ipc://{tmp_path}/{name}" for name in ("events", "replays")]
    view = CacheView()
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, *endpoints], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert child.stdout.readline() == b"ready\n"
        with EventSubscriber(*endpoints, check_interval_s=0.2, replay_timeout_s=0.2) as subscriber:
            read_until(subscriber, lambda: cached(view, range(9)) == [7], view)
            child.kill()
            child.wait(PATIENCE_S)
            follower.store(tokens(8))
            endpoint, replay_endpoint = endpoints
            with publish(follower, endpoint=endpoint, replay_endpoint=replay_endpoint) as again:
                again.flush()
                batches = read_until(subscriber, lambda: cached(view, range(9)) == [8], view)
            assert batches[0].restarted
            assert view.complete
            assert subscriber.stats()["restarts"] == 1
    finally:
        child.kill()
        child.communicate(timeout=PATIENCE_S)


CHILD = """
import sys
from kvpool import KVCachePool
pool = KVCachePool(1, 64, 1, 8, page_size=4)
publisher = pool.publish_events(sys.argv[1], replay_endpoint=sys.argv[2])
tokens = [7000, 7001, 7002, 7003]
request = pool.bind_request(tokens, 4)
pool.mark_written(request, 4)
pool.finish_request(request, tokens)
publisher.flush()
print("ready", flush=True)
sys.stdin.read()
"""


def test_a_dead_publisher_holds_up_nobody(follower):
    publisher = publish(follower)
    with subscribed(publisher, replay_timeout_s=0.1) as subscriber:
        follower.store(tokens(1))
        publisher.flush()
        read_up_to(subscriber, 0)
        read_until(subscriber, lambda: subscriber.connected)
        publisher.close()
        read_until(subscriber, lambda: not subscriber.connected)
        assert subscriber.read(0.3) is None
        assert subscriber.stats()["failed_replays"] >= 1


def test_closing_with_a_subscriber_that_does_not_read_is_bounded(follower):
    publisher = publish(follower, hwm=1)
    with zmq.Context() as context, context.socket(zmq.SUB) as silent:
        silent.linger = 0
        silent.setsockopt(zmq.RCVHWM, 1)
        silent.setsockopt(zmq.SUBSCRIBE, b"")
        silent.connect(publisher.endpoint)
        for number in range(2000):
            follower.store(tokens(number, 20))
            publisher.flush()
        thread = threading.Thread(target=publisher.close, args=(0.1,))
        thread.start()
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
    assert publisher.closed


def test_requests_that_are_none_are_refused_and_hurt_nobody(follower):
    with publish(follower) as publisher, zmq.Context() as context:
        with context.socket(zmq.DEALER) as dealer:
            dealer.linger = 0
            dealer.connect(publisher.replay_endpoint)
            for frames in (
                [b""],
                [b"", b"123"],
                [b"x", b"", b"12345678"],
                [b"", b"9" * 9],
                [b"1"],
            ):
                dealer.send_multipart(frames)
            dealer.send_multipart([(7).to_bytes(8, "big")])  # without the empty frame: answered so
            assert dealer.poll(10_000)
            assert dealer.recv_multipart()[:2] == [b"", (-1).to_bytes(8, "big", signed=True)]
        assert publisher.stats()["refused_replays"] == 5
        follower.store(tokens(1))
        publisher.flush()
        with subscribed(publisher) as subscriber:
            read_up_to(subscriber, 0)


def test_messages_that_are_none_are_counted(follower):
    with zmq.Context() as context, context.socket(zmq.PUB) as peer:
        peer.linger = 0
        port = peer.bind_to_random_port("tcp://127.0.0.1")
        with EventSubscriber(f"tcp://127.0.0.1:{port}") as subscriber:
            give_up = time.monotonic() + PATIENCE_S
            while subscriber.stats()["bad_messages"] < 3:
                assert time.monotonic() < give_up
                for frames in ([b"", b"short", b"x"], [b"only"], [b"", bytes(8), b"\xc1"]):
                    peer.send_multipart(frames)
                assert subscriber.read(0.05) is None
    subscriber.close()
    with pytest.raises(KVCacheStateError, match="closed"):
        subscriber.read(0)


def test_an_adapter_that_is_no_name_ends_the_stream_and_is_told(follower):
    with publish(follower, lora_name=lambda key: 7) as publisher:
        publisher.flush()
        with pytest.raises(TypeError, match="lora_name must give a str or None, got int"):
            follower.store(tokens(1), "tenant")
        assert publisher.stats()["failed"] == 1
