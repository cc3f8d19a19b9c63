"""Prefetch: what comes, what is under way, and what is published when."""

import numpy as np
import pytest

from kvpool.inspect import page_map
from tests.helpers.pools import R
from tests.helpers.tiers import (
    PROMPT,
    MemoryTier,
    all_given_back,
    attach,
    expected_prints,
    fill_tiers,
    matches,
    serve_prints,
    tier_pool,
)

# ---- what comes


def test_a_prompt_that_another_pool_wrote_is_matched(make_pool, tier):
    pool = tier_pool(make_pool)
    attach(pool, tier)
    prefetch = pool.prefetch(PROMPT)
    assert prefetch.local_len == 0
    assert prefetch.wait(20) == prefetch.found_len == 40
    assert prefetch.done
    found, matched = serve_prints(pool, PROMPT)
    assert matched == 40
    assert (found == expected_prints(PROMPT)).all()
    all_given_back(pool)


def test_at_most_all_but_one_token_come_as_a_bind_matches(make_pool, tier):
    pool = tier_pool(make_pool)
    attach(pool, tier)
    assert pool.prefetch(PROMPT[:40]).wait(20) == 36
    assert pool.prefetch(PROMPT[:1]).wait(20) == 0
    assert matches(pool, PROMPT) == 36


def test_only_what_the_tree_lacks_is_fetched(make_pool, tier):
    pool = tier_pool(make_pool)
    attached = attach(pool, tier, write="none")
    serve_prints(pool, PROMPT[:12])
    prefetch = pool.prefetch(PROMPT)
    assert prefetch.local_len == 12
    assert pool.stats()["pages_fetching"] == 7
    assert prefetch.wait(20) == 40
    assert attached.stats()["fetched_pages"] == 7
    assert matches(pool, PROMPT) == 40
    again = pool.prefetch(PROMPT)
    assert again.done
    assert (again.local_len, again.found_len) == (40, 40)
    all_given_back(pool)


def test_the_gap_ends_it(make_pool, tier):
    key = list(tier.records)[4]
    del tier.records[key]
    pool = tier_pool(make_pool)
    attach(pool, tier)
    assert pool.prefetch(PROMPT).wait(20) == 16
    assert pool.poll_tiers() == 16
    assert matches(pool, PROMPT) == 16
    all_given_back(pool)


def test_namespaces_and_models_are_apart(make_pool, tier):
    pool = tier_pool(make_pool)
    attach(pool, tier)
    assert pool.prefetch(PROMPT, "tenant").wait(20) == 0
    other = tier_pool(make_pool)
    attach(other, tier, model="weights-2")
    assert other.prefetch(PROMPT).wait(20) == 0
    fill_tiers(make_pool, [PROMPT], tier, extra_key="tenant")
    assert pool.prefetch(PROMPT, "tenant").wait(20) == 40
    assert matches(pool, PROMPT, "tenant") == 40
    assert matches(pool, PROMPT) == 0


def test_the_prompt_is_copied(make_pool, gated):
    pool = tier_pool(make_pool)
    attach(pool, gated)
    tokens = np.array(PROMPT, np.int32)
    prefetch = pool.prefetch(tokens)
    tokens[:] = 0
    gated.open()
    assert prefetch.wait(20) == 40
    assert matches(pool, PROMPT) == 40


def test_what_arrived_is_published_by_the_next_call_and_not_before(make_pool, tier):
    pool = tier_pool(make_pool)
    attach(pool, tier)
    for publishes in (pool.poll_tiers, lambda: pool.prefetch([1]), lambda: matches(pool, [9])):
        pool.reset_prefix_cache()
        pool.tiers.resume()
        pool.prefetch(PROMPT).wait(20)
        assert pool.radix.total_size == 0
        assert pool.stats()["pages_fetching"] == 10
        publishes()
        assert pool.radix.total_size == 40
        all_given_back(pool)
    pool.bind_with_prefix([7], 1)
    pool.reset_prefix_cache()
    pool.tiers.resume()
    pool.prefetch(PROMPT).wait(20)
    assert pool.bind_with_prefix(PROMPT, 44) == 40


def test_parts_are_published_as_they_arrive(make_pool, gated):
    pool = tier_pool(make_pool)
    record_bytes = len(next(iter(gated.records.values())))
    attach(pool, gated, staging_bytes=4 * 2 * record_bytes)  # four buffers of two records
    prefetch = pool.prefetch(PROMPT)
    for pages in (2, 4):
        gated.permits.release()
        assert gated.entered.acquire(timeout=20)
        assert gated.entered.acquire(timeout=20), "it is at the chunk after that"
        gated.entered.release()
        assert prefetch.found_len == 4 * pages
        assert not prefetch.done
        assert pool.poll_tiers() == 8
        assert matches(pool, PROMPT) == 4 * pages
        assert pool.radix.protected_size == 4 * pages, "locked as long as it lives"
        pool.check()
    gated.open()
    assert prefetch.wait(20) == 40
    assert matches(pool, PROMPT) == 40
    all_given_back(pool)


# ---- pages under way


def test_pages_under_way_are_a_state_of_the_ledger(make_pool, gated):
    pool = tier_pool(make_pool)
    attach(pool, gated)
    serve_prints(pool, PROMPT[:8])
    prefetch = pool.prefetch(PROMPT)
    stats = pool.stats()
    assert (stats["pages_fetching"], stats["pages_taken"]) == (8, 8)
    owners = [pool.page_owner(page) for page in range(pool.num_pages)]
    assert owners.count("prefetch 1") == 8
    assert pool.radix.protected_size == 8
    page = owners.index("prefetch 1")
    with pytest.raises(ValueError, match=rf"page {page} was not taken by alloc \(owner: prefetch"):
        pool.free(np.arange(page * 4, page * 4 + 4))
    assert page_map(pool)
    pool.check()
    prefetch.cancel()
    all_given_back(pool)
    assert pool.free_pages == 62


def test_a_bounded_number_of_pages_is_under_way(make_pool, gated):
    pool = tier_pool(make_pool)
    attached = attach(pool, gated)
    first = pool.prefetch(PROMPT)
    second = pool.prefetch(R(101, 141))
    assert pool.stats()["pages_fetching"] == 16, "a quarter of the pool"
    third = pool.prefetch(PROMPT)
    assert (third.done, third.found_len, third.wait(0)) == (True, 0, 0)
    assert attached.stats()["prefetch_refused"] == 1
    gated.open()
    assert (first.wait(20), second.wait(20)) == (40, 0)
    assert matches(pool, PROMPT) == 40
    all_given_back(pool)


def test_two_of_the_same_prompt_give_duplicates_back(make_pool, gated):
    pool = tier_pool(make_pool)
    attached = attach(pool, gated, max_fetching_pages=30)
    both = [pool.prefetch(PROMPT), pool.prefetch(PROMPT)]
    serve_prints(pool, PROMPT[:20])  # and a request computes half of it meanwhile
    gated.open()
    assert [prefetch.wait(20) for prefetch in both] == [40, 40]
    pool.poll_tiers()
    stats = attached.stats()
    assert stats["prefetch_duplicate_pages"] == 15
    assert stats["prefetch_published_pages"] == 5
    assert pool.radix.total_size == 40
    assert matches(pool, PROMPT) == 40
    all_given_back(pool)


def test_prefix_reuse_off_is_done_at_once_with_nothing(make_pool, tier):
    pool = tier_pool(make_pool)
    attach(pool, tier)
    pool.prefetch(PROMPT).wait(20)
    pool.poll_tiers()
    pool.prefix_reuse_enabled = False
    prefetch = pool.prefetch(PROMPT)
    assert (prefetch.done, prefetch.local_len, prefetch.found_len) == (True, 0, 0)


def test_a_pool_without_tiers_is_done_at_once_with_what_it_has(make_pool):
    pool = tier_pool(make_pool)
    serve_prints(pool, PROMPT)
    prefetch = pool.prefetch(PROMPT)
    assert (prefetch.done, prefetch.local_len, prefetch.wait()) == (True, 40, 40)
    assert (pool.tiers, pool.poll_tiers()) == (None, 0)
    with pool.prefetch([*PROMPT[:8], 1, 2, 3, 4, 5]) as prefetch:
        assert prefetch.publish() == 8
    prefetch.cancel()
    all_given_back(pool)


# ---- publish, when the caller says so


def test_with_publish_false_nothing_comes_before_publish(make_pool, tier):
    pool = tier_pool(make_pool)
    attach(pool, tier)
    prefetch = pool.prefetch(PROMPT, publish=False)
    assert prefetch.wait(20) == 40
    assert pool.poll_tiers() == 0
    assert matches(pool, PROMPT) == 0
    with pytest.raises(ValueError, match="at most the 10 pages that have arrived, got 11"):
        prefetch.publish(11)
    assert prefetch.publish(6) == 24
    assert prefetch.publish(10) == 24, "it has ended"
    assert prefetch.found_len == 24
    assert matches(pool, PROMPT) == 24
    all_given_back(pool)


@pytest.mark.parametrize("num_pages", [0, 1, 3])
def test_publish_of_no_more_than_was_local_publishes_nothing(make_pool, tier, num_pages):
    pool = tier_pool(make_pool)
    attach(pool, tier)
    serve_prints(pool, PROMPT[:12])
    prefetch = pool.prefetch(PROMPT, publish=False)
    prefetch.wait(20)
    assert prefetch.publish(num_pages) == 12
    all_given_back(pool)
    assert pool.radix.total_size == 12


def test_page_ids_depend_on_the_calls_and_the_number_only(make_pool, tier):
    ids = []
    for missing in (0, 3, 7):
        keys = list(tier.records)
        mine = MemoryTier()
        mine.records = {key: tier.records[key] for key in keys[: 10 - missing]}
        pool = tier_pool(make_pool)
        attach(pool, mine)
        serve_prints(pool, PROMPT[:6])
        prefetch = pool.prefetch(PROMPT, publish=False)
        other = pool.prefetch(R(51, 60), publish=False)
        assert prefetch.wait(20) == 40 - 4 * missing
        other.wait(20)
        prefetch.publish(3)
        other.cancel()
        taken = pool.alloc(8 * 4)
        request = pool.bind_request(PROMPT, 44)
        ids.append((taken.tolist(), pool.request(request).page_ids.tolist()))
    assert ids[0] == ids[1] == ids[2]
