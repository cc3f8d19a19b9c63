"""What a token costs, how many fit, and the factories that size a pool by it."""

import json
from fractions import Fraction
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as some

from kvpool import (
    DEFAULT_PAGE_SIZE,
    KVCacheExhaustedError,
    KVCacheLayout,
    KVCachePool,
    StaticKVBudget,
    compute_static_kv_budget,
)
from tests.helpers.pools import R, cache_prompt, st

CONFIG = {
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "hidden_size": 64,
}


def shape(layout):
    return layout.num_layers, layout.num_kv_heads, layout.head_dim


def as_object(config):
    """The same config as attributes, nested parts too."""
    return SimpleNamespace(
        **{k: as_object(v) if isinstance(v, dict) else v for k, v in config.items()}
    )


@pytest.mark.parametrize(
    ("dtype", "itemsize"),
    [
        ("float32", 4),
        ("float16", 2),
        ("bfloat16", 2),
        ("float8_e4m3fn", 1),
        ("float8_e5m2", 1),
        (np.float32, 4),
        (np.dtype("float16"), 2),
    ],
)
def test_bytes_per_token_counts_k_and_v_of_every_layer(dtype, itemsize):
    layout = KVCacheLayout(3, 2, 5)
    assert layout.bytes_per_token(dtype) == 2 * 3 * 2 * 5 * itemsize


def test_bytes_per_token_of_unknown_dtype_raises():
    with pytest.raises(ValueError, match="int8"):
        KVCacheLayout(3, 2, 5).bytes_per_token("int8")


def test_layout_is_frozen_and_has_defaults():
    layout = KVCacheLayout(3, 2, 5)
    assert (layout.max_batch_size, layout.max_seq_len) == (1, 2048)
    with pytest.raises(AttributeError):
        layout.num_layers = 4
    assert layout == KVCacheLayout(3, 2, 5)
    assert len({layout, KVCacheLayout(3, 2, 5)}) == 1


def test_from_config_reads_dict_path_and_object_alike(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG))
    for config in (CONFIG, path, str(path), as_object(CONFIG)):
        layout = KVCacheLayout.from_config(config, max_batch_size=3, max_seq_len=100)
        assert shape(layout) == (4, 2, 8)  # head_dim = 64 / 8
        assert (layout.max_batch_size, layout.max_seq_len) == (3, 100)


def test_from_config_takes_head_dim_as_given():
    layout = KVCacheLayout.from_config(CONFIG | {"head_dim": 24})
    assert shape(layout) == (4, 2, 24)  # not 64 / 8
    layout = KVCacheLayout.from_config(CONFIG | {"head_dim": None})
    assert shape(layout) == (4, 2, 8)


def test_from_config_without_kv_heads_has_one_for_each_query_head():
    config = {k: v for k, v in CONFIG.items() if k != "num_key_value_heads"}
    assert shape(KVCacheLayout.from_config(config)) == (4, 8, 8)
    assert shape(KVCacheLayout.from_config(config | {"num_key_value_heads": None})) == (4, 8, 8)


def test_from_config_reads_a_nested_text_config():
    nested = {"model_type": "vision", "text_config": CONFIG}
    for config in (nested, as_object(nested)):
        assert shape(KVCacheLayout.from_config(config)) == (4, 2, 8)


@pytest.mark.parametrize(
    ("kv_heads", "tp_size", "expected"),
    [
        (8, 1, 8),
        (8, 2, 4),
        (8, 8, 1),
        (2, 4, 1),  # fewer heads than ranks: replicated
        (1, 8, 1),
    ],
)
def test_from_config_divides_or_replicates_kv_heads(kv_heads, tp_size, expected):
    config = CONFIG | {"num_key_value_heads": kv_heads}
    assert KVCacheLayout.from_config(config, tp_size=tp_size).num_kv_heads == expected


@pytest.mark.parametrize(
    ("changes", "tp_size", "message"),
    [
        ({"num_key_value_heads": 6, "num_attention_heads": 12, "hidden_size": 96}, 4, "6"),
        ({"num_key_value_heads": 3, "num_attention_heads": 12, "hidden_size": 96}, 4, "3"),
        ({"hidden_size": 65}, 1, "65"),
        ({}, 0, "0"),
        ({}, -1, "-1"),
        ({"num_hidden_layers": 0}, 1, "0"),
    ],
)
def test_from_config_with_sizes_that_do_not_divide_raises(changes, tp_size, message):
    with pytest.raises(ValueError, match=message):
        KVCacheLayout.from_config(CONFIG | changes, tp_size=tp_size)


@pytest.mark.parametrize("missing", ["num_hidden_layers", "num_attention_heads", "hidden_size"])
def test_from_config_names_what_is_missing(missing):
    config = {k: v for k, v in CONFIG.items() if k not in (missing, "num_key_value_heads")}
    with pytest.raises(ValueError, match=missing):
        KVCacheLayout.from_config(config)


@given(
    total=some.integers(0, 10**15),
    used=some.floats(0, 1),
    fraction=some.floats(1e-6, 1.0),
    bytes_per_token=some.integers(1, 10**6),
    page_size=some.sampled_from([1, 4, 16, 48]),
    max_batch_size=some.integers(1, 512),
    max_seq_len=some.integers(1, 10**6),
)
def test_budget_is_exact(
    total, used, fraction, bytes_per_token, page_size, max_batch_size, max_seq_len
):
    free = total - int(total * used)
    budget = compute_static_kv_budget(
        total, free, fraction, bytes_per_token, page_size, max_batch_size, max_seq_len
    )
    static = total * Fraction(repr(fraction)) // 1
    kv_budget = max(0, static - (total - free))
    by_memory = kv_budget // bytes_per_token // page_size
    by_batch = max_batch_size * -(-max_seq_len // page_size)
    assert isinstance(budget, StaticKVBudget)
    assert (budget.total, budget.free, budget.used) == (total, free, total - free)
    assert budget.static_budget == static
    assert budget.dynamic_reserve == total - static
    assert budget.kv_budget == kv_budget
    assert (budget.bytes_per_token, budget.page_size) == (bytes_per_token, page_size)
    assert budget.num_pages == min(by_memory, by_batch)
    assert budget.num_slots == budget.num_pages * page_size
    assert budget.limited_by == ("memory" if by_memory <= by_batch else "max_batch_size")
    assert all(isinstance(n, int) for n in (budget.num_slots, budget.static_budget))


def test_budget_takes_the_fraction_that_prints():
    assert int(100 * 0.29) == 28  # what binary arithmetic gives
    assert compute_static_kv_budget(100, 100, 0.29, 1, 1, 1000, 1000).static_budget == 29
    assert compute_static_kv_budget(10, 10, 1, 1, 1, 1000, 1000).static_budget == 10


def test_budget_tie_is_limited_by_memory():
    # 64 bytes hold 4 pages of 4 tokens of 4 bytes; the batch wants 2 * ceil(7 / 4) = 4 pages
    budget = compute_static_kv_budget(64, 64, 1.0, 4, 4, 2, 7)
    assert (budget.num_pages, budget.limited_by) == (4, "memory")
    budget = compute_static_kv_budget(80, 80, 1.0, 4, 4, 2, 7)
    assert (budget.num_pages, budget.limited_by) == (4, "max_batch_size")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"mem_fraction": 0}, "0"),
        ({"mem_fraction": 0.0}, "0"),
        ({"mem_fraction": -0.5}, "-0.5"),
        ({"mem_fraction": 1.01}, "1.01"),
        ({"mem_fraction": float("nan")}, "nan"),
        ({"mem_fraction": float("inf")}, "inf"),
        ({"free": 101}, "101"),
        ({"free": -1}, "-1"),
        ({"total": -1, "free": -1}, "-1"),
        ({"bytes_per_token": 0}, "0"),
        ({"page_size": 0}, "0"),
        ({"max_batch_size": 0}, "0"),
        ({"max_seq_len": 0}, "0"),
    ],
)
def test_budget_with_bad_numbers_raises(overrides, message):
    numbers = {"total": 100, "free": 100, "mem_fraction": 0.5, "bytes_per_token": 1}
    numbers |= {"page_size": 1, "max_batch_size": 1, "max_seq_len": 1}
    with pytest.raises(ValueError, match=message):
        compute_static_kv_budget(**(numbers | overrides))


def test_budget_prints_what_limits_it():
    gib = 1 << 30
    by_memory = str(compute_static_kv_budget(80 * gib, 30 * gib, 0.9, 131072, 16, 64, 4096))
    by_batch = str(compute_static_kv_budget(80 * gib, 80 * gib, 0.9, 131072, 16, 2, 4096))
    for text in (by_memory, by_batch):
        assert "GiB" in text
        assert "0.9" in text or "90" in text or "72" in text  # the fraction or 0.9 * 80 GiB
    assert "memory" in by_memory
    assert "8192" in by_batch.replace(",", "").replace("_", "")  # 2 * 4096 slots
    assert "max_batch_size" in by_batch
    nothing = str(compute_static_kv_budget(80 * gib, 30 * gib, 0.5, 131072, 16, 64, 4096))
    assert "mem_fraction" in nothing  # what a person can change
    assert by_memory != by_batch != nothing


def test_pool_has_the_budget_too():
    numbers = (1000, 900, 0.5, 7, 4, 3, 50)
    assert KVCachePool.compute_static_kv_budget(*numbers) == compute_static_kv_budget(*numbers)


def test_allocate_on_a_cpu_takes_the_cap(make_pool):
    layout = KVCacheLayout(2, 2, 8, max_batch_size=3, max_seq_len=30)
    pool = make_pool.keep(KVCachePool.allocate(layout, "cpu", "float16", 0.5))
    assert pool.page_size == DEFAULT_PAGE_SIZE == 16
    assert pool.num_slots == 3 * 32  # three times 30 rounded up to pages
    assert (pool.dtype, pool.device) == ("float16", "cpu")
    assert pool.layout == layout
    assert pool.prefix_reuse_enabled


def test_allocate_with_memory_given_follows_the_budget(make_pool):
    layout = KVCacheLayout(1, 2, 8, max_batch_size=3, max_seq_len=30)
    # 64 bytes a token at float16; half of 8,000 less 800 used = 3,200 bytes = 50 tokens
    pool = make_pool.keep(
        KVCachePool.allocate(layout, "cpu", "float16", 0.5, 4, memory=(8_000, 7_200))
    )
    assert (pool.num_slots, pool.num_pages) == (48, 12)
    with pytest.raises(KVCacheExhaustedError, match=r"\d") as caught:
        KVCachePool.allocate(layout, "cpu", "float16", 0.5, 16, memory=(2_000, 2_000))
    assert "mem_fraction" in str(caught.value)  # 15 tokens: explains what to change
    assert not caught.value.can_ever_fit


@pytest.mark.parametrize("mem_fraction", [0, -0.5, 1.01, float("nan")])
def test_allocate_with_a_bad_fraction_raises_on_a_cpu_too(mem_fraction):
    with pytest.raises(ValueError, match="mem_fraction"):
        KVCachePool.allocate(KVCacheLayout(1, 2, 8), "cpu", "float16", mem_fraction)


def test_allocate_hands_pool_options_on(make_pool):
    layout = KVCacheLayout(2, 2, 8, max_seq_len=32)
    pool = make_pool.keep(
        KVCachePool.allocate(
            layout, "cpu", "bfloat16", 0.9, 4, compute_dtype="float32", zero_rejected_kv=False
        )
    )
    assert (pool.k_scale, pool.v_scale) == (1.0, 1.0)
    assert pool.compute_dtype == "float32"
    assert not pool.zero_rejected_kv
    assert not pool.kv_is_compute_dtype


def test_for_testing_is_float32_with_pages_of_one(make_pool):
    layout = KVCacheLayout(2, 2, 8, max_batch_size=3, max_seq_len=30)
    pool = make_pool.keep(KVCachePool.for_testing(layout))
    assert (pool.dtype, pool.page_size, pool.num_slots) == ("float32", 1, 90)
    assert cache_prompt(pool, R(1, 5)) == 5
    assert st(pool) == (85, 5, 5, 0)


def test_for_mtp_history_rounds_up_and_reuses_nothing(make_pool):
    layout = KVCacheLayout(1, 2, 8)
    pool = make_pool.keep(
        KVCachePool.for_mtp_history(layout, "cpu", "float16", 16, 40, memory=(10**9, 10**9))
    )
    assert pool.num_slots == 48
    assert not pool.prefix_reuse_enabled
    assert cache_prompt(pool, R(1, 16)) == 0
    unlimited = make_pool.keep(KVCachePool.for_mtp_history(layout, "cpu", "float16", 16, 64))
    assert unlimited.num_slots == 64
