"""Requests that share: checkpoint, fork, exclusive binds, capacity changes, raw pages."""

import numpy as np
import pytest

from kvpool import KVCacheExhaustedError
from tests.helpers.pools import (
    R,
    assert_ledger,
    cache_prompt,
    case_pool,
    read,
    st,
    unchanged,
    values,
    window,
    write,
)


def page_ids(pool, request_id):
    return np.asarray(pool.request(request_id).page_ids).tolist()


def test_checkpoint_shares_at_once_and_keeps_the_request(make_pool):
    pool = case_pool(make_pool, 4, 8)
    a = pool.bind_request(R(1, 10), 12)
    write(pool, a, 0, 10)
    before = page_ids(pool, a)
    assert pool.checkpoint_request(a, R(1, 10)) == 8
    assert page_ids(pool, a) == before
    assert pool.request(a).shared_len == 8
    assert st(pool) == (5, 8, 0, 8)  # two pages became the tree's, one stays private
    b = pool.bind_request(R(1, 10), 12)
    assert pool.matched_prefix_len(b) == 8
    assert page_ids(pool, b)[:2] == before[:2]
    step = pool.activate_step(a)
    with unchanged(pool, a, b), pytest.raises(ValueError, match="8"):
        step.put(0, 7, *window(pool, 7, 8, 100))
    write(pool, a, 10, 12)
    assert pool.checkpoint_request(a, R(1, 12)) == 4
    assert pool.checkpoint_request(a, R(1, 12)) == 0
    assert pool.finish_request(a, R(1, 12)) == 0
    assert read(pool, b, 8) == values(100, 0, 8)
    pool.unbind_request(b)
    assert st(pool) == (5, 12, 12, 0)
    assert_ledger(pool)


def test_checkpoint_keeps_pages_that_others_cached_as_private_duplicates(make_pool):
    pool = case_pool(make_pool, 4, 8)
    a = pool.bind_request(R(1, 8), 8)
    b = pool.bind_request(R(1, 16), 16)
    write(pool, a, 0, 8, 100)
    write(pool, b, 0, 16, 500)
    before = page_ids(pool, b)
    pool.finish_request(a, R(1, 8))
    assert pool.checkpoint_request(b, R(1, 16)) == 8  # [8, 16); [0, 8) are duplicates
    assert page_ids(pool, b) == before
    assert st(pool) == (2, 16, 0, 16)  # a's two pages and b's last two, all held by b
    assert read(pool, b, 16) == values(500, 0, 16)
    assert_ledger(pool)
    assert pool.finish_request(b, R(1, 16)) == 0
    assert st(pool) == (4, 16, 16, 0)  # the duplicates are freed
    c = pool.bind_request(R(1, 17), 20)
    assert read(pool, c, 8) == values(100, 0, 8)  # the tree kept its own pages
    assert_ledger(pool)


def test_checkpoint_in_chunks_then_abort_keeps_what_was_checkpointed(make_pool):
    pool = case_pool(make_pool, 4, 8)
    a = pool.bind_request(R(1, 12), 16)
    for end in (4, 8):
        write(pool, a, end - 4, end)
        assert pool.checkpoint_request(a, R(1, 12)) == 4  # cut at valid
    write(pool, a, 8, 12)
    pool.unbind_request(a)
    assert st(pool) == (6, 8, 8, 0)


def test_fork_shares_whole_pages_and_copies_the_partial_one(make_pool):
    pool = case_pool(make_pool, 4, 8)
    a = pool.bind_request(R(1, 10), 12)
    write(pool, a, 0, 10)
    f = pool.fork_request(a, 16)
    assert page_ids(pool, f)[:2] == page_ids(pool, a)[:2]
    assert page_ids(pool, f)[2] != page_ids(pool, a)[2]
    assert pool.free_pages == 3  # a's three pages and two of f's own
    assert pool.stats()["pages_private"] == 5  # the shared ones are counted once
    assert [pool.valid_len(i) for i in (a, f)] == [10, 10]
    assert [pool.request(i).shared_len for i in (a, f)] == [8, 8]
    assert read(pool, f, 10) == values(100, 0, 10)
    write(pool, a, 10, 12, 300)
    write(pool, f, 10, 12, 400)
    assert read(pool, a, 12) == values(100, 0, 10) + values(300, 10, 12)
    assert read(pool, f, 12) == values(100, 0, 10) + values(400, 10, 12)
    for i in (a, f):
        step = pool.activate_step(i)
        with unchanged(pool, a, f), pytest.raises(ValueError, match="8"):
            step.put(0, 7, *window(pool, 7, 8, 0))
        with unchanged(pool, a, f), pytest.raises(ValueError, match="8"):
            step.invalidate_range(0, 1)
    assert pool.prefix_prompt_tokens == 10  # a fork is no prefix bind
    assert_ledger(pool)


@pytest.mark.parametrize("first", ["parent", "child"])
def test_fork_first_finisher_brings_the_pages_into_the_tree(make_pool, first):
    pool = case_pool(make_pool, 4, 8)
    a = pool.bind_request(R(1, 10), 12)
    write(pool, a, 0, 10)
    f = pool.fork_request(a, 12)
    assert pool.free_pages == 4
    one, other = (a, f) if first == "parent" else (f, a)
    assert pool.finish_request(one, R(1, 10)) == 8
    assert st(pool) == (5, 8, 0, 8)  # the other goes on holding them
    assert read(pool, other, 10) == values(100, 0, 10)
    assert_ledger(pool)
    write(pool, other, 10, 12)
    assert pool.finish_request(other, R(1, 12)) == 4
    assert st(pool) == (5, 12, 12, 0)
    assert_ledger(pool)


def test_fork_checkpoint_brings_the_pages_into_the_tree_for_all(make_pool):
    pool = case_pool(make_pool, 4, 8)
    a = pool.bind_request(R(1, 8), 8)
    write(pool, a, 0, 8)
    f = pool.fork_request(a, 12)
    assert pool.checkpoint_request(f, R(1, 8)) == 8
    assert st(pool) == (5, 8, 0, 8)
    pool.unbind_request(f)
    assert st(pool) == (6, 8, 0, 8)  # a still holds them
    pool.unbind_request(a)
    assert st(pool) == (6, 8, 8, 0)
    assert_ledger(pool)


def test_fork_last_to_unbind_frees_the_pages(make_pool):
    pool = case_pool(make_pool, 4, 8)
    a = pool.bind_request(R(1, 8), 8)
    write(pool, a, 0, 8)
    f = pool.fork_request(a, 12)
    g = pool.fork_request(f, 8)
    assert pool.free_pages == 5  # two shared by three, one private to f
    pool.unbind_request(a)
    assert pool.free_pages == 5
    assert read(pool, g, 8) == values(100, 0, 8)
    pool.unbind_request(f)
    assert pool.free_pages == 6
    assert_ledger(pool)
    assert read(pool, g, 8) == values(100, 0, 8)
    pool.unbind_request(g)
    assert st(pool) == (8, 0, 0, 0)


def test_fork_over_a_cached_prefix_holds_the_tree_too(make_pool):
    pool = case_pool(make_pool, 4, 8)
    cache_prompt(pool, R(1, 4), extra_key="x", priority=2)
    a = pool.bind_request(R(1, 9), 12, extra_key="x", priority=2)
    write(pool, a, 4, 9)
    f = pool.fork_request(a, 12)
    assert (pool.request(f).extra_key, pool.request(f).priority) == ("x", 2)
    assert st(pool) == (4, 4, 0, 4)  # one cached, one shared, one partial each
    pool.unbind_request(a)
    assert st(pool) == (5, 4, 0, 4)
    assert pool.finish_request(f, R(1, 9)) == 4
    assert st(pool) == (6, 8, 8, 0)
    assert pool.radix.match_prefix(R(1, 9), "x").length == 8
    assert pool.radix.match_prefix(R(1, 9)).length == 0


def test_fork_of_nothing_written_shares_nothing(make_pool):
    pool = case_pool(make_pool, 4, 8)
    a = pool.bind_request(R(1, 8), 8)
    f = pool.fork_request(a, 8)
    assert not set(page_ids(pool, a)) & set(page_ids(pool, f))
    assert pool.valid_len(f) == 0
    write(pool, a, 0, 8, 100)
    write(pool, f, 0, 8, 500)
    assert read(pool, a, 8) == values(100, 0, 8)
    assert read(pool, f, 8) == values(500, 0, 8)


def test_extend_and_shrink_keep_what_is_there(make_pool):
    pool = case_pool(make_pool, 4, 8)
    a = pool.bind_request(R(1, 6), 8)
    write(pool, a, 0, 6)
    before = page_ids(pool, a)
    pool.extend_request(a, 15)
    assert pool.request(a).capacity == 16
    assert page_ids(pool, a)[:2] == before
    assert pool.free_pages == 4
    assert read(pool, a, 6) == values(100, 0, 6)
    write(pool, a, 6, 9)
    pool.shrink_request(a, 4)  # nine are written: three pages stay
    assert pool.request(a).capacity == 12
    assert pool.free_pages == 5
    assert read(pool, a, 9) == values(100, 0, 9)
    step = pool.activate_step(a)
    with unchanged(pool, a), pytest.raises(KVCacheExhaustedError):
        step.put(0, 12, *window(pool, 12, 13, 100))
    assert_ledger(pool)


def test_extend_evicts_what_is_short(make_pool):
    pool = case_pool(make_pool, 4, 4)
    cache_prompt(pool, R(50, 57))
    a = pool.bind_request(R(1, 6), 8)
    assert st(pool) == (0, 8, 8, 0)
    pool.extend_request(a, 12)
    assert st(pool) == (0, 4, 4, 0)  # exactly one page


def test_shrink_never_goes_below_matched_pages(make_pool):
    pool = case_pool(make_pool, 4, 8)
    cache_prompt(pool, R(1, 8))
    a = pool.bind_request(R(1, 9), 20)
    pool.shrink_request(a, 4)
    assert pool.request(a).capacity == 8
    assert st(pool) == (6, 8, 0, 8)


def test_bind_with_prefix_is_exclusive_and_clamps(make_pool):
    pool = case_pool(make_pool, 4, 6)
    cache_prompt(pool, R(1, 8))
    a = pool.bind_request(R(1, 9), 12)
    b = pool.bind_request(R(50, 53), 8)
    assert pool.bind_with_prefix(R(1, 9), 100) == 8
    assert not pool.is_bound(a)
    assert not pool.is_bound(b)
    assert pool.bound_request_count == 1
    assert pool.request_capacity == 24  # two matched and four free pages
    (only,) = pool.step.request_ids
    assert pool.matched_prefix_len(only) == 8
    assert read(pool, only, 8) == values(100, 0, 8)
    assert st(pool) == (0, 8, 0, 8)


def test_bind_with_prefix_evicts_others_but_not_its_own_prefix(make_pool):
    pool = case_pool(make_pool, 4, 4)
    cache_prompt(pool, R(1, 4))
    cache_prompt(pool, R(50, 57))
    assert pool.bind_with_prefix(R(1, 5), 100) == 4
    assert pool.request_capacity == 16
    assert st(pool) == (0, 4, 0, 4)


def test_bind_with_prefix_does_not_take_more_than_asked(make_pool):
    pool = case_pool(make_pool, 4, 8)
    cache_prompt(pool, R(1, 8))
    assert pool.bind_with_prefix(R(1, 9), 10) == 8
    assert pool.request_capacity == 12
    assert st(pool) == (5, 8, 0, 8)


def test_bind_requests_is_exclusive_and_clamps_equally(make_pool):
    pool = case_pool(make_pool, 4, 8)
    cache_prompt(pool, R(1, 8))
    a = pool.bind_request(R(1, 9), 12)
    ids = pool.bind_requests(3, 100)
    assert not pool.is_bound(a)
    assert isinstance(ids, list)
    assert list(pool.step.request_ids) == ids
    assert [pool.request(i).capacity for i in ids] == [8, 8, 8]  # 8 // 3 = 2 pages each
    assert pool.request_capacity == 8
    assert st(pool) == (0, 8, 8, 0)  # six were free: nothing evicted
    assert_ledger(pool)


def test_bind_requests_gives_what_was_asked_when_it_fits(make_pool):
    pool = case_pool(make_pool, 4, 8)
    ids = pool.bind_requests(2, 5)
    assert [pool.request(i).capacity for i in ids] == [8, 8]
    assert pool.free_pages == 4
    assert pool.prefix_prompt_tokens == 0  # no prefix bind
    again = pool.bind_requests(8, 4)  # every page, after releasing the first two
    assert pool.bound_request_count == 8
    assert not set(ids) & set(again)
