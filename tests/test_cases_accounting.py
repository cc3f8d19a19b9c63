"""Scenarios drawn from public bug reports: who owns which page, and what the counters say.

`st` is (free pages, tokens in the tree, unlocked ones, locked ones).
"""

import pytest

from kvpool import KVCacheExhaustedError, UnknownRequestError
from tests.helpers.pools import (
    R,
    assert_ledger,
    cache_prompt,
    case_pool,
    pages,
    read,
    slots,
    st,
    unchanged,
    values,
    write,
)


def test_a01_accounting_counts_shared_pages_once(make_pool):
    """sgl-project/sglang#6888: free plus evictable exceeded the pool with page size 16."""
    pool = case_pool(make_pool, 16, 8)
    a = pool.bind_request(R(1, 40), 64)
    assert st(pool) == (4, 0, 0, 0)  # 64 / 16 = 4 pages of 8
    assert_ledger(pool)
    write(pool, a, 0, 50)
    assert pool.finish_request(a, R(1, 50)) == 48  # 50 floored to pages
    assert st(pool) == (5, 48, 48, 0)
    assert_ledger(pool)

    b = pool.bind_request(R(1, 40), 64)
    assert pool.matched_prefix_len(b) == 32  # 39 floored: one token is left to compute
    assert st(pool) == (3, 48, 16, 32)
    assert_ledger(pool)
    pool.extend_request(b, 71)  # 71 tokens want a fifth page
    assert st(pool) == (2, 48, 16, 32)
    write(pool, b, 32, 71)
    assert pool.finish_request(b, R(1, 40) + R(200, 230)) == 32  # 64 of 71, 32 were there
    # Pages 0 and 1 are shared, each branch has its own rest; b's 7-token tail is freed.
    assert st(pool) == (3, 80, 80, 0)
    assert_ledger(pool)


def test_a02_double_free_of_raw_slots_raises(make_pool):
    """sgl-project/sglang-jax#982, LMCache/LMCache#1365: one slot freed by two paths."""
    pool = case_pool(make_pool, 4, 4)
    taken = pool.alloc(5)
    assert len(taken) == 8  # rounded up to 2 pages
    assert pool.free_pages == 2
    pool.free(taken)
    assert pool.free_pages == 4
    with unchanged(pool), pytest.raises(ValueError, match=str(int(taken[0]) // 4)):
        pool.free(taken)
    assert pool.free_pages == 4


def test_a02_double_unbind_and_double_finish_raise(make_pool):
    """sgl-project/sglang-jax#982: the second release must not give the pages back again."""
    pool = case_pool(make_pool, 4, 4)
    a = pool.bind_request(R(1, 6), 8)
    assert pool.free_pages == 2
    pool.unbind_request(a)
    with unchanged(pool), pytest.raises(UnknownRequestError):
        pool.unbind_request(a)
    assert pool.free_pages == 4

    b = pool.bind_request(R(1, 6), 8)
    write(pool, b, 0, 6)
    pool.finish_request(b, R(1, 6))
    assert st(pool) == (3, 4, 4, 0)
    with unchanged(pool), pytest.raises(UnknownRequestError):
        pool.finish_request(b, R(1, 6))
    with unchanged(pool), pytest.raises(UnknownRequestError):
        pool.unbind_request(b)
    assert st(pool) == (3, 4, 4, 0)

    fresh = [pool.bind_request(R(50 + 4 * n, 53 + 4 * n), 4) for n in range(4)]
    owned = [pool.request(i).page_ids[0] for i in fresh]
    assert sorted(int(page) for page in owned) == [0, 1, 2, 3]


def test_a05_prompt_shorter_than_a_page_matches_and_inserts_nothing(make_pool):
    """sgl-project/sglang#10637: the key became empty after truncation to pages."""
    pool = case_pool(make_pool, 16, 4)
    a = pool.bind_request(R(1, 5), 20)
    assert pool.matched_prefix_len(a) == 0
    write(pool, a, 0, 5)
    assert pool.finish_request(a, R(1, 5)) == 0
    assert st(pool) == (4, 0, 0, 0)
    b = pool.bind_request(R(1, 5), 20)
    c = pool.bind_request([7], 1)
    assert [pool.matched_prefix_len(i) for i in (b, c)] == [0, 0]
    assert [pool.request(i).capacity for i in (b, c)] == [32, 16]
    assert st(pool) == (1, 0, 0, 0)  # 2 + 1 pages


def test_a08_lock_after_split_stays_balanced(make_pool):
    """UbiquitousLearning/mllm#656, sgl-project/sglang#27147: evictable size went negative."""
    pool = case_pool(make_pool, 4, 6)
    cache_prompt(pool, R(1, 8))
    c = pool.bind_request(R(1, 9), 12)
    assert pool.matched_prefix_len(c) == 8
    assert st(pool) == (3, 8, 0, 8)
    tokens = [1, 2, 3, 4, 20, 21, 22, 23]
    e = pool.bind_request(tokens, 8)
    assert pool.matched_prefix_len(e) == 4  # the node splits at 4 while locked
    assert st(pool) == (2, 8, 0, 8)
    assert_ledger(pool)
    write(pool, e, 4, 8, 500)
    assert pool.finish_request(e, tokens) == 4
    assert st(pool) == (2, 12, 4, 8)
    assert_ledger(pool)
    pool.unbind_request(c)
    assert st(pool) == (3, 12, 12, 0)
    assert_ledger(pool)


def test_a09_admission_does_not_count_own_prefix_as_room(make_pool):
    """NVIDIA/Megatron-LM#5822: matched evictable blocks were also promised as free room."""
    pool = case_pool(make_pool, 4, 4)
    cache_prompt(pool, R(1, 12))
    assert st(pool) == (1, 12, 12, 0)
    assert not pool.would_fit(R(1, 13), 20)
    with unchanged(pool), pytest.raises(KVCacheExhaustedError) as caught:
        pool.bind_request(R(1, 13), 20)
    # 5 pages - 3 matched are private; one is free; 5 pages never fit into 4
    assert (caught.value.needed_pages, caught.value.free_pages) == (2, 1)
    assert not caught.value.can_ever_fit

    assert pool.bind_with_prefix(R(1, 13), 20) == 12
    assert pool.request_capacity == 16  # clamped to 3 matched + 1 free page
    assert st(pool) == (0, 12, 0, 12)
    pool.unbind_requests()
    assert st(pool) == (1, 12, 12, 0)
    pool.bind_request(R(50, 65), 16)
    assert st(pool) == (0, 0, 0, 0)  # all three pages evicted


def test_a10_eviction_takes_exactly_what_is_short(make_pool):
    """sgl-project/sglang#32217: eviction asked for more than the allocation needed."""
    pool = case_pool(make_pool, 4, 4)
    for tokens in (R(1, 4), R(5, 8), R(9, 12)):
        cache_prompt(pool, tokens)
    assert st(pool) == (1, 12, 12, 0)
    d = pool.bind_request(R(20, 27), 8)
    assert st(pool) == (0, 8, 8, 0)  # 2 needed, 1 free: one page evicted, the oldest
    assert pool.stats()["evicted_pages"] == 1
    pool.unbind_request(d)
    matched = []
    for tokens in (R(1, 4), R(5, 8), R(9, 12)):
        i = pool.bind_request([*tokens, 0], 8)
        matched.append(pool.matched_prefix_len(i))
        pool.unbind_request(i)
    assert matched == [0, 4, 4]


def test_a11_permanent_shortage_is_told_from_a_temporary_one(make_pool):
    """vllm-project/vllm#35570, vllm-project/vllm#52530: what never fits was retried forever."""
    pool = case_pool(make_pool, 4, 4)
    for tokens, capacity in ((R(1, 4), 17), (R(1, 20), 20)):
        with unchanged(pool), pytest.raises(KVCacheExhaustedError) as never:
            pool.bind_request(tokens, capacity)
        error = never.value
        assert (error.needed_pages, error.total_pages, error.can_ever_fit) == (5, 4, False)
        assert pool.free_pages == 4
    x = pool.bind_request(R(1, 4), 16)
    with unchanged(pool, x), pytest.raises(KVCacheExhaustedError) as later:
        pool.bind_request(R(30, 33), 4)
    error = later.value
    assert (error.needed_pages, error.free_pages, error.evictable_pages) == (1, 0, 0)
    assert error.can_ever_fit
    assert pool.free_pages == 0


def test_a12_abort_in_a_chunked_prefill_loses_nothing(make_pool):
    """sgl-project/sglang#36926: an abort between chunks lost a whole chunk."""
    pool = case_pool(make_pool, 4, 8)
    for _ in range(100):
        a = pool.bind_request(R(1, 12), 16)
        assert pool.matched_prefix_len(a) == 0
        write(pool, a, 0, 4)
        write(pool, a, 4, 8)
        assert st(pool) == (4, 0, 0, 0)
        pool.unbind_request(a)
        assert st(pool) == (8, 0, 0, 0)
    assert_ledger(pool)


def test_a13_preempted_request_resumes_with_what_was_written(make_pool):
    """LMCache/LMCache#2158, LMCache/LMCache#1361: a resumed request came back with old counts."""
    pool = case_pool(make_pool, 4, 8)
    a = pool.bind_request(R(1, 10), 16)
    write(pool, a, 0, 13)  # 10 prompt tokens + 3 fed back; token 14 is sampled, never fed
    old_slots = slots(pool, a, 12)
    assert pool.finish_request(a, R(1, 14)) == 12
    assert st(pool) == (5, 12, 12, 0)
    free_now = {p for p in range(8) if "free" in pool.page_owner(p)}
    b = pool.bind_request(R(1, 14), 16)
    assert pool.matched_prefix_len(b) == 12  # 14 - 12 = 2 tokens to compute
    assert st(pool) == (4, 12, 0, 12)
    assert slots(pool, b, 12) == old_slots
    assert pages(pool, b, 16)[3] in free_now
    assert read(pool, b, 12) == values(100, 0, 12)


def test_a14_speculative_tail_is_not_lost(make_pool):
    """sgl-project/sglang-jax#1147, sgl-project/sglang#31616: each finish lost two pages."""
    pool = case_pool(make_pool, 4, 8)
    a = pool.bind_request(R(1, 7), 20)
    assert st(pool) == (3, 0, 0, 0)
    step = write(pool, a, 0, 7)
    with step.verify_window():
        write(pool, a, 7, 11)
    step.truncate_to(9, 11)
    assert pool.request(a).capacity == 20  # truncation frees nothing
    assert pool.valid_len(a) == 9
    assert pool.finish_request(a, R(1, 9)) == 8
    assert st(pool) == (6, 8, 8, 0)
    for n in range(100):
        i = pool.bind_request(R(100 + 7 * n, 106 + 7 * n), 20)
        write(pool, i, 0, 7)
        write(pool, i, 7, 11).truncate_to(7, 11)
        pool.unbind_request(i)
    assert st(pool) == (6, 8, 8, 0)
    assert_ledger(pool)


def test_a28_counters_count_successful_binds_and_new_tokens_only(make_pool):
    """vllm-project/vllm#25780, vllm-project/vllm#25787: recomputed requests counted as hits."""
    pool = case_pool(make_pool, 4, 8)

    def counters():
        return pool.prefix_prompt_tokens, pool.prefix_match_tokens, pool.prefix_insert_tokens

    a = pool.bind_request(R(1, 10), 12)
    write(pool, a, 0, 10)
    pool.finish_request(a, R(1, 10))
    assert counters() == (10, 0, 8)
    b = pool.bind_request(R(1, 10), 12)
    assert counters() == (20, 8, 8)
    with unchanged(pool, b), pytest.raises(KVCacheExhaustedError):
        pool.bind_request(R(500, 540), 44)  # 11 pages of 8
    assert counters() == (20, 8, 8)
    assert pool.stats()["bind_failures"] == 1
    assert pool.finish_request(b, R(1, 10)) == 0
    assert counters() == (20, 8, 8)
