"""Those who follow a tree and fail, in a subscriber, a thread or a fork; and the end of it."""

import gc
import logging
import os
import threading
import time

import numpy as np
import pytest

from kvpool import KVCachePool
from kvpool.page_keys import PageKeys
from kvpool_ext.listing import take_changes
from tests.helpers.following import Heard, follower_of, keys_of
from tests.helpers.pools import R, cache_prompt, case_pool
from tests.oracles.following import ToldTwin


@pytest.fixture
def pool(make_pool):
    return case_pool(make_pool, 4, 16)


@pytest.fixture
def follower(pool):
    follower = follower_of(pool)
    yield follower
    follower.close()


def wait_until(condition):
    """Time enough on a machine with much else to do."""
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end, "waited for 30 s"
        time.sleep(0.001)


# ---- subscribers that fail, or call back


@pytest.mark.parametrize("verb", ["on_stored", "on_removed", "on_cleared", "on_caught_up"])
def test_subscriber_that_raises_is_logged_and_told_nothing_more(pool, follower, verb, caplog):
    bad, good = Heard(), ToldTwin(keys_of(pool))
    calls = []

    def fail(*_):
        calls.append(verb)
        raise LookupError("it broke")

    setattr(bad, verb, fail)
    follower.subscribe(bad)
    follower.subscribe(good)
    with caplog.at_level(logging.ERROR, "kvpool.following"):
        for _ in range(2):
            cache_prompt(pool, R(1, 8))
            follower.drain()
            pool.radix.evict(4)
            follower.drain()
            pool.reset_prefix_cache()
            follower.drain()
            good.compare(pool, follower)
    assert calls == [verb]
    assert verb in caplog.text
    assert "it broke" in caplog.text
    assert follower.stats()["dropped_subscribers"] == 1


def test_interrupt_while_telling_is_raised_and_the_next_drain_tells_all(pool, follower):
    told = ToldTwin(keys_of(pool))
    follower.subscribe(told)
    heard = Heard()
    follower.subscribe(heard)
    follower.drain()

    def interrupt(_run):
        del heard.on_stored
        raise KeyboardInterrupt

    heard.on_stored = interrupt
    cache_prompt(pool, R(1, 8))
    with pytest.raises(KeyboardInterrupt):
        follower.drain()
    heard.take()
    follower.drain()
    told.compare(pool, follower)
    assert heard.take() == [("cleared",), ("stored", [0, 1], None), ("caught up",)]


def test_subscriber_may_describe_and_leave_but_not_drain(pool, follower):
    heard = Heard()
    found = []

    def on_stored(run):
        found.append(follower.describe(run.page_ids)[0] == run.keys)
        try:
            follower.drain()
        except RuntimeError as error:
            found.append(str(error))
        follower.subscribe(heard)
        leave()

    eager = Heard()
    eager.on_stored = on_stored
    leave = follower.subscribe(eager)
    cache_prompt(pool, R(1, 8))
    follower.drain()
    assert found[0] is True
    assert "called by a subscriber" in found[1]
    assert (eager.lines, heard.lines) == ([], [])
    follower.drain()
    assert heard.take() == [("stored", [0, 1], None), ("caught up",)]
    assert len(found) == 2


# ---- the thread


def test_thread_tells_by_itself(pool, follower):
    told = ToldTwin(keys_of(pool))
    follower.subscribe(told)
    follower.start()
    thread = follower._thread
    follower.start()
    assert follower._thread is thread
    for first in (1, 11, 21):
        cache_prompt(pool, R(first, first + 7))
        wait_until(lambda: len(told.pages) * 4 == pool.radix.total_size and not told.is_behind)
    follower.drain()
    told.compare(pool, follower)
    assert follower._thread in threading.enumerate()
    follower.close()
    assert follower._thread not in threading.enumerate()


def test_thread_outlives_a_drain_that_fails(pool, follower, monkeypatch, caplog):
    told = ToldTwin(keys_of(pool))
    follower.subscribe(told)
    follower.drain()
    below, failed = PageKeys.below, threading.Event()

    def fail_once(*arguments, **more):
        if not failed.is_set():
            failed.set()
            raise MemoryError("none left")
        return below(*arguments, **more)

    monkeypatch.setattr(PageKeys, "below", fail_once)
    with caplog.at_level(logging.ERROR, "kvpool.following"):
        follower.start()
        cache_prompt(pool, R(1, 8))
        wait_until(lambda: len(told.pages) == 2)
    assert "told anew" in caplog.text
    assert follower.stats()["failed_drains"] == 1


def test_thread_ends_with_a_pool_that_nobody_has_any_more():
    pool = KVCachePool(1, 16, 1, 4, page_size=4)
    follower = pool._follow(None, None)
    thread = follower._thread
    assert thread.is_alive()
    del pool, follower
    gc.collect()
    thread.join(30)
    assert not thread.is_alive()


def test_close_does_not_wait_for_ever_for_a_subscriber_that_hangs(pool, follower, caplog):
    inside, go_on = threading.Event(), threading.Event()
    heard = Heard()

    def hang(_run):
        inside.set()
        go_on.wait(30)

    heard.on_stored = hang
    follower.subscribe(heard)
    cache_prompt(pool, R(1, 4))
    follower.start()
    assert inside.wait(30)
    follower.subscribe(Heard())  # does not wait for it either
    with caplog.at_level(logging.WARNING, "kvpool.following"):
        follower.close(timeout_s=0.05)
    assert "has not returned" in caplog.text
    go_on.set()
    follower._thread.join(30)
    assert not follower._thread.is_alive()


# ---- the end


def test_closed_follower_says_so_and_costs_the_tree_nothing(pool, follower):
    cache_prompt(pool, R(1, 8))
    follower.drain()
    follower.close()
    follower.close()
    assert pool.radix.journal is None
    for call in (follower.drain, follower.start, lambda: follower.subscribe(Heard())):
        with pytest.raises(RuntimeError, match="the follower of the tree is closed"):
            call()
    pages = np.array([0, 1], np.int32)
    assert not follower.still_cached(pages, np.zeros(2, np.uint32)).any()
    with pytest.raises(RuntimeError, match="not followed any more"):
        take_changes(pool.radix)
    again = follower_of(pool)
    told = ToldTwin(keys_of(pool))
    again.subscribe(told)
    again.drain()
    told.compare(pool, again)
    again.close()


def test_follower_that_nobody_has_any_more_leaves_the_tree(pool):
    follower = follower_of(pool)
    assert pool.radix.journal is not None
    del follower
    assert pool.radix.journal is None


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_forked_child_is_told_that_it_has_no_thread(pool, follower):
    heard = Heard()
    leave = follower.subscribe(heard)
    follower.start()
    reading, writing = os.pipe()
    with follower._lock:  # as if the thread were at work
        child = os.fork()
        if child == 0:
            words = []
            for call in (follower.drain, lambda: follower.describe(np.zeros(1, np.int32))):
                try:
                    call()
                except RuntimeError as error:
                    words.append(str(error))
            leave()
            follower.close()
            cache_prompt(pool, R(1, 4))
            os.write(writing, "\n".join(words).encode())
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        text = pipe.read()
    assert os.waitpid(child, 0)[1] == 0
    assert text.count("this is its fork") == 2
    cache_prompt(pool, R(1, 4))
    follower.drain()
