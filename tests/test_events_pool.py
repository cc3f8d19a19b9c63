"""What the life of a pool does to its streams: more of them, its end, an exit, a fork."""

import gc
import os
import subprocess
import sys
import textwrap
import time

import pytest

pytest.importorskip("zmq")
pytest.importorskip("msgspec")

from kvpool import KVCachePool, KVCacheStateError
from kvpool.events import CacheView
from tests.helpers.events import LOOPBACK, hear, read_up_to, subscribed
from tests.helpers.pools import R, case_pool, serve

PAGE = 4


def publish(pool, **options):
    return pool.publish_events(LOOPBACK, replay_endpoint=LOOPBACK, **options)


def test_equal_pools_publish_equal_hashes_and_other_models_others(make_pool):
    views = []
    for model in ("m", "m", "n"):
        pool = case_pool(make_pool, PAGE, 8)
        serve(pool, R(1, 8))
        publisher = publish(pool, model=model)
        view = CacheView()
        with subscribed(publisher) as subscriber:
            publisher.flush()
            read_up_to(subscriber, 0, view)
        views.append(set(view))
    assert views[0] == views[1]
    assert len(views[0]) == 2
    assert not views[0] & views[2]


def test_two_streams_of_one_pool(make_pool):
    pool = case_pool(make_pool, PAGE, 8)
    streams = [publish(pool, hash_as=hash_as) for hash_as in ("bytes", "int")]
    serve(pool, R(1, 8))
    for publisher, kind in zip(streams, (bytes, int), strict=True):
        view = CacheView()
        with subscribed(publisher) as subscriber:
            publisher.flush()
            read_up_to(subscriber, publisher.stats()["batches"] - 1, view)
        assert [*map(type, view)] == [kind] * 2


def test_closing_the_pool_clears_and_closes_its_streams(make_pool):
    pool = case_pool(make_pool, PAGE, 8)
    publisher = publish(pool)
    view = CacheView()
    serve(pool, R(1, 8))
    with subscribed(publisher, replay_endpoint=None) as subscriber:
        hear(publisher, subscriber, view)
        assert len(view) == 2
        pool.close()
        assert publisher.closed
        read_up_to(subscriber, publisher.stats()["batches"] - 1, view)
        assert len(view) == 0
    pool.close()
    publisher.close()
    with pytest.raises(KVCacheStateError, match="closed"):
        publisher.announce()
    with pytest.raises(KVCacheStateError, match="closed"):
        publisher.flush()
    with pytest.raises(KVCacheStateError, match="closed"):
        pool.publish_events(LOOPBACK)


def test_a_refused_stream_leaves_no_follower_and_no_port(make_pool):
    pool, other = (case_pool(make_pool, PAGE, 8) for _ in range(2))
    taken = publish(other)
    with pytest.raises(OSError, match="is in use"):
        pool.publish_events(taken.endpoint)
    with pytest.raises(OSError, match=r"replay_endpoint tcp://127.0.0.1.*is in use"):
        pool.publish_events(LOOPBACK, replay_endpoint=taken.replay_endpoint)
    # The port of the stream that got its first socket only is free again.
    free = taken.endpoint
    taken.close()
    with pool.publish_events(free) as publisher:
        assert publisher.endpoint == free


def test_a_stream_nobody_closes_holds_up_no_exit():
    code = """
        from kvpool import KVCachePool
        from kvpool.events import EventSubscriber
        pool = KVCachePool(1, 64, 1, 8, page_size=4)
        publisher = pool.publish_events("tcp://127.0.0.1:0", replay_endpoint="tcp://127.0.0.1:0")
        subscriber = EventSubscriber(publisher.endpoint, publisher.replay_endpoint)
        for i in range(50):
            request = pool.bind_request([i] * 9, 9)
            pool.mark_written(request, 9)
            pool.finish_request(request, [i] * 9)
        publisher.flush()
        print(subscriber.read(20).sequence)
    """
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=120
    )
    assert (run.returncode, run.stdout, run.stderr) == (0, "0\n", "")


def test_a_pool_that_is_dropped_ends_its_stream():
    pool = KVCachePool(1, 64, 1, 8, page_size=4)
    publisher = publish(pool)
    endpoint = publisher.endpoint
    del pool, publisher
    gc.collect()
    with KVCachePool(1, 64, 1, 8, page_size=4) as pool:
        for _ in range(200):
            try:
                pool.publish_events(endpoint)
                break
            except OSError:
                time.sleep(0.02)
        else:
            pytest.fail("the port is still bound")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_after_a_fork_the_child_is_silent_and_the_parent_goes_on(make_pool):
    pool = case_pool(make_pool, PAGE, 8)
    publisher = publish(pool)
    view = CacheView()
    with subscribed(publisher) as subscriber:
        serve(pool, R(1, 8))
        publisher.flush()
        child = os.fork()
        if child == 0:
            code = 1
            try:
                closed = publisher.closed
                with pytest.raises(KVCacheStateError, match="its fork"):
                    publisher.stats()
                publisher.close()
                pool.close()
                code = 0 if closed else 2
            finally:
                os._exit(code)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        serve(pool, R(11, 18))
        publisher.flush()
        read_up_to(subscriber, publisher.stats()["batches"] - 1, view)
        assert len(view) == 4


def test_events_off_load_nothing_and_follow_nothing(make_pool):
    code = "import sys, kvpool; kvpool.KVCachePool(1, 64, 1, 8); print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    loaded = set(run.stdout.split())
    assert run.returncode == 0, run.stderr
    assert not loaded & {"zmq", "msgspec", "kvpool.events"}
