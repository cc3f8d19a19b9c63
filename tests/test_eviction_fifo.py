"""fifo: the page that came first goes first, whatever happened to it since."""

import itertools

import numpy as np
import pytest

from tests.helpers.trees import Cache, words

ORDERS = list(itertools.permutations(range(4)))


@pytest.fixture
def cache():
    return Cache(1, "fifo")


@pytest.mark.parametrize("page_size", [1, 4])
def test_use_of_any_kind_refreshes_nothing(page_size):
    cache = Cache(page_size, "fifo")
    old = cache.insert(words(page_size, 1, 2))
    young = cache.insert(words(page_size, 3))
    cache.match(words(page_size, 1, 2))
    cache.insert(words(page_size, 1, 2))
    cache.unlock(cache.lock(words(page_size, 1, 2)))
    assert cache.drain() == [old[1], old[0], *young]


def test_evict_part_of_a_node_takes_its_tail_and_keeps_its_place(cache):
    old = cache.insert([1, 2, 3])
    young = cache.insert([4])
    assert cache.evict(1) == [old[2]]
    cache.match([1, 2])
    assert cache.drain() == [old[1], old[0], young[0]]


def test_prefix_goes_right_after_the_last_page_that_continues_it(cache):
    """It came before all of them, and cannot go before any."""
    base = cache.insert([1, 2])
    other = cache.insert([7])
    left = cache.insert([1, 2, 3])[2:]
    late = cache.insert([8])
    right = cache.insert([1, 2, 4])[2:]
    last = cache.insert([9])
    assert cache.drain() == [*other, *left, *late, *right, base[1], base[0], *last]


def test_split_leaves_both_halves_their_place(cache):
    first = cache.insert([1, 2, 3])
    second = cache.insert([7])
    cache.match([1])
    third = cache.insert([1, 2, 9])[2:]
    assert cache.evict(1) == [first[2]]
    assert cache.drain() == [*second, *third, first[1], first[0]]


def test_namespaces_share_one_order(cache):
    plain = cache.insert([1])
    other = cache.insert([1], key="a")
    last = cache.insert([2])
    cache.match([1])
    cache.match([1], "a")
    assert cache.drain() == [*plain, *other, *last]


def test_evict_with_priorities_takes_the_lowest_class_first_and_each_by_entry(cache):
    high = [cache.insert([token], priority=5) for token in (1, 2)]
    low = [cache.insert([token], priority=-5) for token in (3, 4)]
    plain = [cache.insert([token]) for token in (5, 6)]
    cache.match([1])
    cache.match([3])
    assert cache.drain() == [page for (page,) in low + plain + high]


def test_rise_in_priority_is_an_entry(cache):
    """What rises goes behind all that was in that class before; its own place there is kept."""
    base = cache.insert([1, 2])
    high = cache.insert([5], priority=3)
    child = cache.insert([1, 2, 3], priority=3)[2:]
    later = cache.insert([6], priority=3)
    cache.insert([1], priority=3)  # is there already
    assert cache.drain() == [*high, *child, base[1], base[0], *later]


def test_insert_below_a_more_important_prefix_leaves_it_its_place(cache):
    base = cache.insert([1], priority=3)
    high = cache.insert([5], priority=3)
    child = cache.insert([1, 9])[1:]
    assert cache.drain() == [*child, *base, *high]


def test_insert_with_a_higher_priority_raises_what_is_locked(cache):
    base = cache.insert([1, 2])
    held = cache.lock([1, 2])
    plain = cache.insert([7])
    child = cache.insert([1, 2, 3], priority=9)[2:]
    high = cache.insert([8], priority=9)
    assert cache.evict(1) == plain
    cache.unlock(held)
    assert cache.drain() == [*child, base[1], base[0], *high]


# ---- what is locked when its turn comes


def test_page_locked_at_its_turn_is_spared_and_goes_first_afterwards(cache):
    first, second, third = (cache.insert([token]) for token in (1, 2, 3))
    held = cache.lock([1])
    assert cache.evict(1) == second
    cache.unlock(held)
    fourth = cache.insert([4])
    assert cache.drain() == [*first, *third, *fourth]


@pytest.mark.parametrize("order", ORDERS)
def test_pages_let_go_in_any_order_go_by_entry(order):
    cache = Cache(1, "fifo")
    pages = [cache.insert([token]) for token in range(4)]
    held = [cache.lock([token]) for token in range(4)]
    marker = cache.insert([9])
    assert cache.evict(1) == marker  # passes all four
    for i in order:
        cache.unlock(held[i])
    cache.insert([8])
    assert cache.drain() == [0, 1, 2, 3, 5]
    assert [page for (page,) in pages] == [0, 1, 2, 3]


@pytest.mark.parametrize("order", ORDERS)
def test_pages_let_go_between_evictions_go_by_entry_of_those_that_may(order):
    cache = Cache(1, "fifo")
    for token in range(4):
        cache.insert([token])
    held = [cache.lock([token]) for token in range(4)]
    cache.insert([9])
    cache.evict(1)
    cache.unlock(held[order[0]])
    cache.unlock(held[order[1]])
    assert cache.evict(1) == [min(order[:2])]
    cache.unlock(held[order[2]])
    cache.unlock(held[order[3]])
    assert cache.drain() == sorted({*range(4)} - {min(order[:2])})


def test_page_locked_again_while_it_waits_is_spared_again(cache):
    first, second, third, fourth = (cache.insert([token]) for token in (1, 2, 3, 4))
    held = [cache.lock([1]), cache.lock([2])]
    assert cache.evict(1) == third
    for each in held:
        cache.unlock(each)
    again = cache.lock([1])
    assert cache.evict(1) == second
    assert cache.evict(1) == fourth
    cache.unlock(again)
    assert cache.drain() == first


def test_page_that_waits_keeps_its_place_when_its_tail_goes(cache):
    first = cache.insert([1, 2, 3])
    second = cache.insert([4, 5])
    held = [cache.lock([1, 2, 3]), cache.lock([4, 5])]
    cache.insert([9])
    cache.evict(1)
    cache.unlock(held[1])
    assert cache.evict(1) == [second[1]]
    cache.unlock(held[0])  # came before, and was held
    assert cache.drain() == [first[2], first[1], first[0], second[0]]


def test_page_that_waits_and_is_continued_goes_after_the_new_page(cache):
    first = cache.insert([1])
    held = cache.lock([1])
    other = cache.insert([2])
    assert cache.evict(1) == other
    cache.unlock(held)
    late = cache.insert([3])
    child = cache.insert([1, 5])[1:]
    assert cache.drain() == [*late, *child, *first]


def test_page_that_waits_and_rises_enters_the_other_class(cache):
    first = cache.insert([1])
    held = cache.lock([1])
    other = cache.insert([2])
    high = cache.insert([3], priority=1)
    assert cache.evict(1) == other
    cache.unlock(held)
    cache.insert([1], priority=1)
    plain = cache.insert([4])
    assert cache.drain() == [*plain, *high, *first]


def test_page_that_was_passed_and_splits_goes_in_its_turn(cache):
    first = cache.insert([1, 2, 3])
    held = cache.lock([1, 2, 3])
    second = cache.insert([7])
    third = cache.insert([8])
    assert cache.evict(1) == second
    upper = cache.lock([1])  # splits what was passed
    cache.unlock(held)
    assert cache.evict(1) == [first[2]]
    assert cache.evict(2) == [first[1], *third]
    cache.unlock(upper)
    assert cache.drain() == [first[0]]


def test_pages_wait_in_two_classes(cache):
    high = [cache.insert([token], priority=1) for token in (3, 4)]
    plain = [cache.insert([token]) for token in (1, 2)]
    held = [cache.lock([token]) for token in (1, 2, 3, 4)]
    last = cache.insert([9], priority=1)
    assert cache.evict(1) == last  # passes all
    for each in held[::-1]:
        cache.unlock(each)
    fresh = cache.insert([5])
    assert cache.drain() == [page for (page,) in [*plain, fresh, *high]]


def test_reset_while_some_are_passed_and_some_wait(cache):
    """What nobody holds is handed out, what somebody holds goes first once it is let go."""
    kept, waiting, passed = (cache.insert([token]) for token in (1, 2, 3))
    held = [cache.lock([token]) for token in (1, 2, 3)]
    cache.insert([9])
    cache.evict(1)
    cache.unlock(held[1])
    prefix = cache.insert([4, 5])
    cache.match([4])
    dropped = cache.real.reset().tolist()
    assert sorted(dropped) == sorted(cache.model.reset()) == sorted([*waiting, *prefix])
    cache.real.check()
    fresh = cache.insert([1])
    cache.unlock(held[2])
    cache.unlock(held[0])
    assert cache.real.evict(3).tolist() == [*passed, *kept, *fresh]
    assert cache.real.num_nodes == 0
    cache.real.check()


def test_let_go_ten_thousand_passed_pages_in_any_order_drains_by_entry():
    """One by one into a heap: a list in order would be walked 25 million steps long."""
    num_pages = 10_000
    cache = Cache(1, "fifo").real
    tokens = np.arange(num_pages, dtype=np.int32)
    handles = [cache.insert(tokens[i : i + 1], tokens[i : i + 1]).node for i in range(num_pages)]
    for handle in handles:
        cache.inc_lock_ref(handle)
    assert cache.evict(1).size == 0
    for i in np.random.default_rng(0).permutation(num_pages).tolist():
        cache.dec_lock_ref(handles[i])
    np.testing.assert_array_equal(cache.evict(num_pages), tokens)
    assert cache.num_nodes == 0
