"""What a reviewer broke: odd integers, interrupts, re-entry, slots that are not what they seem."""

import signal

import numpy as np
import pytest

from kvpool import KVCachePool, KVCacheStateError, RadixCache, UnknownRequestError
from kvpool.attention import paged_attention
from kvpool.storage import KVStorage
from tests.helpers.pools import R, assert_ledger, cache_prompt, case_pool, st, write


@pytest.fixture
def pool(make_pool):
    return case_pool(make_pool, 4, 16)


def rows(value, n):
    return np.full((1, n, 2, 8), value, np.float32)


@pytest.mark.parametrize("integer", [np.uint8, np.int8, np.uint32, np.int16, np.uint64])
def test_counts_of_any_integer_type_do_not_wrap(pool, integer):
    cache_prompt(pool, R(1, 8))
    request = pool.bind_request(R(1, 9), integer(13))
    assert pool.request(request).capacity == 16
    pool.extend_request(request, integer(17))
    assert pool.request(request).capacity == 20
    assert pool.would_fit(R(1, 9), integer(13))
    pool.unbind_request(request)
    slots = pool.alloc(integer(5))
    assert slots.size == 8
    pool.free(slots)
    assert pool.radix.evict(integer(4)).size == 1
    assert pool.radix.total_size == 4
    assert len(pool.bind_requests(integer(2), integer(5))) == 2
    assert pool.request_capacity == 8


def test_constructor_takes_small_numpy_integers_at_their_value(make_pool):
    pool = make_pool(1, np.uint8(240), 1, 1, page_size=np.uint8(16))
    assert (pool.num_slots, pool.num_pages, pool.key_cache.shape[1]) == (240, 15, 240)


def test_lengths_beyond_any_row_are_refused(pool):
    pool.bind_request(R(1, 4), 8)
    for call in (pool.step.slot_indices, lambda n: pool.step.get(0, n, padded=True)):
        with pytest.raises(ValueError, match="length must be in"):
            call(2**60)


def test_slots_with_gaps_between_them_are_refused(pool):
    pool.bind_request(R(1, 4), 8)
    gapped = np.arange(8)[::2]
    with pytest.raises(ValueError, match="contiguous"):
        pool.step.put(0, 0, rows(1, 4), rows(1, 4), slots=gapped)
    with pytest.raises(ValueError, match="contiguous"):
        pool.step.get(0, 4, slots=gapped)


def test_own_slots_advance_however_many_windows_were_made(pool):
    request = pool.bind_request(R(1, 4), 60)
    step = pool.step
    slots = [step.window_slot_indices(start, 1) for start in range(40)]
    for layer in range(2):
        for start in range(40):
            step.put(layer, start, rows(start, 1), rows(start, 1), slots=slots[start])
    assert pool.valid_len(request) == 40
    assert step.get(1, 40)[0][0, :, 0, 0].tolist() == list(range(40))
    with pytest.raises(ValueError, match="were made for positions"):
        step.put(0, 1, rows(0, 1), rows(0, 1), slots=slots[0])


def test_own_slots_cannot_be_changed_by_their_caller(pool):
    pool.bind_request(R(1, 4), 8)
    slots = pool.step.window_slot_indices(0, 4)
    with pytest.raises(ValueError, match="read-only"):
        slots[0] = -1


def test_put_that_failed_to_zero_a_page_zeroes_it_when_tried_again(pool, monkeypatch):
    pool.key_cache[:] = np.nan
    request = pool.bind_request(R(1, 4), 8)

    def fail(self, pages):
        raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr(KVStorage, "zero_pages", fail)
        with pytest.raises(MemoryError):
            pool.step.put(0, 0, rows(1, 1), rows(1, 1))
    assert pool.valid_len(request) == 0
    pool.step.put(0, 0, rows(1, 1), rows(1, 1))
    assert pool.step.get(0, 4)[0][0, :, 0, 0].tolist() == [1, 0, 0, 0]


def test_bind_that_is_interrupted_binds_nothing(pool):
    class Interrupting:
        """A watcher is what comes last in a bind."""

        def on_bind(self, request):
            raise KeyboardInterrupt

    pool.watch(Interrupting())
    with pytest.raises(KeyboardInterrupt):
        pool.bind_request(R(1, 4), 8)
    assert pool.bound_request_count == 0
    assert st(pool) == (16, 0, 0, 0)
    assert_ledger(pool)


def test_interrupts_at_any_moment_leave_the_books_in_order(pool):
    """A timer interrupts binds, puts of a step, finishes and unbinds, wherever they are."""
    rng = np.random.default_rng(0)
    interrupted = 0

    def interrupt(*_):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        for _ in range(400):
            try:
                signal.setitimer(signal.ITIMER_REAL, float(rng.uniform(2e-6, 1.5e-4)))
                request = pool.bind_request(R(1, 7), 12)
                step = pool.activate_step(request)
                for layer in range(2):
                    step.put(layer, 4, rows(1, 3), rows(1, 3))
                pool.mark_written(request, 7)
                if rng.random() < 0.5:
                    pool.finish_request(request, R(1, 7))
                else:
                    pool.unbind_request(request)
                signal.setitimer(signal.ITIMER_REAL, 0)
            except KeyboardInterrupt:
                interrupted += 1
            signal.setitimer(signal.ITIMER_REAL, 0)
            assert_ledger(pool)
            pool.unbind_requests()
            assert pool.free_pages + pool.radix.total_size // 4 == 16
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert interrupted > 20


@pytest.mark.parametrize("end", ["unbind_request", "finish_request"])
def test_request_that_has_ended_is_not_ended_twice(pool, end):
    request = pool.bind_request(R(1, 4), 8)
    pool.unbind_request(request)
    with pytest.raises(UnknownRequestError):
        getattr(pool, end)(request, *([R(1, 4)] if end == "finish_request" else []))
    assert st(pool) == (16, 0, 0, 0)
    assert pool.bound_request_count == 0
    assert_ledger(pool)


class Meddler:
    """A token that calls back while it is read."""

    def __init__(self, value, call):
        self.value, self.call = value, call

    def __index__(self):
        self.call()
        return self.value


@pytest.mark.parametrize("verb", ["finish_request", "checkpoint_request"])
def test_tokens_that_end_their_own_request_do_no_harm(pool, verb):
    request = pool.bind_request(R(1, 8), 8)
    write(pool, request, 0, 8)
    tokens = [*R(1, 7), Meddler(8, lambda: pool.unbind_request(request))]
    with pytest.raises((RuntimeError, UnknownRequestError)):
        getattr(pool, verb)(request, tokens)
    assert st(pool) == (16, 0, 0, 0)
    assert_ledger(pool)


def test_tokens_that_take_tokens_back_publish_only_what_is_left(pool):
    request = pool.bind_request(R(1, 8), 8)
    write(pool, request, 0, 8)
    tokens = [*R(1, 7), Meddler(8, lambda: pool.step.truncate_to(5, 8))]
    assert pool.finish_request(request, tokens) == 4  # 5 valid tokens are one page of 4


def test_closed_pool_answers_nothing():
    pool = KVCachePool(1, 16, 1, 1, page_size=4)
    request = pool.bind_request([1, 2], 4)
    pool.close()
    for call in (
        lambda: pool.valid_len(request),
        lambda: pool.request(request),
        lambda: pool.is_bound(request),
        lambda: pool.matched_prefix_len(request),
        lambda: pool.free_pages,
        lambda: pool.radix,
        lambda: pool.bound_request_count,
        lambda: pool.prefix_prompt_tokens,
    ):
        with pytest.raises(KVCacheStateError, match="closed"):
            call()


def test_exclusive_bind_without_reuse_clamps_as_bind_requests_does(pool):
    pool.prefix_reuse_enabled = False
    assert pool.bind_with_prefix(R(1, 100), 100, extra_key="tenant") == 0
    assert pool.request(pool.step.request_ids[0]).extra_key == "tenant"
    with pytest.raises(TypeError, match="extra_key"):
        pool.bind_with_prefix(R(1, 100), 100, extra_key=1.5)
    assert pool.bound_request_count == 1
    assert pool.request_capacity == 64  # all 16 pages of 4
    with pytest.raises(ValueError, match="empty"):
        pool.bind_with_prefix([], 100)


def test_handle_of_a_dead_node_is_refused_whatever_its_generation():
    tree = RadixCache(1)
    node = tree.insert([1], [0]).node
    tree.evict(1)
    for forged in (node, node + (1 << 32)):
        with pytest.raises(ValueError, match="stale"):
            tree.inc_lock_ref(forged)


def test_empty_and_endless_prompts_are_value_errors(pool):
    with pytest.raises(ValueError, match="empty"):
        pool.bind_request(np.array([]), 4)
    with pytest.raises(ValueError, match="more tokens"):
        pool.bind_request(range(10**30), 4)
    with pytest.raises(TypeError, match="sequence of integers, got generator"):
        pool.bind_request((token for token in R(1, 4)), 4)


def test_more_queries_than_positions_raise(pool):
    pool.bind_request(R(1, 4), 8)
    pool.step.put(0, 0, rows(1, 1), rows(1, 1))
    q = np.ones((3, 2, 8), np.float32)
    with pytest.raises(ValueError, match="3 queries over 1 positions"):
        paged_attention(q, pool, 0, pool.step.page_table(1), qo_indptr=[0, 3])


def test_past_capacity_tells_to_extend(pool):
    pool.bind_request(R(1, 4), 8)
    with pytest.raises(RuntimeError, match=r"extend_request to 9 \(1 more pages; 14 are free"):
        pool.step.require(9)


def test_exclusive_bind_without_reuse_knows_its_prompt(pool):
    pool.prefix_reuse_enabled = False
    assert pool.bind_with_prefix(R(1, 6), 8) == 0
    request = pool.step.request_ids[0]
    write(pool, request, 0, 6)
    with pytest.raises(ValueError, match="contradicts token 1 told at bind"):
        pool.finish_request(request, [9, *R(2, 6)])
    assert pool.finish_request(request, R(1, 6)) == 0
    assert_ledger(pool)
