"""Which page goes next, seen through a pool: a refusal moves nothing, a shortage evicts itself."""

import pytest

from kvpool import EVICTION_POLICIES, KVCacheExhaustedError, KVCachePool
from tests.helpers.trees import words

EACH_POLICY = pytest.mark.parametrize("eviction", EVICTION_POLICIES)


def busy_pool(page_size, eviction, *, extra=lambda pool: None):
    """Shared prefixes, a bound request and two classes; `extra` runs in between."""
    pool = KVCachePool(1, 24 * page_size, 1, 1, page_size=page_size, eviction=eviction)

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


@EACH_POLICY
@pytest.mark.parametrize("page_size", [1, 4])
def test_bind_that_is_refused_leaves_the_drain_order(page_size, eviction):
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

    plain, refused = busy_pool(page_size, eviction), busy_pool(page_size, eviction, extra=refuse)
    assert plain.radix.format_tree() == refused.radix.format_tree()
    assert drain(plain) == drain(refused)


@EACH_POLICY
@pytest.mark.parametrize("page_size", [1, 4])
def test_bind_that_would_evict_its_own_prefix_is_refused_and_leaves_the_drain_order(
    page_size, eviction
):
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

    plain, refused = busy_pool(page_size, eviction), busy_pool(page_size, eviction, extra=refuse)
    assert drain(plain) == drain(refused)


@EACH_POLICY
@pytest.mark.parametrize("page_size", [1, 4])
def test_ask_would_fit_leaves_the_drain_order(page_size, eviction):
    def ask(pool):
        assert not pool.would_fit(words(page_size, 1, 2, 3, 4), 25 * page_size)
        assert pool.would_fit(words(page_size, 1, 2, 3, 4), 4 * page_size)
        assert pool.would_fit(words(page_size, 1, 2, 9), 3 * page_size, extra_key="a")
        pool.would_fit(words(page_size, 7), 20 * page_size)

    plain, asked = busy_pool(page_size, eviction), busy_pool(page_size, eviction, extra=ask)
    assert drain(plain) == drain(asked)


@EACH_POLICY
def test_bind_when_short_evicts_exactly_the_missing_pages(eviction):
    pool = KVCachePool(1, 8, 1, 1, page_size=1, eviction=eviction)
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


def cache_prompts(pool, *prompts, priority=0):
    for prompt in prompts:
        request = pool.bind_request(prompt, len(prompt), priority=priority)
        pool.mark_written(request, len(prompt))
        pool.finish_request(request, prompt)


def cached(pool, *prompts):
    """Those of `prompts` of which something is cached, looked at without an access."""
    heads = {int(view.tokens[0]) for view in pool.radix.nodes() if view.start == 0}
    return [prompt for prompt in prompts if prompt[0] in heads]


@pytest.mark.parametrize(
    ("eviction", "gone"),
    [
        ("lru", [3, 3]),  # the other two were bound since
        ("fifo", [1, 1]),  # came first
        ("lfu", [3, 3]),  # was never found
    ],
)
def test_bind_when_short_evicts_by_the_policy_of_the_pool(eviction, gone):
    pool = KVCachePool(1, 7, 1, 1, page_size=1, eviction=eviction)
    assert pool.eviction == pool.radix.eviction == eviction
    prompts = [[1, 1], [2, 2], [3, 3]]
    cache_prompts(pool, *prompts)
    for prompt in prompts[:2]:
        pool.unbind_request(pool.bind_request([*prompt, 9], 3))
    pool.unbind_request(pool.bind_request([8], 3))  # 1 free, 2 short
    assert cached(pool, *prompts) == [prompt for prompt in prompts if prompt != gone]
    pool.check()


def test_bind_when_short_under_fifo_spares_what_is_held_and_takes_it_first_afterwards():
    pool = KVCachePool(1, 4, 1, 1, page_size=1, eviction="fifo")
    cache_prompts(pool, [1], [2], [3])
    held = pool.bind_request([1, 5], 2)  # all 4 pages are in use now
    assert pool.matched_prefix_len(held) == 1
    pool.unbind_request(pool.bind_request([6], 1))  # [2] goes, though [1] came first
    assert cached(pool, [1], [2], [3]) == [[1], [3]]
    pool.unbind_request(held)
    cache_prompts(pool, [7, 7])  # 2 free pages
    pool.unbind_request(pool.bind_request([6], 1))
    assert cached(pool, [1], [3], [7]) == [[3], [7]]
    pool.check()


def test_bind_when_short_under_lfu_counts_binds_and_nothing_else():
    pool = KVCachePool(1, 6, 1, 1, page_size=1, eviction="lfu")
    cache_prompts(pool, [1], [2], [3])
    pool.unbind_request(pool.bind_request([1, 5], 2))
    cache_prompts(pool, [2], [3], [3])  # binds of one token match nothing, and an insert is no use
    for _ in range(3):  # neither is a question
        assert pool.would_fit([2, 5], 2)
    assert pool.alloc(4).size == 4  # 3 free, 1 short: the older of those with one use
    assert cached(pool, [1], [2], [3]) == [[1], [3]]
    pool.check()


@EACH_POLICY
def test_checkpoint_and_fork_keep_the_policy_exact(eviction):
    """A held path that grows, forks and is let go from its middle."""
    pool = KVCachePool(1, 12, 1, 1, page_size=1, eviction=eviction)
    cache_prompts(pool, [1, 2], [7])
    request = pool.bind_request([1, 2, 3, 4], 5, priority=1)
    for end in (3, 4):
        pool.mark_written(request, end)
        pool.checkpoint_request(request, [1, 2, 3, 4][:end])
    fork = pool.fork_request(request, 5)
    pool.unbind_request(request)
    # 5 pages in the tree and 1 of the fork: [7] is the only one that may go
    slots = pool.alloc(7)
    assert cached(pool, [1], [7]) == [[1]]
    with pytest.raises(KVCacheExhaustedError):
        pool.alloc(1)
    pool.unbind_request(fork)
    pool.free(slots)
    assert len(drain(pool)) == 4
    pool.check()
