"""Scenarios drawn from public bug reports: depth, size, sharing of work, flushes, threads."""

import sys
import threading

import numpy as np
import pytest

from kvpool import KVCacheExhaustedError, KVCacheStateError, RadixCache
from tests.helpers.pools import (
    R,
    assert_ledger,
    cache_prompt,
    case_pool,
    read,
    st,
    unchanged,
    values,
    write,
)


@pytest.mark.parametrize("num_leaves", [2_000, 40_000])
def test_a27_eviction_takes_leaves_in_insertion_order_at_any_size(make_pool, num_leaves):
    """sgl-project/sglang#14339, sgl-project/sglang#38454: each eviction scanned all leaves.

    Time is the benchmark's matter; here the victims and the free pages are the same at both sizes.
    """
    pool = case_pool(make_pool, 1, num_leaves)
    leaf_pages = pool.alloc(num_leaves)
    for token, page in enumerate(leaf_pages):
        pool.radix.insert([token], [int(page)])
    assert st(pool) == (0, num_leaves, num_leaves, 0)
    for n in range(1000):
        i = pool.bind_request([num_leaves + n], 1)
        assert int(pool.request(i).page_ids[0]) == leaf_pages[n]  # the n-th oldest leaf
        pool.mark_written(i, 1)
        assert pool.finish_request(i, [num_leaves + n]) == 1
        assert pool.free_pages == 0
    assert pool.stats()["evicted_pages"] == 1000
    lengths = [pool.radix.match_prefix([t]).length for t in (0, 999, 1000, num_leaves - 1)]
    assert lengths == [0, 0, 1, 1]


def test_a26_deep_tree_is_walked_without_recursion(make_pool):
    """sgl-project/sglang#154: insert recursed once per level and hit the recursion limit."""
    levels = 3000
    assert levels > sys.getrecursionlimit()
    pool = case_pool(make_pool, 1, levels)
    tokens = np.arange(1, levels + 1, dtype=np.int32)
    for n in range(1, levels + 1):
        i = pool.bind_request(tokens[:n], n)
        assert pool.matched_prefix_len(i) == n - 1
        pool.mark_written(i, n)
        assert pool.finish_request(i, tokens[:n]) == 1
    assert st(pool) == (0, levels, levels, 0)
    assert pool.radix.num_nodes == levels
    assert pool.radix.match_prefix([*R(1, levels), 0]).length == levels
    assert len(list(pool.radix.nodes())) >= levels
    assert pool.radix.format_tree()
    repr(pool.radix)
    pool.check()
    evicted = pool.radix.evict(levels)
    assert len(evicted) == levels
    pool.free(evicted.astype(np.int64))  # page size 1: a page is its slot
    assert st(pool) == (levels, 0, 0, 0)


def test_a26_deep_tree_is_dropped_without_recursion():
    """sgl-project/sglang#154, the last step: nothing recurses when a deep tree goes."""
    tree = RadixCache(page_size=1)
    ids = np.arange(3000, dtype=np.int32)
    for n in range(1, 3001):
        tree.insert(ids[:n], ids[:n])
    assert tree.num_nodes == 3000
    assert tree.total_size == 3000
    tree.reset()
    assert (tree.num_nodes, tree.total_size) == (0, 0)
    for n in range(1, 3001):
        tree.insert(ids[:n], ids[:n])
    del tree


def test_a34_reset_while_a_request_holds_the_old_tree_leaves_no_lock(make_pool):
    """sgl-project/sglang#12107: the flush pulled the tree from under a bound request."""
    for finish in (False, True):
        pool = case_pool(make_pool, 4, 8)
        cache_prompt(pool, R(1, 8))
        c = pool.bind_request(R(1, 9), 12)
        assert st(pool) == (5, 8, 0, 8)
        assert pool.reset_prefix_cache() == 0  # everything is locked
        assert st(pool) == (5, 8, 0, 8)  # out of the index, but protected until unlock
        assert pool.radix.match_prefix(R(1, 8)).length == 0
        assert read(pool, c, 8) == values(100, 0, 8)
        assert_ledger(pool)
        write(pool, c, 8, 12)
        assert read(pool, c, 12) == values(100, 0, 12)
        if finish:
            assert pool.finish_request(c, R(1, 12)) == 0  # bound before the reset
        else:
            pool.unbind_request(c)
        assert st(pool) == (8, 0, 0, 0)
        d = pool.bind_request(R(1, 9), 12)
        assert pool.matched_prefix_len(d) == 0
        assert_ledger(pool)


def test_a34_reset_frees_the_unlocked_part_only(make_pool):
    """sgl-project/sglang#12107: two branches, one of them held."""
    pool = case_pool(make_pool, 4, 8)
    cache_prompt(pool, R(1, 8))
    cache_prompt(pool, [*R(1, 4), *R(50, 57)])
    assert st(pool) == (4, 16, 16, 0)  # pages: shared 1, own 1, own 2
    c = pool.bind_request(R(1, 9), 12)
    assert pool.reset_prefix_cache() == 8  # the two pages of the other branch
    assert st(pool) == (5, 8, 0, 8)  # 8 - 2 locked - 1 private
    # what is cached after the reset is new and is found again
    assert cache_prompt(pool, R(1, 8), base=700) == 8
    d = pool.bind_request(R(1, 9), 12)
    assert pool.matched_prefix_len(d) == 8
    assert read(pool, d, 8) == values(700, 0, 8)
    assert read(pool, c, 8) == values(100, 0, 8)
    pool.unbind_request(c)
    assert read(pool, d, 8) == values(700, 0, 8)
    pool.unbind_request(d)
    assert st(pool) == (6, 8, 8, 0)
    assert_ledger(pool)


def _traffic(pool, thread, rounds, guard, failures):
    """Random binds, writes, finishes and unbinds; only this thread's own requests."""
    rng = np.random.default_rng(thread)
    for n in range(rounds):
        prompt = [*R(1, 4 * int(rng.integers(0, 7))), 1000 * thread + n]
        finish = bool(rng.integers(0, 2))
        try:
            with guard:
                request_id = pool.bind_request(prompt, len(prompt) + 8)
            with guard:
                write(pool, request_id, pool.matched_prefix_len(request_id), len(prompt))
            with guard:
                if finish:
                    pool.finish_request(request_id, prompt)
                else:
                    pool.unbind_request(request_id)
            if thread == 0:
                with guard:
                    assert pool.radix.evictable_size >= 0
                    assert pool.free_pages <= pool.num_pages
        except KVCacheExhaustedError:
            continue
        except KVCacheStateError as error:  # concurrent entry, only without the outer lock
            failures.append(error)
        except BaseException as error:
            failures.append(error)
            return


def _run_threads(pool, guard, rounds):
    cache_prompt(pool, [-1])  # compiles the kernels before the race
    failures = []
    threads = [
        threading.Thread(target=_traffic, args=(pool, n, rounds, guard, failures))
        for n in range(8)
    ]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    return failures


def test_a35_threads_behind_one_outer_lock_keep_the_ledger(make_pool):
    """zhaochenyang20/Awesome-ML-SYS-Tutorial#17, sgl-project/sglang#21379: unbalanced locks."""
    pool = case_pool(make_pool, 4, 64)
    assert _run_threads(pool, threading.Lock(), 500) == []
    assert pool.bound_request_count == 0
    assert pool.radix.protected_size == 0
    assert_ledger(pool)


class _NoGuard:
    """Stands where the outer lock would be."""

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        return None


def test_a35_concurrent_entry_is_refused_and_never_corrupts(make_pool):
    """sgl-project/sglang#21379: without the lock a call works or raises, and the pool is sound."""
    pool = case_pool(make_pool, 4, 64)
    failures = _run_threads(pool, _NoGuard(), 500)
    assert [e for e in failures if not isinstance(e, KVCacheStateError)] == []
    assert_ledger(pool)
    pool.unbind_requests()  # what a refused finish left bound
    assert pool.bound_request_count == 0
    assert pool.radix.protected_size == 0
    assert_ledger(pool)


def test_a36_two_branches_over_one_prefix_do_not_mix(make_pool):
    """ggml-org/llama.cpp#3802: one beam read the other beam's K/V."""
    pool = case_pool(make_pool, 4, 8)
    cache_prompt(pool, R(1, 8))
    x = pool.bind_request([*R(1, 8), 30], 16)
    y = pool.bind_request([*R(1, 8), 40], 16)
    assert [pool.matched_prefix_len(i) for i in (x, y)] == [8, 8]
    assert st(pool) == (2, 8, 0, 8)  # two private pages each
    bases = {x: 300, y: 400}
    for position in range(8, 12):
        rows = (x, y) if position % 2 == 0 else (y, x)
        step = pool.activate_step(*rows)
        for layer in range(2):
            k = np.empty((2, 1, 2, 8), np.float32)
            for row, request_id in enumerate(rows):
                k[row] = bases[request_id] + position + 1000 * layer
            step.put(layer, position, k, -k)
    want = {i: values(100, 0, 8) + values(bases[i], 8, 12) for i in (x, y)}
    for i in (x, y):
        assert read(pool, i, 12) == want[i]
    for rows in ((x, y), (y, x)):
        k, _ = pool.activate_step(*rows).get(0, 12)
        for row, request_id in enumerate(rows):
            assert np.asarray(k)[row, :, 0, 0].tolist() == want[request_id]
    branches = {x: [*R(1, 8), *R(30, 33)], y: [*R(1, 8), *R(40, 43)]}
    for i, tokens in branches.items():
        assert pool.finish_request(i, tokens) == 4
    assert st(pool) == (4, 16, 16, 0)
    assert pool.radix.num_nodes == 3
    for tokens in branches.values():
        assert pool.radix.match_prefix([*tokens, 0]).length == 12
    assert_ledger(pool)


def test_a04_unwritten_prompt_is_not_matched(make_pool):
    """vllm-project/vllm#37152, GeeeekExplorer/nano-vllm#209: blocks matched before the forward."""
    pool = case_pool(make_pool, 4, 6)
    a = pool.bind_request(R(1, 8), 8)
    b = pool.bind_request(R(1, 8), 8)
    assert [pool.matched_prefix_len(i) for i in (a, b)] == [0, 0]
    owned = [set(np.asarray(pool.request(i).page_ids).tolist()) for i in (a, b)]
    assert not owned[0] & owned[1]
    assert st(pool) == (2, 0, 0, 0)
    write(pool, a, 0, 8, 100)
    write(pool, b, 0, 8, 500)
    assert pool.finish_request(a, R(1, 8)) == 8
    assert pool.finish_request(b, R(1, 8)) == 0  # duplicates, freed
    assert st(pool) == (4, 8, 8, 0)


def test_a07_evict_in_use_prefix_is_refused(make_pool):
    """sgl-project/mini-sglang#52: the matched node itself stayed unlocked."""
    pool = case_pool(make_pool, 4, 4)
    cache_prompt(pool, R(1, 8))
    assert st(pool) == (2, 8, 8, 0)
    c = pool.bind_request(R(1, 9), 12)
    assert pool.matched_prefix_len(c) == 8
    assert st(pool) == (1, 8, 0, 8)
    with unchanged(pool, c), pytest.raises(KVCacheExhaustedError) as caught:
        pool.bind_request(R(50, 57), 8)
    assert (caught.value.needed_pages, caught.value.free_pages) == (2, 1)
    assert caught.value.evictable_pages == 0
    assert caught.value.can_ever_fit
    assert read(pool, c, 8) == values(100, 0, 8)
    pool.unbind_request(c)
    assert st(pool) == (2, 8, 8, 0)
    pool.bind_request(R(50, 57), 8)
    assert st(pool) == (0, 8, 8, 0)  # two were free: nothing evicted
    assert pool.stats()["evicted_pages"] == 0
