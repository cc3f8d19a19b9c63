"""An interrupt at any moment of a call that moves pages of prefetches: nothing is lost by it."""

import contextlib
import gc
import threading
import time

import pytest

from kvpool.calm import undisturbed
from kvpool_ext.quiet import Quiet
from tests.helpers.interrupts import InterruptAt
from tests.helpers.pools import R
from tests.helpers.tiers import (
    MemoryTier,
    all_given_back,
    attach,
    fill_tiers,
    matches,
    serve_prints,
    tier_pool,
)

PROMPT = R(1, 25)  # six whole pages of four, and one token
NUM_PAGES = 12


@pytest.fixture
def tier(make_pool):
    made = MemoryTier()
    fill_tiers(make_pool, [PROMPT], made)
    return made


CALLS = {
    "prefetch": lambda pool, prefetch: pool.prefetch([7, *PROMPT], publish=False),
    "publish": lambda pool, prefetch: prefetch.publish(),
    "publish some": lambda pool, prefetch: prefetch.publish(3),
    "cancel": lambda pool, prefetch: prefetch.cancel(),
    "poll": lambda pool, prefetch: pool.poll_tiers(),
    "bind": lambda pool, prefetch: pool.bind_request(PROMPT, 25),
    "bind when short": lambda pool, prefetch: pool.bind_request(R(100, 147), 48),
    "bind_with_prefix": lambda pool, prefetch: pool.bind_with_prefix(R(100, 147), 48),
    "bind_requests": lambda pool, prefetch: pool.bind_requests(2, 24),
    "close": lambda pool, prefetch: pool.tiers.close(),
}


@pytest.mark.parametrize("publish", [True, False])
@pytest.mark.parametrize("call", CALLS)
def test_interrupted_anywhere_nothing_is_lost(make_pool, tier, call, publish):
    number, came = 0, True
    while came:
        number += 1
        pool = tier_pool(make_pool, NUM_PAGES)
        tiers = attach(pool, tier, max_fetching_pages=NUM_PAGES, write="none")
        serve_prints(pool, PROMPT[:8])
        prefetch = pool.prefetch(PROMPT, publish=publish)
        prefetch.wait(20)
        with InterruptAt(number) as interrupt, contextlib.suppress(KeyboardInterrupt):
            CALLS[call](pool, prefetch)
        came = interrupt.came
        assert gc.isenabled()
        pool.check()
        pool.unbind_requests()
        if call == "close":
            tiers.close()
            assert tiers.closed
            assert not tiers._flow.fetcher._thread.is_alive()
        del prefetch
        give_up = time.monotonic() + 20
        while pool.stats()["pages_fetching"] or pool.radix.protected_size:
            # It publishes by itself, and the background has to say that it is done.
            assert time.monotonic() < give_up
            pool.poll_tiers()
            time.sleep(0.0002)
        all_given_back(pool)
        matches(pool, PROMPT)
        pool.close()
    assert number > 3


def test_interrupted_in_a_verb_the_collector_is_on_again():
    @undisturbed
    def verb():
        assert not gc.isenabled()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as caught:
        verb()
    # The traceback, and with it the frames, is still there.
    assert caught.tb is not None
    assert gc.isenabled()


def test_two_threads_at_once_leave_the_collector_on():
    inside, go_on = threading.Event(), threading.Event()

    @undisturbed
    def verb():
        inside.set()
        go_on.wait(20)

    thread = threading.Thread(target=verb)
    thread.start()
    assert inside.wait(20)
    quiet = Quiet()
    go_on.set()
    thread.join(20)
    assert not gc.isenabled(), "the other one is not done"
    del quiet
    assert gc.isenabled()
