"""Scenarios drawn from public bug reports: sizing, misuse and borrowed memory."""

import gc
import sys
import tracemalloc

import numpy as np
import pytest

from kvpool import (
    KVCacheExhaustedError,
    KVCacheLayout,
    KVCachePool,
    compute_static_kv_budget,
)
from tests.helpers.pools import R, case_pool, st, unchanged, window, write

GIB = 1 << 30


def test_a29_sizing_with_a_negative_budget_gives_zero_slots_and_refuses():
    """sgl-project/sglang#7691: a negative token count went unnoticed at start-up."""
    budget = compute_static_kv_budget(80 * GIB, 30 * GIB, 0.5, 131072, 16, 64, 4096)
    assert (budget.static_budget, budget.used) == (40 * GIB, 50 * GIB)
    assert (budget.kv_budget, budget.num_slots, budget.num_pages) == (0, 0, 0)
    assert budget.limited_by == "memory"
    # 2 x 32 layers x 8 heads x 128 dims x 2 bytes = 131072 bytes a token
    layout = KVCacheLayout(32, 8, 128, max_batch_size=64, max_seq_len=4096)
    assert layout.bytes_per_token("float16") == 131072
    with pytest.raises(KVCacheExhaustedError, match=r"50\.\d* GiB") as caught:
        KVCachePool.allocate(layout, "cpu", "float16", 0.5, 16, memory=(80 * GIB, 30 * GIB))
    assert not caught.value.can_ever_fit


def test_a29_sizing_is_exact_in_both_limits():
    """sgl-project/sglang#7691: the same with enough memory, and with a small batch."""
    budget = compute_static_kv_budget(80 * GIB, 50 * GIB, 0.5, 131072, 16, 64, 4096)
    assert budget.kv_budget == 10 * GIB
    assert (budget.num_slots, budget.num_pages) == (81_920, 5_120)
    assert budget.limited_by == "memory"
    budget = compute_static_kv_budget(80 * GIB, 20 * GIB, 0.9, 131072, 16, 2, 4096)
    assert budget.kv_budget == 12 * GIB == 98_304 * 131_072  # capped at 2 * 4096 tokens
    assert (budget.num_slots, budget.num_pages) == (8_192, 512)
    assert budget.limited_by == "max_batch_size"


@pytest.mark.parametrize(
    ("free", "want", "num_slots"),
    [
        (10_000, 1_000, 64),  # half is 5,000 bytes = 78 tokens of 64 bytes, floored to pages
        (10**9, 40, 48),  # 40 rounded up to pages of 16
    ],
)
def test_a30_mtp_history_takes_at_most_half_of_the_memory(make_pool, free, want, num_slots):
    """NVIDIA/TensorRT-LLM#12188: target and draft cache each claimed the whole budget."""
    layout = KVCacheLayout(1, 2, 8)  # 2 x 1 x 2 x 8 x 2 bytes = 64 bytes a token
    pool = KVCachePool.for_mtp_history(layout, "cpu", "float16", 16, want, memory=(10**9, free))
    with pool:
        assert pool.num_slots == num_slots
        assert (pool.dtype, pool.page_size) == ("float16", 16)
        assert not pool.prefix_reuse_enabled
        i = pool.bind_request(R(1, 16), 16)
        k, v = window(pool, 0, 16, 1)
        pool.activate_step(i).put(0, 0, k, v)
        assert pool.finish_request(i, R(1, 16)) == 0
        assert st(pool) == (num_slots // 16, 0, 0, 0)


def test_a30_mtp_history_without_room_for_a_page_is_refused():
    """NVIDIA/TensorRT-LLM#12188: half of 2,000 bytes is 15 tokens, less than a page."""
    layout = KVCacheLayout(1, 2, 8)
    with pytest.raises(KVCacheExhaustedError):
        KVCachePool.for_mtp_history(layout, "cpu", "float16", 16, 1_000, memory=(10**9, 2_000))


def test_a31_misuse_of_empty_prompts_and_small_capacities_is_refused(make_pool):
    """vllm-project/vllm#7283: an empty prompt killed the whole server."""
    pool = case_pool(make_pool, 4, 4)
    with unchanged(pool), pytest.raises(ValueError, match="empty"):
        pool.bind_request([], 8)
    with unchanged(pool), pytest.raises(ValueError, match="empty"):
        pool.bind_with_prefix([], 8)
    a = pool.bind_request([1], 4)
    assert pool.finish_request(a, []) == 0
    assert st(pool) == (4, 0, 0, 0)
    for tokens, capacity in ((R(1, 9), 4), ([1], 0), ([1], -4)):
        with unchanged(pool), pytest.raises(ValueError, match=str(capacity)):
            pool.bind_request(tokens, capacity)
    assert pool.free_pages == 4


def test_a32_duplicate_id_in_a_step_is_refused_and_ids_are_not_reused(make_pool):
    """vllm-project/vllm#10583, vllm-project/vllm#15041: two live requests with one id."""
    pool = case_pool(make_pool, 4, 8)
    a = pool.bind_request(R(1, 4), 8)
    b = pool.bind_request(R(1, 4), 8)
    assert a != b
    before = pool.step
    with unchanged(pool, a, b), pytest.raises(ValueError, match=str(a)):
        pool.activate_step(a, a)
    assert pool.step is before  # still usable
    before.put(0, 0, *window(pool, 0, 4, 100))
    step = pool.activate_step(a, b)
    assert list(step.request_ids) == [a, b]
    pool.unbind_request(a)
    c = pool.bind_request(R(1, 4), 8)
    assert c not in (a, b)
    assert not pool.is_bound(a)
    assert pool.is_bound(c)


class _OneCapsule:
    """Hands out one and the same capsule, as a careless producer would."""

    def __init__(self, array):
        self.capsule = array.__dlpack__()
        self.device = array.__dlpack_device__()

    def __dlpack__(self, **_):
        return self.capsule

    def __dlpack_device__(self):
        return self.device


def test_a33_dlpack_capsules_never_consumed_do_not_leak(make_pool):
    """pytorch/pytorch#9297: unconsumed capsules kept their tensor for ever."""
    pool = case_pool(make_pool, 4, 8)
    view = pool.key_layer(0)
    gc.collect()
    before = sys.getrefcount(view)
    tracemalloc.start()
    try:
        for _ in range(10_000):
            view.__dlpack__()
        gc.collect()
        growth = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert sys.getrefcount(view) == before
    assert growth < 10_000, f"{growth} bytes are left of 10,000 capsules"


def test_a33_dlpack_capsule_is_consumed_once(make_pool):
    """NVIDIA/TensorRT-LLM#18310: a second consumer of one capsule freed it twice."""
    pool = case_pool(make_pool, 4, 8)
    producer = _OneCapsule(pool.key_layer(0))
    first = np.from_dlpack(producer)
    with pytest.raises((ValueError, RuntimeError, BufferError)):
        np.from_dlpack(producer)
    assert first.shape == (32, 2, 8)
    del producer
    gc.collect()
    pool.key_layer(0)[5] = 7.0
    assert (first[5] == 7).all()  # the capsule went first, the array lives


def test_a33_dlpack_views_outlive_view_and_pool():
    """NVIDIA/TensorRT-LLM#18310: the order in which wrapper and tensor went decided a crash."""
    pool = KVCachePool(2, 32, 2, 8, page_size=4)
    a = pool.bind_request(R(1, 8), 8)
    write(pool, a, 0, 8)
    own = np.asarray(pool.step.slot_indices(8))
    view = pool.key_layer(0)
    t = np.from_dlpack(view)
    assert t.shape == (32, 2, 8)
    assert t.strides == view.strides
    assert np.shares_memory(t, view)  # zero copy
    pool.step.put(0, 7, *window(pool, 7, 8, 9000))
    assert (t[own[7]] == 9007).all()  # a put is visible through it
    del view
    gc.collect()
    assert (t[own[6]] == 106).all()
    pool.close()
    del pool
    gc.collect()
    assert (t[own[6]] == 106).all()
    assert (t[own[7]] == 9007).all()
