"""How a prefetch ends: cancelled, dropped, by a reset or a close, and all comes back."""

import gc
import threading

import numpy as np
import pytest

from kvpool import KVCachePool, KVCacheStateError
from tests.helpers.tiers import (
    PROMPT,
    all_given_back,
    attach,
    matches,
    serve_prints,
    tier_pool,
)


@pytest.mark.parametrize("publish", [True, False])
@pytest.mark.parametrize("chunks", range(6))
def test_cancelled_at_any_point_everything_comes_back(make_pool, gated, chunks, publish):
    pool = tier_pool(make_pool)
    record_bytes = len(next(iter(gated.records.values())))
    attach(pool, gated, staging_bytes=4 * 2 * record_bytes)
    serve_prints(pool, PROMPT[:4])
    prefetch = pool.prefetch(PROMPT, publish=publish)
    for _ in range(chunks):
        gated.permits.release()
        assert gated.entered.acquire(timeout=20)
    if chunks % 2:
        pool.poll_tiers()
    prefetch.cancel()
    prefetch.cancel()
    assert prefetch.done
    all_given_back(pool)
    gated.open()
    pool.poll_tiers()
    assert matches(pool, PROMPT) >= 4
    all_given_back(pool)


def test_a_context_publishes_what_has_arrived(make_pool, tier):
    pool = tier_pool(make_pool)
    attach(pool, tier)
    with pool.prefetch(PROMPT) as prefetch:
        prefetch.wait(20)
    assert pool.radix.total_size == 40
    all_given_back(pool)


def test_a_context_that_fails_gives_everything_back(make_pool, tier):
    pool = tier_pool(make_pool)
    attach(pool, tier)
    prefetch = pool.prefetch(PROMPT)
    prefetch.wait(20)
    with pytest.raises(KeyError), prefetch:
        raise KeyError
    all_given_back(pool)
    assert pool.radix.total_size == 0


def test_a_context_without_publish_gives_everything_back(make_pool, tier):
    pool = tier_pool(make_pool)
    attach(pool, tier)
    with pool.prefetch(PROMPT, publish=False) as prefetch:
        prefetch.wait(20)
    all_given_back(pool)
    assert pool.radix.total_size == 0


def test_one_that_is_dropped_without_a_word_comes_back_with_the_next_call(make_pool, tier):
    pool = tier_pool(make_pool)
    attach(pool, tier)
    held = [pool.prefetch(PROMPT, publish=False)]
    held[0].wait(20)
    # The last reference goes in another thread, while this one is inside of the gate or not.
    thread = threading.Thread(target=held.clear)
    thread.start()
    thread.join(20)
    gc.collect()
    assert pool.stats()["pages_fetching"] == 10
    pool.poll_tiers()
    all_given_back(pool)


def test_one_that_publishes_by_itself_may_be_dropped(make_pool, gated):
    pool = tier_pool(make_pool)
    attach(pool, gated)
    pool.prefetch(PROMPT)
    gc.collect()
    assert pool.stats()["pages_fetching"] == 10
    gated.open()
    pool.prefetch(PROMPT[:1])
    while pool.stats()["pages_fetching"]:
        pool.poll_tiers()
    assert matches(pool, PROMPT) == 40
    all_given_back(pool)


@pytest.mark.parametrize("how", ["pool", "radix"])
@pytest.mark.parametrize("publish", [True, False])
def test_nothing_old_comes_after_a_reset(make_pool, gated, how, publish):
    pool = tier_pool(make_pool)
    attached = attach(pool, gated)
    serve_prints(pool, PROMPT[:8])
    prefetch = pool.prefetch(PROMPT, publish=publish)
    if how == "pool":
        pool.reset_prefix_cache()
    else:
        pages = pool.radix.reset()
        pool.free((pages[:, None] * 4 + np.arange(4)).ravel())
    pool.check()
    gated.open()
    prefetch.wait(20)
    pool.poll_tiers()
    if not publish:
        assert prefetch.publish() == 0
    assert matches(pool, PROMPT) == 0
    all_given_back(pool)
    assert pool.free_pages == pool.num_pages
    # The weights may be new ones, and the keys name the old ones.
    assert attached.is_halted
    again = pool.prefetch(PROMPT)
    assert (again.done, again.found_len) == (True, 0)
    attached.resume()
    assert pool.prefetch(PROMPT).wait(20) == 40


def test_close_ends_everything_while_a_tier_hangs(make_pool, gated):
    pool = tier_pool(make_pool)
    attach(pool, gated, timeout_s=3600.0)
    prefetch = pool.prefetch(PROMPT)
    assert gated.entered.acquire(timeout=20)
    pool.close()
    assert prefetch.wait(20) == 0
    prefetch.cancel()
    assert prefetch.publish() == 0
    with pytest.raises(KVCacheStateError, match="closed"):
        pool.prefetch(PROMPT)


def test_tiers_can_be_closed_and_attached_again(make_pool, gated):
    pool = tier_pool(make_pool)
    attached = attach(pool, gated, timeout_s=3600.0)
    with pytest.raises(KVCacheStateError, match="close them first"):
        attach(pool, gated)
    prefetch = pool.prefetch(PROMPT)
    assert gated.entered.acquire(timeout=20)
    attached.close(0.1)
    attached.close()
    assert (pool.tiers, attached.closed, prefetch.done) == (None, True, True)
    all_given_back(pool)
    gated.open()
    attach(pool, gated)
    assert pool.prefetch(PROMPT).wait(20) == 40
    assert matches(pool, PROMPT) == 40


def test_another_model_can_be_attached_after_a_reset(make_pool, tier):
    pool = tier_pool(make_pool)
    attach(pool, tier)
    pool.reset_prefix_cache()
    pool.tiers.close()
    attach(pool, tier, model="weights-2")
    assert pool.prefetch(PROMPT).wait(20) == 0
    serve_prints(pool, PROMPT)
    assert pool.tiers.flush(20)
    assert len(tier.records) == 20


def test_a_pool_that_is_dropped_ends_its_threads(tier):
    def threads():
        return {thread for thread in threading.enumerate() if thread.name.startswith("kvpool-")}

    before = threads()
    pool = KVCachePool(2, 128, 1, 4, page_size=4)
    attach(pool, tier)
    assert len(threads() - before) >= 3
    del pool
    gc.collect()
    others = [thread for thread in threads() - before if thread.name != "kvpool-follower"]
    for thread in others:
        thread.join(20)
    gc.collect()  # what was only theirs
    for thread in threads() - before:
        thread.join(20)
        assert not thread.is_alive()
