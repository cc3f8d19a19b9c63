"""What a reviewer broke: seals beyond a graph's arrays, stale slots, callers that call back."""

import gc

import numpy as np
import pytest

from kvpool import KVCachePool, KVCacheStateError, RadixCache
from kvpool.attention import PagedAttention
from tests.helpers.pools import R, assert_ledger, case_pool, unchanged, write


def rows(value, n, batch=1):
    return np.full((batch, n, 2, 8), value, np.float32)


def test_seal_beyond_the_arrays_of_a_graph_is_refused(make_pool):
    pool = case_pool(make_pool, 1, 4096, max_seq_len=16)
    request = pool.bind_request([1], 4096)
    step = pool.activate_step(request)
    with pool.decode_graph as graph:
        table = graph.prepare(4, 3)
        with unchanged(pool, request), pytest.raises(ValueError, match="4000 pages is too long"):
            step.seal_length(4000)
        assert table.lengths_host.tolist() == [4]


def test_a_table_of_the_callers_own_shares_nothing(make_pool):
    pool = case_pool(make_pool, 4, 16)
    step = pool.activate_step(pool.bind_request(R(1, 6), 8))
    own = step.build_page_table(6)
    own.indices += 5
    assert step.page_table(6).indices.tolist() == [0, 1]
    other = step.build_page_table(6)
    other.indices += 5
    assert step.page_table(6).indices.tolist() == [0, 1]


@pytest.mark.parametrize("verb", ["checkpoint", "fork"])
def test_put_in_a_block_does_not_reach_pages_that_became_read_only(make_pool, verb):
    pool = case_pool(make_pool, 4, 16)
    request = pool.bind_request(R(1, 4), 8)
    write(pool, request, 0, 3)
    step = pool.activate_step(request)
    with pool.decode_graph as graph:
        graph.prepare(4, 3)
        for layer in range(2):
            step.put(layer, 3, rows(1, 1), rows(1, 1))
        if verb == "checkpoint":
            pool.checkpoint_request(request, R(1, 4))
        else:
            pool.fork_request(request, 8)
        with pytest.raises(ValueError, match="read-only"):
            step.put(0, 3, rows(666, 1), rows(666, 1))
    assert step.get(0, 4)[0][0, 3, 0, 0] == 1


def test_queries_over_too_few_positions_raise_every_time(make_pool):
    pool = case_pool(make_pool, 16, 16)
    request = pool.bind_request(R(1, 10), 12)
    step = write(pool, request, 0, 10)
    attention = PagedAttention(pool, step.page_table(10), qo_indptr=[0, 5])
    q = np.zeros((5, 2, 8), np.float32)
    attention.run(0, q)
    step.seal_length(3)
    for _ in range(2):
        with pytest.raises(ValueError, match="5 queries over 3 positions"):
            attention.run(0, q)


def test_slots_after_install_wait_for_a_prepare(make_pool):
    pool = case_pool(make_pool, 4, 16)
    step = pool.activate_step(pool.bind_request(R(1, 6), 12))
    with pool.decode_graph as graph:
        table = graph.prepare(6, 5)
        graph.install(table, 9)
        with pytest.raises(KVCacheStateError, match="call prepare before a put"):
            step.window_slot_indices(8, 1)
        graph.prepare(9, 8)
        assert not step.window_slot_indices(8, 1).flags.writeable


@pytest.mark.parametrize("window_len", [0, -1, 2**31, 1.5, True])
def test_windows_of_no_sense_are_refused(make_pool, window_len):
    pool = case_pool(make_pool, 4, 16)
    pool.activate_step(pool.bind_request(R(1, 6), 12))
    for call in (
        lambda: pool.verify_graph.qo_indptr(1, window_len),
        lambda: pool.verify_graph.prepare(6, 5, window_len),
    ):
        with pytest.raises((TypeError, ValueError), match="window_len must be"):
            call()


def test_tree_of_a_negative_size_is_refused():
    with pytest.raises(ValueError, match="num_pages must be at least 0, got -22"):
        RadixCache(1, "lru", -22)


# ---- callers that call back


class Array:
    """An array that calls back while it is read."""

    def __init__(self, values, call):
        self.values, self.call = np.asarray(values), call

    def __array__(self, dtype=None, copy=None):
        self.call()
        return self.values

    @property
    def __array_interface__(self):
        self.call()
        return self.values.__array_interface__


def test_an_indptr_that_asks_for_other_slots_moves_nothing(make_pool):
    pool = case_pool(make_pool, 4, 16)
    step = pool.activate_step(pool.bind_request(R(1, 6), 12))
    for layer in range(2):
        step.put(layer, 0, rows(1, 8), rows(1, 8))
    indptr = Array([0, 1], lambda: step.window_slot_indices(0, 1))
    step.put(0, 5, rows(9, 1)[0], rows(9, 1)[0], qo_indptr=indptr)
    assert step.get(0, 8)[0][0, :, 0, 0].tolist() == [1, 1, 1, 1, 1, 9, 1, 1]


def test_slots_that_give_pages_back_while_they_are_read_write_nowhere(make_pool):
    pool = case_pool(make_pool, 4, 4)
    request = pool.bind_request(R(1, 3), 16)
    step = pool.activate_step(request)

    def lose():
        if pool.request(request).capacity == 16:
            pool.shrink_request(request, 4)
            other = pool.bind_request(R(50, 53), 12)
            write(pool, other, 0, 12)

    slots = Array(np.arange(8, 12), lose)
    before = pool.key_cache.copy()
    with pytest.raises(Exception, match="past the capacity"):
        step.put(0, 8, rows(666, 4), rows(666, 4), slots=slots)
    assert not (pool.key_cache == 666).any()
    assert before.shape == pool.key_cache.shape
    assert_ledger(pool)


def test_tokens_that_end_their_request_while_they_are_read(make_pool):
    pool = case_pool(make_pool, 4, 16)
    request = pool.bind_request(R(1, 4), 8)
    tokens = Array(
        np.arange(1, 5), lambda: pool.is_bound(request) and pool.unbind_request(request)
    )
    with pytest.raises(KVCacheStateError, match="has ended"):
        pool.finish_request(request, tokens)
    assert pool.bound_request_count == 0
    assert_ledger(pool)


def test_reset_while_the_collector_unbinds_requests():
    """A client's object in a cycle, whose end unbinds: at any allocation the collector may run."""
    thresholds = gc.get_threshold()
    try:
        for threshold in range(1, 120):
            gc.set_threshold(*thresholds)
            with KVCachePool(1, 64, 1, 4, page_size=4) as pool:
                for i in range(6):
                    request = pool.bind_request([i] * 5, 8, extra_key=f"k{i % 3}")
                    pool.mark_written(request, 5)
                    pool.finish_request(request, [i] * 5)
                bound = pool.bind_request([77] * 12, 16)

                class Stream:
                    def __init__(self, pool, request):
                        self.me, self.pool, self.request = self, pool, request

                    def __del__(self):
                        if not self.pool.closed and self.pool.is_bound(self.request):
                            self.pool.unbind_request(self.request)

                Stream(pool, bound)
                gc.set_threshold(threshold)
                pool.reset_prefix_cache()
                gc.set_threshold(*thresholds)
                pool.check()
    finally:
        gc.set_threshold(*thresholds)
