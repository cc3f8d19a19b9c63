"""Which page goes next: lowest priority, then least recently used, as many as asked for."""

import numpy as np
import pytest

from kvpool import EVICTION_POLICIES
from tests.helpers.trees import Cache, words

NUM_PAGES = 400


@pytest.mark.parametrize("eviction", EVICTION_POLICIES)
@pytest.mark.parametrize("page_size", [1, 2, 4, 16])
@pytest.mark.parametrize("seed", range(6))
def test_drain_a_random_tree_equals_the_sorted_pages(page_size, seed, eviction):
    rng = np.random.default_rng(seed)
    cache = Cache(page_size, eviction)
    for _ in range(60):
        tokens = words(page_size, *rng.integers(0, 3, rng.integers(1, 7)).tolist())
        key = [None, "a"][int(rng.integers(2))]
        if rng.integers(3) == 0:
            cache.match(tokens, key)
        elif cache.next_page + 7 <= NUM_PAGES:
            cache.insert(tokens, int(rng.integers(-1, 3)), key)
    num_cached = len(cache.model.cached)
    assert len(cache.drain()) == num_cached
    assert cache.real.total_size == 0
    assert cache.real.num_nodes == 0


@pytest.mark.parametrize("page_size", [1, 4])
def test_evict_part_of_a_node_takes_its_tail_pages_one_by_one(page_size):
    cache = Cache(page_size)
    pages = cache.insert(words(page_size, 1, 2, 3, 4, 5))
    assert cache.real.evict(page_size).tolist() == [pages[4]]
    assert cache.real.evict(2 * page_size).tolist() == [pages[3], pages[2]]
    assert cache.match(words(page_size, 1, 2, 3, 4, 5)).length == 2 * page_size
    assert cache.real.evict(100).tolist() == [pages[1], pages[0]]
    cache.real.check()


def test_evict_part_of_a_node_keeps_its_place_in_the_order():
    cache = Cache(4)
    old = cache.insert(words(4, 1, 2, 3))
    young = cache.insert(words(4, 4, 5))
    assert cache.real.evict(4).tolist() == [old[2]]
    assert cache.real.evict(100).tolist() == [old[1], old[0], young[1], young[0]]


@pytest.mark.parametrize(
    ("num_tokens", "num_evicted"),
    [(0, 0), (1, 1), (4, 1), (5, 2), (8, 2), (9, 3), (20, 5), (24, 6), (25, 6), (10**9, 6)],
)
def test_evict_tokens_takes_the_pages_that_hold_them_or_all(num_tokens, num_evicted):
    cache = Cache(4)  # 6 pages; ceil(n / 4) of them
    cache.insert(words(4, 1, 2, 3))
    cache.insert(words(4, 1, 4))
    cache.insert(words(4, 5, 6))
    assert cache.real.total_size == 6 * 4
    assert len(cache.real.evict(num_tokens)) == num_evicted
    assert cache.real.total_size == (6 - num_evicted) * 4
    cache.real.check()


def test_split_a_node_by_a_match_keeps_the_recency_of_the_rest():
    """The matched head is young now, the rest stays older than what came in between."""
    cache = Cache(1)
    first = cache.insert([1, 2, 3, 4])
    second = cache.insert([7, 8])
    cache.match([1, 2])
    assert cache.drain() == [first[3], first[2], second[1], second[0], first[1], first[0]]


def test_split_a_node_by_an_insert_keeps_the_recency_of_the_rest():
    cache = Cache(1)
    first = cache.insert([1, 2, 3])
    second = cache.insert([7])
    third = cache.insert([1, 9])[1:]  # page 0 of it is the duplicate of [1]
    assert cache.drain() == [first[2], first[1], second[0], third[0], first[0]]


def test_match_in_another_namespace_makes_nothing_younger():
    cache = Cache(1)
    plain = cache.insert([1, 2])
    other = cache.insert([1, 2], key="a")
    cache.match([1, 2], "b")
    cache.match([1, 2])
    assert cache.drain() == [other[1], other[0], plain[1], plain[0]]


def test_evict_with_priorities_takes_the_lowest_class_first():
    cache = Cache(1)
    high = cache.insert([1, 2], priority=5)
    low = cache.insert([3, 4], priority=-5)
    plain = cache.insert([5, 6])
    assert cache.drain() == [low[1], low[0], plain[1], plain[0], high[1], high[0]]


def test_insert_with_a_higher_priority_raises_its_ancestors_for_good():
    cache = Cache(1)
    base = cache.insert([1, 2])
    child = cache.insert([1, 2, 3], priority=9)[2:]
    plain = cache.insert([7])
    # the important child raised its parents above the plain page
    assert cache.real.evict(1).tolist() == [plain[0]]
    assert cache.real.evict(1).tolist() == [child[0]]
    later = cache.insert([8])
    # the child is gone, its parents stay important: the younger plain page goes before them
    assert cache.real.evict(3).tolist() == [later[0], base[1], base[0]]


def test_insert_with_a_higher_priority_raises_locked_ancestors_too():
    cache = Cache(1)
    base = cache.insert([1, 2])
    handle = cache.match([1, 2]).node
    cache.real.inc_lock_ref(handle)
    child = cache.insert([1, 2, 3], priority=9)[2:]
    cache.real.dec_lock_ref(handle)
    plain = cache.insert([7])
    assert cache.real.evict(4).tolist() == [plain[0], child[0], base[1], base[0]]


def test_insert_with_a_higher_priority_leaves_the_unmatched_rest_low():
    cache = Cache(1)
    first = cache.insert([1, 2, 3])
    plain = cache.insert([7])
    cache.insert([1], priority=3)
    assert cache.real.evict(4).tolist() == [first[2], first[1], plain[0], first[0]]


def test_insert_with_a_lower_priority_lowers_nothing():
    cache = Cache(1)
    high = cache.insert([1], priority=3)
    cache.insert([1], priority=-3)
    plain = cache.insert([2])
    assert cache.drain() == [plain[0], high[0]]


def test_unlock_a_path_makes_it_the_most_recent():
    cache = Cache(1)
    first = cache.insert([1, 2])
    handle = cache.match([1, 2]).node
    cache.real.inc_lock_ref(handle)
    second = cache.insert([3])
    assert cache.real.evict(100).tolist() == second
    third = cache.insert([4])
    cache.real.dec_lock_ref(handle)
    assert cache.real.evict(100).tolist() == [third[0], first[1], first[0]]


def test_unlock_the_upper_of_two_holders_leaves_the_shared_path_protected():
    cache = Cache(1)
    pages = cache.insert([1, 2, 3, 4])
    lower, upper = cache.match([1, 2, 3]).node, cache.match([1]).node
    cache.real.inc_lock_ref(lower)
    cache.real.inc_lock_ref(upper)
    assert cache.real.protected_size == 3
    cache.real.dec_lock_ref(upper)
    assert cache.real.protected_size == 3
    assert cache.real.evict(100).tolist() == [pages[3]]
    cache.real.dec_lock_ref(lower)
    assert cache.real.evict(100).tolist() == [pages[2], pages[1], pages[0]]
