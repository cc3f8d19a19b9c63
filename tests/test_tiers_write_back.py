"""Write-back: which pages get to the tiers, under both policies, and what is counted if not."""

import numpy as np

from tests.helpers.pools import R
from tests.helpers.tiers import (
    Faulty,
    Gated,
    MemoryTier,
    attach,
    fill_tiers,
    matches,
    opened,
    serve_prints,
    tier_pool,
)

PROMPT = R(1, 41)


def brings_back(make_pool, prompt, *tiers):
    """Tokens of `prompt` that a new pool gets from the tiers, every row looked at."""
    pool = tier_pool(make_pool)
    attach(pool, *tiers, write="none")
    pool.prefetch([*prompt, 0]).wait(20)
    return matches(pool, [*prompt, 0])


# ---- on insert


def test_pages_are_written_once_they_come_to_the_tree(make_pool):
    first, second = Faulty("first"), Faulty("second")
    pool = tier_pool(make_pool)
    attached = attach(pool, first, second)
    serve_prints(pool, PROMPT)
    assert attached.flush(20)
    assert len(first.records) == len(second.records) == 10
    assert attached.stats()["write_pages"] == 10
    for tier in (first, second):
        assert brings_back(make_pool, PROMPT, tier) == 40


def test_what_was_cached_before_is_written_too(make_pool):
    pool, tier = tier_pool(make_pool), MemoryTier()
    serve_prints(pool, PROMPT)
    assert attach(pool, tier).flush(20)
    assert len(tier.records) == 10


def test_a_page_that_is_there_is_not_written_again(make_pool):
    tier = Faulty("tier")
    fill_tiers(make_pool, [PROMPT], tier)
    tier.calls.clear()
    pool = tier_pool(make_pool)
    attached = attach(pool, tier)
    serve_prints(pool, PROMPT)
    assert attached.flush(20)
    assert {verb for verb, _ in tier.calls} == {"exists"}
    assert attached.stats()["write_known"] == 10
    tier.calls.clear()
    # Gone and come again: what the tier had when it was last heard of, it may not have any more.
    pool.free((pool.radix.evict(40)[:, None] * 4 + np.arange(4)).ravel())
    serve_prints(pool, PROMPT)
    assert attached.flush(20)
    assert tier.calls == [("exists", 10)]


def test_what_a_tier_let_go_of_is_written_when_it_comes_again(make_pool):
    tier = MemoryTier()
    pool = tier_pool(make_pool)
    attached = attach(pool, tier)
    serve_prints(pool, PROMPT)
    assert attached.flush(20)
    tier.remove(list(tier.records)[1:])
    pool.free((pool.radix.evict(40)[:, None] * 4 + np.arange(4)).ravel())
    # The first page is there, the second one is asked for and is not, the others nobody asks for.
    with pool.prefetch(PROMPT[:12]) as fetched:
        assert fetched.wait(20) == 4
    serve_prints(pool, PROMPT)
    assert attached.flush(20)
    assert len(tier.records) == 10


def test_a_flush_of_what_a_tier_has_already_is_done(make_pool):
    tier = MemoryTier()
    fill_tiers(make_pool, [PROMPT], tier)
    pool = tier_pool(make_pool)
    attached = attach(pool, tier, write="evict")
    serve_prints(pool, PROMPT)
    assert attached.flush(20)
    assert attached.stats()["write_known"] == 10


def test_what_a_prefetch_brought_is_not_written_back_where_it_came_from(make_pool):
    tier = Faulty("tier")
    fill_tiers(make_pool, [PROMPT], tier)
    tier.calls.clear()
    pool = tier_pool(make_pool)
    attached = attach(pool, tier)
    pool.prefetch(PROMPT).wait(20)
    pool.poll_tiers()
    assert attached.flush(20)
    assert {verb for verb, _ in tier.calls} == {"read"}


def test_a_full_queue_drops_the_oldest_and_counts(make_pool):
    tier = Gated(verbs=["exists"])
    with opened(tier):
        pool = tier_pool(make_pool, 128)
        attached = attach(pool, tier, queue_pages=5)
        serve_prints(pool, R(901, 905))
        pool._follower.drain()
        assert tier.entered.acquire(timeout=20), "the first page is on its way"
        for i in range(4):
            serve_prints(pool, R(100 * i, 100 * i + 9))
        pool._follower.drain()
        assert attached.stats()["write_dropped"] == 3
        tier.open()
        assert attached.flush(20)
    assert len(tier.records) == 6
    # Two pages a prompt: the latest five of eight are there, and a tail alone is of no use.
    assert [brings_back(make_pool, R(100 * i, 100 * i + 9), tier) for i in range(4)] == [
        0,
        0,
        8,
        8,
    ]


def test_a_page_that_is_evicted_before_its_copy_is_not_written(make_pool):
    tier = Gated(verbs=["exists"])
    with opened(tier):
        pool = tier_pool(make_pool, 16)
        attached = attach(pool, tier)
        serve_prints(pool, PROMPT[:17])
        pool._follower.drain()
        assert tier.entered.acquire(timeout=20)
        # The same page ids, other content.
        request = pool.bind_request([9], 16 * 4)
        pool.unbind_request(request)
        serve_prints(pool, R(301, 364))
        tier.open()
        assert attached.flush(20)
        stats = attached.stats()
        assert stats["write_gone"] == 4
        assert stats["write_lost"] == 4
        assert stats["write_pages"] == 16
    assert brings_back(make_pool, PROMPT[:16], tier) == 0
    assert brings_back(make_pool, R(301, 364), tier) == 64


def test_a_page_that_is_evicted_during_its_copy_is_not_written(make_pool, monkeypatch):
    from kvpool.tiers.copies import PageCopies

    tier, pool, copied = MemoryTier(), tier_pool(make_pool, 16), []
    read = PageCopies.read

    def reads_while_pages_go(self, page_ids, kv, mark=None):
        read(self, page_ids[: len(page_ids) // 2], kv[: len(page_ids) // 2], mark)
        if not copied:
            evicted = pool.radix.evict(8)
            pool.free((evicted[:, None] * 4 + np.arange(4)).ravel())
            pool.key_cache[...] = pool.value_cache[...] = 77.0
        copied.append(len(page_ids))
        read(self, page_ids, kv, mark)

    serve_prints(pool, PROMPT[:17])
    before = pool.key_cache.copy(), pool.value_cache.copy()
    monkeypatch.setattr(PageCopies, "read", reads_while_pages_go)
    attached = attach(pool, tier)
    assert attached.flush(20)
    pool.key_cache[...], pool.value_cache[...] = before
    assert copied == [4]
    assert attached.stats()["write_gone"] == 2
    assert len(tier.records) == 2, (
        "two stayed, and got what was there; nobody wrote to them but us"
    )
    pool.close()


def test_after_a_reset_nothing_is_written_until_resumed(make_pool):
    tier, pool = MemoryTier(), tier_pool(make_pool)
    attached = attach(pool, tier)
    pool.reset_prefix_cache()
    serve_prints(pool, PROMPT)
    assert attached.flush(20)
    assert not tier.records, "these may be new weights, and the keys name the old ones"
    assert attached.stats()["write_stale"] == 10
    attached.resume()
    pool.prefetch(PROMPT)
    serve_prints(pool, [5, *PROMPT])
    assert attached.flush(20)
    assert len(tier.records) == 10


def test_a_tier_that_is_full_or_dead_costs_only_its_own(make_pool):
    full, dead, good = MemoryTier("full", max_records=3), Faulty("dead", "raises"), MemoryTier()
    pool = tier_pool(make_pool)
    attached = attach(pool, full, dead, good)
    serve_prints(pool, PROMPT)
    assert attached.flush(20)
    assert (len(full.records), len(good.records)) == (3, 10)
    by_tier = attached.stats_by_tier()
    assert by_tier["full"]["unwritten_pages"] == 7
    assert by_tier["dead"]["failures"] >= 1
    assert attached.last_errors == {
        "full": "",
        "dead": "exists: OSError: no route",
        "memory": "",
    }
    assert by_tier["memory"]["records"] == 10


def test_a_flush_says_what_was_not_done_in_time(make_pool):
    tier = Gated(verbs=["write"])
    with opened(tier):
        pool = tier_pool(make_pool)
        attached = attach(pool, tier, timeout_s=3600.0)
        serve_prints(pool, PROMPT)
        assert not attached.flush(0.01)
        tier.open()
        assert attached.flush(20)


# ---- ahead of eviction


def test_with_room_left_nothing_is_written(make_pool):
    tier, pool = Faulty("tier"), tier_pool(make_pool)
    attach(pool, tier, write="evict")
    serve_prints(pool, PROMPT)
    pool._follower.drain()
    assert tier.calls == []


def test_where_pages_get_short_the_next_victims_are_written(make_pool):
    tier, pool = MemoryTier(), tier_pool(make_pool, 16)
    attached = attach(pool, tier, write="evict", low_pages=6, max_fetching_pages=16)
    serve_prints(pool, R(1, 24))
    serve_prints(pool, R(101, 120))
    # Five pages are free: the six that would go next are the tail of the first prompt.
    pool._follower.drain()
    attached._flow._queue.wait_until_idle(20)
    assert len(tier.records) == 6
    assert attached.stats()["write_pages"] == 6
    assert brings_back(make_pool, R(1, 24), tier) == 24
    assert brings_back(make_pool, R(101, 120), tier) == 0
    # What goes now was saved.
    serve_prints(pool, R(201, 244))
    pool._follower.drain()
    assert attached.stats()["write_lost"] == 0
    pool.prefetch([*R(1, 24), 7]).wait(20)
    assert matches(pool, [*R(1, 24), 7]) == 24


def test_flush_by_eviction_writes_all_that_could_go(make_pool):
    tier, pool = MemoryTier(), tier_pool(make_pool)
    attached = attach(pool, tier, write="evict", queue_pages=3)
    serve_prints(pool, PROMPT)
    request = pool.bind_request(PROMPT[:9], 9)  # holds two of them
    assert attached.flush(20)
    assert len(tier.records) == 8
    pool.unbind_request(request)
    assert attached.flush(20)
    assert len(tier.records) == 10


def test_flush_by_eviction_ends_where_no_tier_takes_anything(make_pool):
    pool = tier_pool(make_pool)
    attached = attach(pool, Faulty("dead", "raises"), write="evict", retry_s=3600.0)
    serve_prints(pool, PROMPT)
    attached.flush(20)
    assert attached.stats_by_tier()["dead"]["written_pages"] == 0


def test_policy_none_only_reads(make_pool):
    tier = Faulty("tier")
    pool = tier_pool(make_pool)
    attached = attach(pool, tier, write="none")
    serve_prints(pool, PROMPT)
    assert attached.flush()
    assert tier.calls == []
