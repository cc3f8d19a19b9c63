"""A call that is short of pages gets those that prefetches hold."""

import threading
import time

import pytest

from tests.helpers.pools import R
from tests.helpers.tiers import (
    PROMPT,
    attach,
    expected_prints,
    read_prints,
    serve_prints,
    tier_pool,
)


def test_a_bind_that_is_short_ends_the_youngest_prefetches(make_pool, gated):
    pool = tier_pool(make_pool, 32)
    attached = attach(pool, gated, max_fetching_pages=32)
    first, second = pool.prefetch(PROMPT), pool.prefetch(R(101, 141))
    assert pool.free_pages == 12
    assert pool.would_fit(R(201, 210), 20 * 4)
    request = pool.bind_request(R(201, 210), 20 * 4)
    assert (first.done, second.done) == (False, True)
    assert attached.stats()["prefetch_gave_way"] == 1
    pool.extend_request(request, 23 * 4)
    assert first.done
    assert attached.stats()["prefetch_gave_way"] == 2
    assert pool.stats()["bind_failures"] == 0
    gated.open()


def test_a_call_that_cannot_be_helped_ends_none(make_pool, gated):
    pool = tier_pool(make_pool, 32)
    attach(pool, gated, max_fetching_pages=32)
    pool.bind_request([7], 16 * 4)
    prefetch = pool.prefetch(PROMPT)
    assert not pool.would_fit(R(201, 210), 17 * 4)
    for call in (
        lambda: pool.bind_request(R(201, 210), 17 * 4),
        lambda: pool.alloc(17 * 4),
        lambda: pool.extend_request(1, 33 * 4),
        lambda: pool.fork_request(1, 17 * 4),
    ):
        with pytest.raises(RuntimeError, match="pages"):
            call()
    assert not prefetch.done
    assert pool.stats()["pages_fetching"] == 10
    gated.open()


def test_what_prefetches_lock_counts_as_room_too(make_pool, gated):
    pool = tier_pool(make_pool, 32)
    attach(pool, gated, max_fetching_pages=32)
    serve_prints(pool, PROMPT[:20])
    serve_prints(pool, [*PROMPT[:8], *R(61, 68)])
    prefetches = [pool.prefetch(PROMPT), pool.prefetch([*PROMPT[:8], *R(61, 80)])]
    assert pool.radix.protected_size == 28
    everything = pool.num_slots
    assert not pool.would_fit([1], everything + 1)
    assert pool.would_fit([99], everything)
    # It would match three pages, the others go.
    assert pool.would_fit(PROMPT[:13], everything)
    pool.bind_request(PROMPT[:13], everything)
    assert all(prefetch.done for prefetch in prefetches)
    gated.open()


@pytest.mark.parametrize("call", ["alloc", "fork", "exclusive", "blank"])
def test_other_calls_that_need_pages_get_them_too(make_pool, gated, call):
    pool = tier_pool(make_pool, 32)
    attach(pool, gated, max_fetching_pages=32)
    request = pool.bind_request([7], 4 * 20)
    prefetch = pool.prefetch(PROMPT)
    assert pool.free_pages == 2
    if call == "alloc":
        pool.free(pool.alloc(12 * 4))
    elif call == "fork":
        pool.fork_request(request, 12 * 4)
    elif call == "exclusive":
        pool.bind_with_prefix([8], 32 * 4)
        assert pool.request_capacity == 32 * 4
    else:
        pool.bind_requests(2, 16 * 4)
        assert pool.request_capacity == 16 * 4
    assert prefetch.done
    pool.check()
    gated.open()


def test_what_has_arrived_is_not_lost_by_giving_way(make_pool, tier):
    pool = tier_pool(make_pool, 32)
    attach(pool, tier, max_fetching_pages=32)
    prefetch = pool.prefetch(PROMPT)
    prefetch.wait(20)
    request = pool.bind_request(PROMPT, 4 * 32)
    assert pool.matched_prefix_len(request) == 40
    pool.mark_written(request, 40)
    assert (read_prints(pool, request, 40) == expected_prints(PROMPT)[:, :40]).all()


def test_a_prefetch_that_holds_only_a_lock_gives_way_too(make_pool, tier):
    pool = tier_pool(make_pool, 16)
    tiers = attach(pool, tier, write="none", max_fetching_pages=16)
    read, go_on = tiers._flow.stack.read, threading.Event()

    def linger(*arguments):
        found = read(*arguments)
        go_on.wait(20)
        return found

    tiers._flow.stack.read = linger
    prefetch = pool.prefetch(PROMPT)
    while prefetch.found_len < 40:
        time.sleep(0.001)
    pool.poll_tiers()
    assert (pool.stats()["pages_fetching"], pool.radix.protected_size) == (0, 40)
    assert pool.would_fit(R(100, 163), 64)
    pool.bind_request(R(100, 163), 64)
    go_on.set()
