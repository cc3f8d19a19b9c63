"""The life of a request: bind, match, finish, checkpoint, and what stays behind."""

import numpy as np
import pytest

from kvpool import KVCacheError, KVCacheExhaustedError
from tests.helpers.pools import (
    R,
    assert_ledger,
    cache_prompt,
    case_pool,
    pages,
    read,
    st,
    unchanged,
    values,
    write,
)


def page_ids(pool, request_id):
    return np.asarray(pool.request(request_id).page_ids).tolist()


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_bind_after_finish_matches_all_but_one_token_in_whole_pages(make_pool, page_size):
    pool = case_pool(make_pool, page_size, 40)
    tokens = R(1, 2 * page_size + 1)
    cached = len(tokens) // page_size * page_size
    assert cache_prompt(pool, tokens) == cached
    for extra in (0, 1, page_size):
        prompt = [*tokens, *R(900, 899 + extra)] if extra else tokens
        i = pool.bind_request(prompt, len(prompt) + 3)
        expected = min(cached, (len(prompt) - 1) // page_size * page_size)
        assert pool.matched_prefix_len(i) == expected
        assert pool.valid_len(i) == expected
        assert read(pool, i, expected) == values(100, 0, expected)
        pool.unbind_request(i)
    assert_ledger(pool)


def test_request_info_tells_the_whole_reservation(make_pool):
    pool = case_pool(make_pool, 4, 8)
    cache_prompt(pool, R(1, 8), extra_key="tenant")
    i = pool.bind_request(R(1, 9), 13, extra_key="tenant", priority=3)
    info = pool.request(i)
    assert info.request_id == i
    assert info.capacity == 16  # 13 rounded up
    assert (info.matched_len, info.valid_len, info.shared_len) == (8, 8, 8)
    assert (info.extra_key, info.priority) == ("tenant", 3)
    assert info.page_ids.dtype == np.int32
    assert page_ids(pool, i) == pages(pool, i, 16)
    with pytest.raises((AttributeError, TypeError)):
        info.capacity = 99
    with pytest.raises((ValueError, TypeError)):
        info.page_ids[0] = 99
    assert pool.request(i).capacity == 16


def test_bind_becomes_the_active_step_only_when_nothing_was_bound(make_pool):
    pool = case_pool(make_pool, 4, 8)
    assert pool.request_capacity == 0
    a = pool.bind_request(R(1, 4), 12)
    assert list(pool.step.request_ids) == [a]
    b = pool.bind_request(R(1, 4), 8)
    assert list(pool.step.request_ids) == [a]
    assert pool.request_capacity == 12
    pool.activate_step(a, b)
    assert pool.request_capacity == 8  # the smallest of the rows
    assert pool.bound_request_count == 2
    pool.unbind_requests()
    assert (pool.bound_request_count, pool.request_capacity) == (0, 0)
    c = pool.bind_request(R(1, 4), 4)
    assert list(pool.step.request_ids) == [c]
    assert a >= 1
    assert len({a, b, c}) == 3


@pytest.mark.parametrize("capacity", [4, 8, 12, 16, 20, 24])
@pytest.mark.parametrize("held", [0, 4, 12])
def test_would_fit_is_what_bind_then_does(make_pool, capacity, held):
    pool = case_pool(make_pool, 4, 5)
    cache_prompt(pool, R(1, 8))
    if held:
        pool.bind_request(R(80, 83), held)
    for prompt in ([1, 2, 3], [*R(1, 4)], [9, 9]):
        before = st(pool), pool.radix.format_tree()
        answer = pool.would_fit(prompt, capacity)
        assert (st(pool), pool.radix.format_tree()) == before
        try:
            i = pool.bind_request(prompt, capacity)
        except KVCacheExhaustedError:
            assert not answer
        else:
            assert answer
            pool.unbind_request(i)


def test_would_fit_is_no_access(make_pool):
    pool = case_pool(make_pool, 4, 4)
    for first in (1, 5, 9, 13):
        cache_prompt(pool, R(first, first + 3))
    assert pool.would_fit([*R(1, 4), 0], 8)  # does not make R(1, 4) recent
    pool.bind_request(R(20, 23), 4)  # evicts one page
    assert pool.radix.match_prefix(R(1, 4)).length == 0
    assert pool.radix.match_prefix(R(5, 8)).length == 4


def test_would_fit_follows_the_namespace(make_pool):
    pool = case_pool(make_pool, 4, 4)
    cache_prompt(pool, R(1, 8), extra_key="a")
    pool.bind_request(R(1, 9), 12, extra_key="a")  # holds both cached pages and a third
    assert pool.would_fit(R(1, 9), 12, extra_key="a")  # one page more, one is free
    assert not pool.would_fit(R(1, 9), 12, extra_key="b")  # three pages more
    assert not pool.would_fit(R(1, 9), 12)


def test_access_decides_who_is_evicted(make_pool):
    pool = case_pool(make_pool, 4, 4)
    for first in (1, 5, 9, 13):
        cache_prompt(pool, R(first, first + 3))
    i = pool.bind_request([*R(1, 4), 0][:5], 8)  # an access; evicts R(5, 8) for its own page
    pool.unbind_request(i)
    assert st(pool) == (1, 12, 12, 0)
    j = pool.bind_request(R(20, 24), 8)  # one free, one to evict: R(9, 12) is the oldest
    pool.unbind_request(j)
    lengths = [pool.radix.match_prefix(R(f, f + 3)).length for f in (1, 5, 9, 13)]
    assert lengths == [4, 0, 0, 4]


def test_eviction_takes_tail_pages_first(make_pool):
    pool = case_pool(make_pool, 4, 4)
    cache_prompt(pool, R(1, 16))
    pool.bind_request(R(50, 53), 4)
    assert st(pool) == (0, 12, 12, 0)
    assert pool.radix.match_prefix(R(1, 16)).length == 12  # only the last page went


def test_priority_outlives_recency(make_pool):
    pool = case_pool(make_pool, 4, 4)
    cache_prompt(pool, R(1, 4), priority=1)  # the oldest, but more important
    cache_prompt(pool, R(5, 8))
    cache_prompt(pool, R(9, 12), priority=-1)  # the least important
    cache_prompt(pool, R(13, 16))
    order = []
    for n in range(4):
        pool.alloc(4)
        gone = [f for f in (1, 5, 9, 13) if not pool.radix.match_prefix(R(f, f + 3)).length]
        order += [f for f in gone if f not in order]
        assert len(order) == n + 1
        # the look above touched the rest in the order 1, 5, 9, 13, which keeps 5 before 13
    assert order == [9, 5, 13, 1]


def test_priority_of_a_child_raises_its_parent_for_good(make_pool):
    pool = case_pool(make_pool, 4, 5)
    cache_prompt(pool, R(1, 4))  # priority 0
    cache_prompt(pool, R(5, 8))  # priority 0, newer
    cache_prompt(pool, R(1, 8), priority=2)  # below R(1, 4), and raises it
    assert st(pool) == (2, 12, 12, 0)
    pool.alloc(12)  # one page short: R(5, 8) goes, though R(1, 4) was older
    assert pool.radix.match_prefix(R(1, 8)).length == 8
    assert pool.radix.match_prefix(R(5, 8)).length == 0


@pytest.mark.parametrize(
    "keys", [("a", "b"), (b"a", b"b"), (1, 2), (0, None), ("1", 1), ("a", b"a")]
)
def test_namespaces_are_separate_by_value_and_type(make_pool, keys):
    pool = case_pool(make_pool, 4, 8)
    for n, key in enumerate(keys):
        assert cache_prompt(pool, R(1, 4), base=100 * (n + 1), extra_key=key) == 4
    for n, key in enumerate(keys):
        i = pool.bind_request(R(1, 5), 8, extra_key=key)
        assert read(pool, i, 4) == values(100 * (n + 1), 0, 4)
        pool.unbind_request(i)


def test_finish_takes_fewer_tokens_than_written_and_cuts_more(make_pool):
    pool = case_pool(make_pool, 4, 8)
    a = pool.bind_request(R(1, 9), 12)
    write(pool, a, 0, 9)
    assert pool.finish_request(a, R(1, 7)) == 4
    b = pool.bind_request(R(50, 53), 12)
    write(pool, b, 0, 4)
    assert pool.finish_request(b, R(50, 61)) == 4  # cut at valid
    assert st(pool) == (6, 8, 8, 0)


def test_finish_frees_what_another_request_cached_meanwhile(make_pool):
    pool = case_pool(make_pool, 4, 8)
    a = pool.bind_request(R(1, 8), 8)
    b = pool.bind_request(R(1, 16), 16)
    write(pool, a, 0, 8)
    write(pool, b, 0, 16)
    assert st(pool) == (2, 0, 0, 0)
    assert pool.finish_request(a, R(1, 8)) == 8
    # [0, 8) are duplicates and freed, [8, 16) goes to the tree below a's pages
    assert pool.finish_request(b, R(1, 16)) == 8
    assert st(pool) == (4, 16, 16, 0)
    c = pool.bind_request(R(1, 17), 20)
    assert pool.matched_prefix_len(c) == 16
    assert read(pool, c, 16) == values(100, 0, 16)


def test_finish_active_finishes_the_only_bound_then_the_only_active(make_pool):
    pool = case_pool(make_pool, 4, 8)
    with pytest.raises((KVCacheError, ValueError)):
        pool.finish_active(R(1, 4))
    a = pool.bind_request(R(1, 4), 4)
    write(pool, a, 0, 4)
    assert pool.finish_active(R(1, 4)) == 4  # the only bound one
    b = pool.bind_request(R(50, 53), 4)
    c = pool.bind_request(R(60, 63), 4)
    write(pool, b, 0, 4)
    write(pool, c, 0, 4)
    pool.activate_step(b, c)
    with unchanged(pool, b, c), pytest.raises((KVCacheError, ValueError)):
        pool.finish_active(R(50, 53))
    pool.activate_step(c)
    assert pool.finish_active(R(60, 63)) == 4  # the only active one
    assert pool.is_bound(b)
    assert not pool.is_bound(c)


def test_mark_written_only_raises_valid(make_pool):
    pool = case_pool(make_pool, 4, 8)
    a = pool.bind_request(R(1, 8), 12)
    pool.mark_written(a, 6)
    assert pool.valid_len(a) == 6
    pool.mark_written(a, 3)
    assert pool.valid_len(a) == 6
    write(pool, a, 6, 9)
    assert pool.valid_len(a) == 9
    pool.mark_written(a, 12)
    assert pool.finish_request(a, R(1, 12)) == 12


def test_unbind_inserts_nothing_and_keeps_the_tree(make_pool):
    pool = case_pool(make_pool, 4, 8)
    cache_prompt(pool, R(1, 4))
    a = pool.bind_request(R(1, 8), 12)
    write(pool, a, 4, 12)
    pool.unbind_request(a)
    assert st(pool) == (7, 4, 4, 0)
    assert not pool.is_bound(a)
    assert pool.matched_prefix_len(a) == 0


def test_matched_prefix_len_is_constant_after_bind(make_pool):
    pool = case_pool(make_pool, 4, 8)
    cache_prompt(pool, R(1, 4))
    a = pool.bind_request(R(1, 12), 12)
    write(pool, a, 4, 12)
    pool.checkpoint_request(a, R(1, 12))
    assert pool.matched_prefix_len(a) == 4
    assert pool.request(a).matched_len == 4


def test_reuse_off_counts_nothing(make_pool):
    pool = case_pool(make_pool, 4, 8)
    assert pool.prefix_reuse_enabled
    pool.prefix_reuse_enabled = False
    assert cache_prompt(pool, R(1, 8)) == 0
    assert pool.bind_with_prefix(R(1, 8), 12) == 0
    assert pool.request_capacity == 12
    pool.unbind_requests()
    assert (pool.prefix_prompt_tokens, pool.prefix_insert_tokens) == (0, 0)
    pool.prefix_reuse_enabled = True
    assert cache_prompt(pool, R(1, 8)) == 8
    assert (pool.prefix_prompt_tokens, pool.prefix_insert_tokens) == (8, 8)


def test_stats_holds_the_ledger_and_the_counters(make_pool):
    pool = case_pool(make_pool, 4, 8)
    cache_prompt(pool, R(1, 10))  # two pages stay
    taken = pool.alloc(4)
    a = pool.bind_request(R(1, 9), 16)  # two matched, two private
    with pytest.raises(KVCacheExhaustedError):
        pool.bind_request(R(50, 53), 100)
    stats = pool.stats()
    assert type(stats) is dict
    expected = {
        "pages_free": 3,
        "pages_private": 2,
        "pages_tree": 2,
        "pages_taken": 1,
        "requests_bound": 1,
        "prefix_prompt_tokens": 19,  # 10 + 9
        "prefix_match_tokens": 8,
        "prefix_insert_tokens": 8,
        "evicted_pages": 0,
        "bind_failures": 1,
    }
    assert {name: stats[name] for name in expected} == expected
    assert pool.free_slots == 12
    assert_ledger(pool)
    pool.unbind_request(a)
    pool.free(taken)
