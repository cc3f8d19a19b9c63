"""Pages seen from outside: owners, raw takes, the reset of the cache, determinism."""

import numpy as np

from kvpool import KVCacheLayout, KVCachePool
from tests.helpers.pools import (
    R,
    cache_prompt,
    case_pool,
    slots_of_pages,
    st,
    write,
)


def page_ids(pool, request_id):
    return np.asarray(pool.request(request_id).page_ids).tolist()


def test_reset_prefix_cache_with_bound_requests_forgets_them(make_pool):
    pool = case_pool(make_pool, 4, 8)
    cache_prompt(pool, R(50, 57))
    a = pool.bind_request(R(1, 8), 8)  # all private, bound before the reset
    write(pool, a, 0, 8)
    assert pool.reset_prefix_cache() == 8
    assert st(pool) == (6, 0, 0, 0)
    assert pool.checkpoint_request(a, R(1, 8)) == 0
    assert pool.finish_request(a, R(1, 8)) == 0  # written with the old weights
    assert st(pool) == (8, 0, 0, 0)
    assert pool.reset_prefix_cache() == 0


def test_reset_prefix_cache_spares_a_fork_of_an_old_request(make_pool):
    pool = case_pool(make_pool, 4, 8)
    a = pool.bind_request(R(1, 8), 8)
    write(pool, a, 0, 8)
    pool.reset_prefix_cache()
    f = pool.fork_request(a, 8)  # shares old pages: they must not become matchable
    assert pool.finish_request(f, R(1, 8)) == 0
    assert pool.finish_request(a, R(1, 8)) == 0
    assert st(pool) == (8, 0, 0, 0)


def test_page_owner_names_every_state(make_pool):
    pool = case_pool(make_pool, 4, 8)
    cache_prompt(pool, R(1, 4))
    a = pool.bind_request(R(1, 9), 12)
    taken = int(pool.alloc(4)[0]) // 4
    cached, private, last = page_ids(pool, a)
    assert "tree" in pool.page_owner(cached)
    assert "request" in pool.page_owner(private)
    assert str(a) in pool.page_owner(private)
    assert "4" in pool.page_owner(private)  # its first position
    assert "8" in pool.page_owner(last)
    assert "taken" in pool.page_owner(taken)
    assert "scratch" in pool.page_owner(8)
    free = set(range(8)) - {cached, private, last, taken}
    assert all("free" in pool.page_owner(page) for page in free)


def test_raw_pages_go_into_the_tree_and_come_back(make_pool):
    pool = case_pool(make_pool, 4, 8)
    taken = pool.alloc(7)
    assert taken.dtype == np.int64
    assert len(taken) == 8  # two pages
    ids = taken[::4] // 4
    assert taken.tolist() == slots_of_pages(pool, ids).tolist()
    assert pool.stats()["pages_taken"] == 2
    result = pool.radix.insert(R(1, 9), ids.astype(np.int32))
    assert result.prefix_len == 0
    assert st(pool) == (6, 8, 8, 0)
    assert pool.stats()["pages_taken"] == 0
    spare = pool.alloc(4)
    result = pool.radix.insert(R(1, 4), spare[::4] // 4)
    assert result.prefix_len == 4  # cached already: the spare page stays taken
    assert pool.stats()["pages_taken"] == 1
    pool.free(spare)
    match = pool.radix.match_prefix(R(1, 9))
    assert (match.length, match.pages.tolist()) == (8, ids.tolist())
    evicted = pool.radix.evict(5)  # two pages of four tokens
    assert evicted.tolist() == ids[::-1].tolist()  # tail first
    assert st(pool) == (6, 0, 0, 0)
    assert pool.stats()["pages_taken"] == 2
    pool.free(slots_of_pages(pool, evicted))
    assert st(pool) == (8, 0, 0, 0)


def test_alloc_evicts_only_what_is_short(make_pool):
    pool = case_pool(make_pool, 4, 4)
    cache_prompt(pool, R(1, 12))
    taken = pool.alloc(8)  # one free, one evicted
    assert st(pool) == (0, 8, 8, 0)
    pool.free(taken)
    assert st(pool) == (2, 8, 8, 0)


def test_same_calls_give_the_same_page_ids(make_pool):
    def run():
        pool = case_pool(make_pool, 4, 8)
        a = pool.bind_request(R(1, 10), 12)
        write(pool, a, 0, 10)
        pool.finish_request(a, R(1, 10))
        b = pool.bind_request(R(1, 10), 16)
        c = pool.fork_request(b, 12)
        return page_ids(pool, b), page_ids(pool, c), pool.alloc(12).tolist()

    assert run() == run()


def test_for_mtp_keeps_dtype_and_page_size_of_the_model(make_pool):
    # a draft pool with test defaults (float32, page size 1) made a shared decode call fail
    layout = KVCacheLayout(1, 2, 8, max_batch_size=3, max_seq_len=30)
    pool = make_pool.keep(KVCachePool.for_mtp(layout, "cpu", "bfloat16", 16))
    assert (pool.dtype, pool.page_size, pool.num_slots) == ("bfloat16", 16, 96)
