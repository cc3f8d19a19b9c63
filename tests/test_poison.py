"""Poison mode: when it is on, and what each page holds then."""

import gc
import weakref

import numpy as np
import pytest

from kvpool import KVCachePool, KVCacheStateError
from kvpool.poison.stored import POISON
from kvpool.switches import is_switched_on
from tests.helpers.poison import bits, poison_pages
from tests.helpers.pools import R, assert_ledger, cache_prompt, case_pool, read, write

DTYPES = ("float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")


@pytest.fixture
def pool(make_pool):
    return case_pool(make_pool, 4, 8, poison=True)


# ---- on and off


@pytest.mark.parametrize(
    ("value", "expected"),
    [(None, False), ("1", True), ("yes", True), ("on", True)]
    + [(value, False) for value in ("", " ", "0", "false", "False", "no", "OFF")],
)
def test_environment_turns_it_on(make_pool, monkeypatch, value, expected):
    monkeypatch.delenv("KVPOOL_POISON", raising=False)
    if value is not None:
        monkeypatch.setenv("KVPOOL_POISON", value)
    assert case_pool(make_pool, 4, 2).poison is expected
    assert case_pool(make_pool, 4, 2, poison=True).poison is True
    assert case_pool(make_pool, 4, 2, poison=False).poison is False


@pytest.mark.parametrize("default", [False, True])
def test_switch_that_is_empty_says_nothing(monkeypatch, default):
    for value, expected in (("", default), ("off", False), ("No", False), ("2", True)):
        monkeypatch.setenv("KVPOOL_ZERO_REJECTED_KV", value)
        assert is_switched_on("KVPOOL_ZERO_REJECTED_KV", default) is expected


def test_without_poison_no_part_of_it_is_there(make_pool):
    """So nothing is added to any call: the classes are the plain ones, and buffers start as 0."""
    plain = case_pool(make_pool, 4, 2, poison=False)
    plain.bind_request([1], 8)
    for part in (plain.radix, plain.step, plain._requests, plain._requests.ledger):
        assert not type(part).__module__.startswith("kvpool.poison")
        assert not type(part).__name__.startswith("Poison")
    assert plain.read_guard() is None
    assert not plain.key_cache.any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_poison_is_a_nan_that_no_put_makes(make_pool, dtype):
    pool = make_pool(1, 8, 1, 4, page_size=4, dtype=dtype, poison=True)
    assert poison_pages(pool) == [0, 1]
    request = pool.bind_request([1, 2], 8)
    nan = np.full((1, 4, 1, 4), np.nan, np.float32)
    for rows in (nan, -nan):
        pool.step.put(0, 0, rows, rows)
        assert not (bits(pool)[pool.request(request).page_ids[0]] == POISON[dtype]).any()
        assert np.isnan(np.asarray(pool.step.get(0, 4)[0], np.float32)).all()
    # The second page was not entered: it is read as zeros, for no kernel must meet it.
    assert not np.asarray(pool.step.get(0, 8)[0], np.float32)[0, 4:].any()
    assert np.isnan(np.asarray(pool.layer_with_scratch(0)[0][4:8]).astype(np.float32)).all() or (
        pool.fp8_format is not None
    )


# ---- what pages hold


def test_pages_over_a_life(pool):
    assert poison_pages(pool) == list(range(8))
    a = pool.bind_request(R(1, 6), 16)
    assert poison_pages(pool) == list(range(8))  # bind touches no K/V that is not evicted
    write(pool, a, 0, 6)
    mine = pool.request(a).page_ids.tolist()
    rest = [page for page in range(8) if page not in mine[:2]]
    assert poison_pages(pool) == rest
    last = pool.key_layer(0)[mine[1] * 4 :][:4]
    assert not last[2:].any()  # the rest of an entered page is finite: a masked read meets it
    pool.finish_request(a, R(1, 6))  # one whole page stays
    assert poison_pages(pool) == [page for page in range(8) if page != mine[0]]
    assert pool.reset_prefix_cache() == 4
    assert poison_pages(pool) == list(range(8))


def test_evicted_pages_are_poison_for_their_next_owner(pool):
    for i in range(4):
        cache_prompt(pool, R(100 * i, 100 * i + 7))
    assert (pool.free_pages, poison_pages(pool)) == (0, [])
    request = pool.bind_request([1], 12)
    assert poison_pages(pool) == sorted(pool.request(request).page_ids.tolist())
    pool.unbind_request(request)
    slots = pool.alloc(16)
    assert poison_pages(pool) == sorted({int(slot) // 4 for slot in slots})
    pool.free(slots)
    assert len(poison_pages(pool)) == pool.free_pages == 4


def test_pages_that_the_caller_evicts_keep_their_content_until_they_are_freed(pool):
    """They may be on their way to another tier."""
    cache_prompt(pool, R(1, 8))
    page = pool.radix.evict(4)
    assert page.tolist() not in poison_pages(pool)
    assert len(poison_pages(pool)) == 6
    pool.free(np.arange(4) + 4 * int(page[0]))
    assert len(poison_pages(pool)) == 7
    pages = pool.radix.reset()
    assert len(poison_pages(pool)) == 7
    pool.free(np.arange(4) + 4 * int(pages[0]))
    assert len(poison_pages(pool)) == 8


def test_orphans_are_poisoned_at_their_unlock(pool):
    cache_prompt(pool, R(1, 8))
    node = pool.radix.match_prefix(R(1, 8)).node
    pool.radix.inc_lock_ref(node)
    pool.reset_prefix_cache()
    assert len(poison_pages(pool)) == 6
    pool.radix.dec_lock_ref(node)
    assert len(poison_pages(pool)) == pool.free_pages == 8


def test_shrink_extend_fork_and_checkpoint(pool):
    a = pool.bind_request(R(1, 6), 16)
    pool.shrink_request(a, 8)
    pool.extend_request(a, 12)
    write(pool, a, 0, 6)
    b = pool.fork_request(a, 12)
    assert read(pool, b, 6) == read(pool, a, 6)
    pool.checkpoint_request(b, R(1, 6))
    c = pool.bind_request(R(1, 6), 8)
    assert pool.matched_prefix_len(c) == 4
    pool.unbind_requests()
    assert len(poison_pages(pool)) == 7
    assert_ledger(pool)


@pytest.mark.parametrize("zero", [True, False])
def test_a_rejected_tail_is_no_finding(make_pool, zero):
    pool = case_pool(make_pool, 4, 8, poison=True, zero_rejected_kv=zero)
    a = pool.bind_request(R(1, 3), 20)
    step = write(pool, a, 0, 14)
    step.truncate_to(6, 14)
    assert len(read(pool, a, 6)) == 6
    write(pool, a, 6, 10)
    step.invalidate_range(9, 10)
    step.seal_length(5)
    write(pool, a, 5, 18)
    pool.finish_request(a, R(1, 18))
    assert read(pool, pool.bind_request(R(1, 18), 20), 16) == [100 + i for i in range(16)]


def test_model_code_that_writes_through_views_is_not_poisoned_under(pool):
    a = pool.bind_request(R(1, 8), 8)
    slots = pool.step.slot_indices(8)
    for layer in range(2):
        pool.key_layer(layer)[slots] = 1 + layer
        pool.value_layer(layer)[slots] = -1 - layer
    pool.mark_written(a, 8)
    pool.finish_request(a, R(1, 8))
    b = pool.bind_request(R(1, 8), 8)
    assert (pool.step.get(1, 4)[0] == 2).all()
    assert pool.request(b).matched_len == 4


# ---- life


def test_dead_steps_and_closed_pools_say_what_they_always_did(pool):
    a = pool.bind_request(R(1, 4), 8)
    step = pool.step
    pool.unbind_request(a)
    with pytest.raises(KVCacheStateError, match="dead"):
        step.get(0, 1)
    pool.warm_up()
    assert poison_pages(pool) == list(range(8))
    pool.close()
    with pytest.raises(KVCacheStateError, match="closed"):
        pool.bind_request([1], 4)
    assert pool.poison


def test_pool_that_is_dropped_is_gone_at_once():
    gc.disable()
    try:
        pool = KVCachePool(1, 16, 1, 4, page_size=4, poison=True)
        pool.bind_request([1, 2], 8)
        pool.step.get(0, 1)
        gone = weakref.ref(pool._requests.ledger)
        radix = pool.radix
        del pool
        assert gone() is None
        assert radix.match_prefix([1, 2]).length == 0  # a tree that outlives its pool still works
    finally:
        gc.enable()


def test_collector_that_unbinds_in_the_middle_of_a_bind_is_no_finding():
    """Books are settled by two calls at once then, the inner one first."""
    thresholds = gc.get_threshold()
    try:
        for threshold in range(1, 60):
            with KVCachePool(1, 32, 1, 4, page_size=4, poison=True) as pool:
                for i in range(3):
                    cache_prompt(pool, [i] * 8)
                bound = pool.bind_request([77] * 5, 8)

                class Stream:
                    def __init__(self, pool, request):
                        self.me, self.pool, self.request = self, pool, request

                    def __del__(self):
                        if not self.pool.closed and self.pool.is_bound(self.request):
                            self.pool.unbind_request(self.request)

                Stream(pool, bound)
                gc.set_threshold(threshold)
                pool.bind_request([5] * 9, 12)
                gc.set_threshold(*thresholds)
                pool.check()
                pool.bind_with_prefix([6] * 9, 32)
                pool.check()
    finally:
        gc.set_threshold(*thresholds)
