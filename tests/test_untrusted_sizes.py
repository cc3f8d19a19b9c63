"""Numbers that size a pool and its parts: checked before the first buffer, with the numbers."""

import math
import tracemalloc
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest

from kvpool import KVCacheLayout, KVCachePool, RadixCache, compute_static_kv_budget, paging
from kvpool_ext.pages import PageAllocator
from tests.helpers.pools import case_pool
from tests.helpers.untrusted import HUGE, NEGATIVE, NO_INTEGERS, described, every, scalars

# ---- what sizes a pool

POOL = {"num_layers": 1, "num_slots": 64, "num_kv_heads": 2, "head_dim": 8, "page_size": 4}


@pytest.mark.parametrize("name", [*POOL, "max_batch_size", "max_seq_len", "eviction_history"])
def test_a_pool_of_impossible_size_is_refused_before_a_buffer(name, monkeypatch):
    def no_buffer(*_):
        raise AssertionError("a buffer was asked for")

    monkeypatch.setattr("kvpool.device.Device.zeros", no_buffer, raising=False)
    monkeypatch.setattr("kvpool.pool.extent.KVStorage", no_buffer)
    bad = [*every((*NEGATIVE, 0)), *NO_INTEGERS, *every((2**62, 2**63, 2**64, 10**30))]
    for value in bad:
        if value is None and name in ("max_seq_len", "eviction_history"):
            continue
        is_integer = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
        if is_integer and value in (0, 2**62) and name not in POOL:
            continue
        with pytest.raises((TypeError, ValueError), match=r"\w") as caught:
            KVCachePool(**(POOL | {name: value}))
        assert len(str(caught.value)) < 500
        assert "AssertionError" not in str(caught.value), described(value)


def test_products_that_have_no_addresses_are_refused_with_the_numbers():
    with pytest.raises(ValueError, match=r"num_slots .* 1152921504606846976 pages of 4"):
        KVCachePool(**(POOL | {"num_slots": 2**62}))
    with pytest.raises(ValueError, match=r"1000000000000 heads .* more than have addresses"):
        KVCachePool(**(POOL | {"num_kv_heads": 10**12, "head_dim": 10**12}))
    with pytest.raises(ValueError, match=r"1000000000000 elements"):
        KVCachePool(**(POOL | {"num_layers": 2**40, "head_dim": 10**12}))


def test_a_pool_that_no_machine_holds_says_how_large_it_would_be():
    # 2 x 2^54 bytes: addresses there are, and no allocator gives them.
    with pytest.raises(MemoryError, match=r"no \d+ bytes \(\d+\.\d\d GiB\) for K and V of 64"):
        KVCachePool(1, 64, 2**20, 2**26, page_size=4)


@pytest.mark.parametrize("options", [{"max_seq_len": 2**62}, {"max_batch_size": 2**62}])
def test_graph_buffers_are_sized_by_what_the_pool_can_hold(make_pool, options):
    pool = case_pool(make_pool, 4, 16, **options)
    pool.bind_request([1], 16)
    tracemalloc.start()
    pool.decode_graph.prepare(1, 0)
    pool.verify_graph.prepare(4, 0, 4)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20


@pytest.mark.parametrize("factory", ["for_testing", "for_mtp", "for_mtp_history", "allocate"])
def test_factories_refuse_layouts_that_no_pool_can_have(factory):
    layout = KVCacheLayout(1, 1, 8, max_batch_size=2**40, max_seq_len=2**40)
    calls = {
        "for_testing": lambda: KVCachePool.for_testing(layout),
        "for_mtp": lambda: KVCachePool.for_mtp(layout, "cpu", "float16", 16),
        "for_mtp_history": lambda: KVCachePool.for_mtp_history(
            layout, "cpu", "float16", 16, 2**80
        ),
        "allocate": lambda: KVCachePool.allocate(layout, "cpu", "float16", 0.9),
    }
    with pytest.raises(ValueError, match="pages of"):
        calls[factory]()


def test_memory_readings_are_numbers():
    layout = KVCacheLayout(1, 1, 8)
    for memory in ((1e9, 1e9), (math.nan, 1), (True, 1), (10, -1), (1, 2), (1,), ("1", "1")):
        with pytest.raises((TypeError, ValueError), match="memory must be"):
            KVCachePool.allocate(layout, "cpu", "float16", 0.9, memory=memory)


LAYOUT = {
    "num_layers": 2,
    "num_kv_heads": 2,
    "head_dim": 8,
    "max_batch_size": 3,
    "max_seq_len": 16,
}
BUDGET = {
    "total": 10**9,
    "free": 10**8,
    "bytes_per_token": 64,
    "page_size": 16,
    "max_batch_size": 2,
    "max_seq_len": 100,
}


@pytest.mark.parametrize("name", LAYOUT)
def test_a_layout_is_of_plain_integers(name):
    for value in (*every((*NEGATIVE, 0)), *every((2**63, 2**64, 10**30)), *NO_INTEGERS):
        with pytest.raises((TypeError, ValueError), match=name):
            KVCacheLayout(**(LAYOUT | {name: value}))
    for number in scalars(LAYOUT[name]):
        layout = KVCacheLayout(**(LAYOUT | {name: number}))
        assert layout == KVCacheLayout(**LAYOUT)
        assert type(getattr(layout, name)) is int
    assert KVCacheLayout(**(LAYOUT | {name: np.uint8(255)})).bytes_per_token("float32") > 0


@pytest.mark.parametrize("name", BUDGET)
def test_a_budget_is_of_integers(name):
    def budget(**changes):
        return compute_static_kv_budget(mem_fraction=0.95, **(BUDGET | changes))

    for value in (*every(NEGATIVE), *NO_INTEGERS):
        with pytest.raises((TypeError, ValueError), match=name):
            budget(**{name: value})
    for number in scalars(BUDGET[name]):
        assert budget(**{name: number}) == budget()
    assert budget(**{name: 10**30} | ({"total": 10**31} if name == "free" else {})).num_slots >= 0


def test_a_fraction_is_a_real_number():
    for value in (0, -0.1, 1.1, math.nan, math.inf, 1e400, 10**30):
        with pytest.raises(ValueError, match="mem_fraction"):
            compute_static_kv_budget(mem_fraction=value, **BUDGET)
    for value in (True, "0.5", "9" * 5000, None, 1j, [0.5], Decimal("1e-999999999")):
        with pytest.raises(TypeError, match="mem_fraction"):
            compute_static_kv_budget(mem_fraction=value, **BUDGET)
    for value in (np.float32(0.5), np.float64(0.5), Fraction(1, 2)):
        assert compute_static_kv_budget(mem_fraction=value, **BUDGET).static_budget == 5 * 10**8


def test_page_arithmetic_is_exact_at_any_size():
    assert paging.num_pages_for_length(10**30 + 1, 10**15) == 10**15 + 1
    assert paging.round_up_to_page(np.uint8(250), np.uint8(100)) == 300
    assert paging.first_cache_len_in_next_page_bucket(np.uint8(200), np.uint8(200)) == 40_001
    assert paging.steps_until_page_boundary(np.uint64(2**64 - 1), np.int8(16)) == 1
    for value in (*NEGATIVE, *NO_INTEGERS):
        for verb in (
            paging.num_pages_for_length,
            paging.round_up_to_page,
            paging.steps_until_page_boundary,
            paging.first_cache_len_in_next_page_bucket,
        ):
            with pytest.raises((TypeError, ValueError), match="must be"):
                verb(value, 16)
            with pytest.raises((TypeError, ValueError), match="must be"):
                verb(16, value)


# ---- parts of their own


@pytest.mark.parametrize("name", ["page_size", "num_pages", "eviction_history"])
def test_a_tree_is_of_integers(name):
    for value in (*every((*NEGATIVE, *HUGE)), *NO_INTEGERS):
        if value is None and name == "eviction_history":
            continue
        with pytest.raises((TypeError, ValueError), match=rf"{name}|4300 digits"):
            RadixCache(**{name: value})
    for number in scalars(16):
        assert RadixCache(**{name: number}).total_size == 0


def test_an_allocator_is_of_integers():
    for value in (*every((*NEGATIVE, *HUGE)), *NO_INTEGERS):
        with pytest.raises((TypeError, ValueError), match=r"num_pages|4300 digits"):
            PageAllocator(value)
    allocator = PageAllocator(8)
    for value in (*every(NEGATIVE), *NO_INTEGERS):
        with pytest.raises((TypeError, ValueError), match="take expects"):
            allocator.take(value)
        with pytest.raises((TypeError, ValueError), match=r"page|\[1\]|tokens"):
            allocator.give([value])
    for value in every(HUGE):
        assert allocator.take(value) is None
        with pytest.raises(ValueError, match=r"page id|4300 digits"):
            allocator.give([value])
        with pytest.raises(ValueError, match=r"not one of the 8 pages|4300 digits"):
            allocator.is_free(value)
    assert allocator.num_free == 8
