"""lfu: the page that the fewest look-ups found goes first, among equals the least recent one."""

import pytest

from tests.helpers.trees import Cache, words
from tests.oracles.tree import MOST_USES


@pytest.fixture
def cache():
    return Cache(1, "lfu")


@pytest.mark.parametrize("page_size", [1, 4])
def test_pages_go_by_their_uses_and_then_by_recency(page_size):
    cache = Cache(page_size, "lfu")
    pages = [cache.insert(words(page_size, letter))[0] for letter in (1, 2, 3, 4)]
    for letter, times in ((1, 3), (2, 1), (4, 1)):
        for _ in range(times):
            cache.match(words(page_size, letter))
    assert cache.drain() == [pages[2], pages[1], pages[3], pages[0]]


def test_match_counts_what_it_covers_and_not_the_rest(cache):
    first = cache.insert([1, 2, 3])
    second = cache.insert([7])
    cache.match([7])
    cache.match([1, 2])
    cache.match([1, 2])
    assert cache.drain() == [first[2], *second, first[1], first[0]]


def test_new_page_of_one_use_goes_before_an_old_one_of_two(cache):
    old = cache.insert([1])
    cache.match([1])
    new = cache.insert([2])
    assert cache.drain() == [*new, *old]


def test_insert_refreshes_and_counts_nothing(cache):
    first, second, third = (cache.insert([token]) for token in (1, 2, 3))
    cache.match([2])
    cache.insert([1])
    cache.insert([1])
    assert cache.drain() == [*third, *first, *second]


def test_lock_and_unlock_refresh_and_count_nothing(cache):
    first, second, third = (cache.insert([token]) for token in (1, 2, 3))
    held = cache.lock([1])  # looked up by this: 2 uses
    cache.match([2])  # 2 uses, later
    again = held[0]
    for _ in range(3):
        cache.real.inc_lock_ref(again)
        cache.real.dec_lock_ref(again)
    cache.unlock(held)
    assert cache.drain() == [*third, *second, *first]


def test_match_counts_what_is_locked_too(cache):
    first = cache.insert([1])
    second = cache.insert([2])
    held = cache.lock([1])  # 2 uses
    cache.match([1])  # 3
    cache.unlock(held)
    cache.match([2])  # 2
    assert cache.drain() == [*second, *first]


def test_prefix_has_the_uses_of_all_that_continue_it(cache):
    base = cache.insert([1])
    left = cache.insert([1, 2])[1:]
    right = cache.insert([1, 3])[1:]
    other = cache.insert([7])
    for tokens in ([1, 2], [1, 3], [7], [7]):
        cache.match(tokens)
    # 2 uses each of left and right, 3 of the base and of the other, which is more recent
    assert cache.drain() == [*left, *right, *base, *other]


def test_priority_comes_before_uses(cache):
    low = cache.insert([1], priority=-1)
    plain = cache.insert([2])
    high = cache.insert([3], priority=1)
    for _ in range(3):
        cache.match([1])
    cache.match([2])
    assert cache.drain() == [*low, *plain, *high]


def test_rise_in_priority_keeps_the_uses(cache):
    base = cache.insert([1, 2])
    cache.match([1])
    cache.match([1])
    high = cache.insert([5], priority=3)
    cache.match([5])
    child = cache.insert([1, 2, 3], priority=3)[2:]
    # uses within the class: child and [2] have 1, [5] 2, [1] 3
    assert cache.drain() == [child[0], base[1], *high, base[0]]


def test_rise_of_a_locked_path_finds_the_class_of_each_count(cache):
    base = cache.insert([1, 2, 3, 4])
    for end in (3, 2, 2, 1):
        cache.match([1, 2, 3, 4][:end])  # uses 5, 4, 2, 1
    held = cache.lock([1, 2, 3])  # 6, 5, 3
    steps = []
    for token, uses in ((10, 2), (11, 4), (12, 6)):
        steps += cache.insert([token], priority=2)
        for _ in range(uses - 1):
            cache.match([token])
    cache.insert([1, 2, 3], priority=2)
    cache.unlock(held)
    # the page of one use did not rise; [1], unlocked last, is more recent than the other of six
    order = [base[3], steps[0], base[2], steps[1], base[1], steps[2], base[0]]
    assert cache.drain() == order


@pytest.mark.slow
def test_counting_ends_where_it_is_said_to(cache):
    """Beyond that recency alone decides, and a prefix still goes after what continues it."""
    first = cache.insert([1, 2])
    second = cache.insert([7])
    real = cache.real
    for _ in range(MOST_USES - 2):
        real.match_prefix([7])
        real.match_prefix([1, 2])
    for node in cache.model.find([1, 2]) + cache.model.find([7]):
        node.uses = MOST_USES - 1
    cache.model.touch(cache.model.find([7]))
    cache.model.touch(cache.model.find([1, 2]))
    real.check()
    for tokens in ([7], [1, 2], [1, 2], [1, 2], [7], [1]):
        cache.match(tokens)
    assert cache.drain() == [first[1], *second, first[0]]


def test_reset_forgets_the_uses(cache):
    cache.insert([1])
    cache.match([1])
    assert cache.real.reset().tolist() == cache.model.reset() == [0]
    again = cache.insert([1])
    other = cache.insert([2])
    assert cache.drain() == [*again, *other]


def test_many_counts_and_priorities_come_and_go(cache):
    """Classes are made and dropped with their nodes: check knows every one of them."""
    pages = {}
    for priority in (0, 3, -2):
        for uses in (1, 2, 5, 9):
            token = 100 * (priority + 5) + uses
            pages[priority, uses] = cache.insert([token], priority)[0]
            for _ in range(uses - 1):
                cache.match([token])
    assert cache.drain() == [pages[key] for key in sorted(pages)]
    again = cache.insert([1], priority=3)
    assert cache.drain() == again
