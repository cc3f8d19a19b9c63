"""Which page goes next, seen through a pool: a refusal moves nothing, a shortage evicts itself."""

import pytest

from kvpool import KVCacheExhaustedError, KVCachePool


def words(page_size, *letters):
    """One page of tokens a letter."""
    return [token for letter in letters for token in [0] * (page_size - 1) + [letter]]


def busy_pool(page_size, *, extra=lambda pool: None):
    """Shared prefixes, a bound request and two classes; `extra` runs in between."""
    pool = KVCachePool(1, 24 * page_size, 1, 1, page_size=page_size)

    def cache_prompt(*letters, priority=0, key=None):
        prompt = words(page_size, *letters)
        request = pool.bind_request(prompt, len(prompt), priority=priority, extra_key=key)
        pool.mark_written(request, len(prompt))
        pool.finish_request(request, prompt)
        extra(pool)

    cache_prompt(1, 2, 3, 4, 5)
    cache_prompt(1, 2, 6)
    cache_prompt(7, 8, priority=2)
    cache_prompt(1, 2, 3, key="a")
    held = pool.bind_request(words(page_size, 1, 2, 3, 9), 5 * page_size)
    extra(pool)
    cache_prompt(7, 1)
    cache_prompt(3, 3, 3)
    extra(pool)
    pool.unbind_request(held)
    extra(pool)
    return pool


def drain(pool):
    return pool.radix.evict(pool.num_slots).tolist()


@pytest.mark.parametrize("page_size", [1, 4])
def test_bind_that_is_refused_leaves_the_drain_order(page_size):
    """Not even recency, not even a split: the tree after it is the tree before it."""

    def refuse(pool):
        # long enough a match to be an access, and a capacity that no eviction provides
        for letters in [(1, 2, 3, 4, 5, 6), (1, 2, 9), (7, 8, 9), (1, 1)]:
            with pytest.raises(KVCacheExhaustedError):
                pool.bind_request(words(page_size, *letters), 25 * page_size)
        nodes = pool.radix.num_nodes
        with pytest.raises(KVCacheExhaustedError):
            pool.bind_request(words(page_size, 1, 9), 25 * page_size)
        assert pool.radix.num_nodes == nodes
        pool.check()

    plain, refused = busy_pool(page_size), busy_pool(page_size, extra=refuse)
    assert plain.radix.format_tree() == refused.radix.format_tree()
    assert drain(plain) == drain(refused)


@pytest.mark.parametrize("page_size", [1, 4])
def test_bind_that_would_evict_its_own_prefix_is_refused_and_leaves_the_drain_order(page_size):
    """The matched pages are evictable now, but not for the bind that matches them."""

    def refuse(pool):
        for letters in [(1, 2, 3, 4, 5, 6), (1, 2, 9), (7, 8, 9)]:
            prompt = words(page_size, *letters)
            capacities = range(len(prompt), pool.num_slots + page_size, page_size)
            refusals = [
                capacity for capacity in capacities if not pool.would_fit(prompt, capacity)
            ]
            for capacity in refusals:
                with pytest.raises(KVCacheExhaustedError):
                    pool.bind_request(prompt, capacity)
        pool.check()

    plain, refused = busy_pool(page_size), busy_pool(page_size, extra=refuse)
    assert drain(plain) == drain(refused)


@pytest.mark.parametrize("page_size", [1, 4])
def test_ask_would_fit_leaves_the_drain_order(page_size):
    def ask(pool):
        assert not pool.would_fit(words(page_size, 1, 2, 3, 4), 25 * page_size)
        assert pool.would_fit(words(page_size, 1, 2, 3, 4), 4 * page_size)
        assert pool.would_fit(words(page_size, 1, 2, 9), 3 * page_size, extra_key="a")
        pool.would_fit(words(page_size, 7), 20 * page_size)

    plain, asked = busy_pool(page_size), busy_pool(page_size, extra=ask)
    assert drain(plain) == drain(asked)


def test_bind_when_short_evicts_exactly_the_missing_pages():
    pool = KVCachePool(1, 8, 1, 1, page_size=1)
    for token in range(6):
        request = pool.bind_request([token], 1)
        pool.mark_written(request, 1)
        pool.finish_request(request, [token])
    assert pool.free_pages == 2
    request = pool.bind_request([50], 5)  # 5 - 2 = 3 short
    assert pool.stats()["evicted_pages"] == 3
    assert pool.free_pages == 0
    pool.unbind_request(request)
    for token in range(6):
        assert pool.radix.match_prefix([token]).length == (token >= 3)


def test_alloc_when_short_evicts_exactly_the_missing_pages():
    pool = KVCachePool(1, 4 * 4, 1, 1, page_size=4)
    for token in range(3):
        request = pool.bind_request([token] * 4, 4)
        pool.mark_written(request, 4)
        pool.finish_request(request, [token] * 4)
    slots = pool.alloc(5)  # 2 pages, 1 free: the oldest goes
    assert pool.stats()["evicted_pages"] == 1
    assert [pool.radix.match_prefix([token] * 4).length for token in range(3)] == [0, 4, 4]
    pool.free(slots)
    pool.check()
