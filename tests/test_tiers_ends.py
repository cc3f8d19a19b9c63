"""What tiers leave behind when they end, or cannot begin: no thread and no memory."""

import gc
import threading
import weakref

import pytest

from tests.helpers.tiers import MODEL, MemoryTier, tier_pool


def test_staging_memory_goes_with_its_tiers_and_not_with_the_collector(make_pool):
    pool = tier_pool(make_pool)
    gc.disable()
    try:
        tiers = pool.attach_tiers([MemoryTier()], model=MODEL)
        memory = weakref.ref(tiers._flow.stack.arena.memory.base)
        tiers.close()
        pool.close()
        del tiers, pool
        make_pool.pools.clear()
        assert memory() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("number", range(1, 6))
def test_a_thread_that_cannot_be_started_takes_the_others_along(make_pool, monkeypatch, number):
    """One of: the follower's, the lanes of two tiers, prefetch, write-back."""
    before = set(threading.enumerate())
    pool = tier_pool(make_pool)
    start, started = threading.Thread.start, []

    def fail_in_time(thread):
        started.append(thread)
        if len(started) == number:
            raise RuntimeError("can't start new thread")
        start(thread)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", fail_in_time)
        with pytest.raises(RuntimeError, match="can't start"):
            pool.attach_tiers([MemoryTier("a"), MemoryTier("b")], model=MODEL)
    assert pool.tiers is None
    tiers = pool.attach_tiers([MemoryTier("a"), MemoryTier("b")], model=MODEL)
    assert pool.prefetch([1, 2, 3]).wait(20) == 0
    assert tiers.flush(20)
    pool.close()
    for thread in set(threading.enumerate()) - before:
        thread.join(20)
        assert not thread.is_alive(), thread.name
