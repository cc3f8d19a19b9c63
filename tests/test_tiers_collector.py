"""A caller's clean-up that the collector runs in a thread of the tiers: it hangs nothing."""

import contextlib
import gc
import os
import signal
import threading
import time
from functools import partial

import pytest

from kvpool import KVCacheError
from tests.helpers.pools import R
from tests.helpers.tiers import (
    Gated,
    MemoryTier,
    all_given_back,
    attach,
    fill_tiers,
    matches,
    opened,
    serve_prints,
    tier_pool,
)

PROMPT = R(1, 41)
THREADS = ("kvpool-prefetch", "kvpool-write-back", "kvpool-upper", "kvpool-follower")
CLEAN_UPS = {
    "close": lambda pool, prefetches: pool.close(),
    "cancel": lambda pool, prefetches: prefetches[-1].cancel(),
    "close of the tiers": lambda pool, prefetches: pool.tiers and pool.tiers.close(),
    "stats": lambda pool, prefetches: pool.tiers and pool.tiers.stats_by_tier(),
}
SLOW = ("close of the tiers", "stats")


@contextlib.contextmanager
def in_a_thread(name, number, clean_up):
    """Run `clean_up` at this collection in the thread of this name; what it raised."""
    seen, raised = [], []

    def look(phase, _):
        if phase == "start" and threading.current_thread().name == name:
            seen.append(phase)
            if len(seen) == number:
                try:
                    clean_up()
                except BaseException as error:  # the collector would only print it
                    raised.append(error)

    thresholds = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.callbacks.append(look)
    gc.set_threshold(1, 1000, 1000)
    try:
        yield raised
    finally:
        gc.set_threshold(*thresholds)
        gc.callbacks.remove(look)
        gc.unfreeze()


@pytest.mark.parametrize(
    "clean_up",
    ["close", "cancel", *(pytest.param(each, marks=pytest.mark.slow) for each in SLOW)],
)
@pytest.mark.parametrize("name", THREADS)
def test_a_clean_up_in_a_thread_of_the_tiers(make_pool, name, clean_up):
    lower = MemoryTier("lower")
    fill_tiers(make_pool, [PROMPT], lower)
    for number in (1, 14, 40):
        pool = tier_pool(make_pool)
        tiers = attach(pool, MemoryTier("upper"), lower, timeout_s=1.0)
        prefetches = [pool.prefetch(PROMPT[:1])]
        with in_a_thread(name, number, partial(CLEAN_UPS[clean_up], pool, prefetches)) as raised:
            # It holds the gate of a pool as any thread does.
            with contextlib.suppress(KVCacheError):
                serve_prints(pool, R(200, 220))
                prefetches.append(pool.prefetch(PROMPT, publish=False))
            prefetches[-1].wait(20)
        assert [each for each in raised if not isinstance(each, KVCacheError)] == []
        give_up = time.monotonic() + 20
        while not pool.closed:
            assert time.monotonic() < give_up
            with contextlib.suppress(KVCacheError):  # while the clean-up is in a call
                prefetches[-1].cancel()
                pool.poll_tiers()
                pool.unbind_requests()
                all_given_back(pool)
                pool.close()
        for thread in (tiers._flow.fetcher._thread, tiers._flow._writer._thread):
            thread.join(20)
            assert not thread.is_alive()


def test_a_cancel_in_the_middle_of_a_copy_gives_pages_back_after_it(make_pool):
    tier = MemoryTier()
    fill_tiers(make_pool, [PROMPT], tier)
    pool = tier_pool(make_pool)
    tiers = attach(pool, tier, write="none")
    copies, prefetch = tiers._flow.fetcher._copies, []
    write, go_on = copies.write, threading.Event()

    def cancel_and_write(page_ids, kv, mark):
        go_on.wait(20)
        prefetch[0].cancel()
        assert pool.stats()["pages_fetching"] == 10, "somebody else would get what is written to"
        write(page_ids, kv, mark)

    copies.write = cancel_and_write
    prefetch.append(pool.prefetch(PROMPT, publish=False))
    go_on.set()
    prefetch[0].wait(20)
    assert tiers.stats()["failed_fetches"] == 0
    pool.poll_tiers()
    all_given_back(pool)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_fork_in_the_middle_of_a_copy_hangs_nothing(make_pool):
    tier = Gated()
    fill_tiers(make_pool, [PROMPT], tier)
    pool = tier_pool(make_pool, 16)
    with opened(tier):
        attach(pool, tier, write="none", max_fetching_pages=16)
        prefetch = pool.prefetch(PROMPT, publish=False)
        assert tier.entered.acquire(timeout=20)
        held, go_on = threading.Event(), threading.Event()

        def hold():
            with prefetch._fetch._changed:
                held.set()
                go_on.wait(20)

        thread = threading.Thread(target=hold)
        thread.start()
        assert held.wait(20)
        child = os.fork()
        if child == 0:
            code = 1
            try:
                signal.alarm(20)
                assert prefetch.wait() == 0
                pool.unbind_request(pool.bind_request(R(100, 163), 64))
                prefetch.cancel()
                all_given_back(pool)
                assert matches(pool, PROMPT) == 0
                pool.close()
                code = 0
            finally:
                os._exit(code)
        go_on.set()
        thread.join(20)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0
