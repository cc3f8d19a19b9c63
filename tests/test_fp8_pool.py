"""FP8 pools: bytes in the cache, the compute dtype outside, scales per pool or per layer."""

import re

import ml_dtypes
import numpy as np
import pytest

from kvpool import KVCacheLayout, KVCachePool
from kvpool.attention import paged_attention
from tests.helpers.pools import assert_ledger, case_pool

LARGEST = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}
FORMATS = list(LARGEST)


def rows(shape, seed=0, dtype=np.float32):
    return np.random.default_rng(seed).standard_normal(shape, np.float32).astype(dtype)


def stored(values, dtype, scale):
    """The codes that the rule of the house gives, by NumPy and ml_dtypes."""
    with np.errstate(over="ignore", invalid="ignore"):
        quotient = values.astype(np.float32) / np.float32(scale)
    clipped = np.clip(quotient, -LARGEST[dtype], LARGEST[dtype])
    codes = clipped.astype(getattr(ml_dtypes, dtype)).view(np.uint8)
    return np.where(np.isnan(quotient), np.uint8(0x7F), codes)


def restored(codes, dtype, scale, compute=ml_dtypes.bfloat16):
    values = codes.view(getattr(ml_dtypes, dtype)).astype(np.float32) * np.float32(scale)
    return values.astype(compute)


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("source", [np.float32, np.float16, ml_dtypes.bfloat16, np.float64])
def test_put_converts_and_get_gives_the_compute_dtype(make_pool, dtype, source):
    pool = case_pool(make_pool, 4, 8, dtype=dtype, k_scale=0.015, v_scale=2.5)
    assert (pool.dtype, pool.compute_dtype, pool.fp8_format) == (dtype, "bfloat16", dtype)
    assert not pool.kv_is_compute_dtype
    request_id = pool.bind_request(range(10), 10)
    step = pool.activate_step(request_id)
    k, v = rows((1, 10, 2, 8), 1, source), rows((1, 10, 2, 8), 2, source)
    for layer in range(2):
        step.put(layer, 0, k, v)
    slots = np.asarray(step.slot_indices(10))
    for layer in range(2):
        assert pool.key_layer(layer).dtype == np.uint8
        k_codes, v_codes = pool.key_layer(layer)[slots], pool.value_layer(layer)[slots]
        np.testing.assert_array_equal(k_codes, stored(k[0], dtype, 0.015))
        np.testing.assert_array_equal(v_codes, stored(v[0], dtype, 2.5))
        got_k, got_v = step.get(layer, 10)
        assert got_k.dtype == got_v.dtype == ml_dtypes.bfloat16
        np.testing.assert_array_equal(got_k[0], restored(k_codes, dtype, 0.015))
        np.testing.assert_array_equal(got_v[0], restored(v_codes, dtype, 2.5))
    assert_ledger(pool)


@pytest.mark.parametrize("compute", ["float32", "float16", "bfloat16"])
def test_compute_dtype_can_be_chosen(make_pool, compute):
    pool = case_pool(make_pool, 4, 4, dtype="float8_e4m3fn", compute_dtype=compute)
    step = pool.activate_step(pool.bind_request([1, 2, 3], 3))
    k = rows((1, 3, 2, 8))
    step.put(0, 0, k, k)
    got = step.get(0, 3)[0]
    expected = restored(stored(k, "float8_e4m3fn", 1.0), "float8_e4m3fn", 1.0, got.dtype)
    assert (got.dtype.name, pool.compute_dtype) == (compute, compute)
    np.testing.assert_array_equal(got, expected)


def test_scales_per_layer_are_each_layers_own(make_pool):
    k_scale, v_scale = [0.5, 0.03], [1.0, 7.0]
    pool = case_pool(make_pool, 4, 4, dtype="float8_e4m3fn", k_scale=k_scale, v_scale=v_scale)
    assert pool.k_scale.dtype == np.float32
    assert pool.k_scale.tolist() == np.float32(k_scale).tolist()
    step = pool.activate_step(pool.bind_request([1, 2], 2))
    k = rows((1, 2, 2, 8))
    slots = np.asarray(step.slot_indices(2))
    for layer in range(2):
        step.put(layer, 0, k, k)
        found = pool.key_layer(layer)[slots], pool.value_layer(layer)[slots]
        expected = [stored(k[0], "float8_e4m3fn", s[layer]) for s in (k_scale, v_scale)]
        np.testing.assert_array_equal(found, expected)
        assert pool.layer_scales(layer) == tuple(
            float(np.float32(s[layer])) for s in (k_scale, v_scale)
        )


def test_values_past_the_range_saturate_and_nan_has_one_code(make_pool):
    pool = case_pool(make_pool, 4, 1, dtype="float8_e5m2")
    step = pool.activate_step(pool.bind_request([1], 1))
    k = np.full((1, 1, 2, 8), np.inf, np.float32)
    v = np.full((1, 1, 2, 8), -np.nan, np.float32)
    step.put(0, 0, k, v)
    slot = int(step.slot_indices(1)[0])
    assert (pool.key_layer(0)[slot] == 0x7B).all()
    assert (pool.value_layer(0)[slot] == 0x7F).all()
    assert (step.get(0, 1)[0].astype(np.float32) == 57344.0).all()


def test_what_was_not_written_reads_as_zeros(make_pool):
    pool = case_pool(make_pool, 4, 2, dtype="float8_e4m3fn", k_scale=3.0)
    request_id = pool.bind_request([1, 2, 3, 4, 5], 8)
    step = pool.activate_step(request_id)
    k = rows((1, 5, 2, 8))
    step.put(0, 0, k, k)
    got_k, _ = step.get(0, 8)
    assert got_k[0, :5].any()
    assert not got_k[0, 5:].any()
    assert not step.get(1, 8)[0].any()
    step.truncate_to(2, 5)
    assert not step.get(0, 8)[0][0, 2:].any()


def test_fork_copies_codes(make_pool):
    pool = case_pool(make_pool, 4, 8, dtype="float8_e4m3fn", k_scale=0.1)
    parent = pool.bind_request(range(6), 8)
    k = rows((1, 6, 2, 8))
    step = pool.activate_step(parent)
    for layer in range(2):
        step.put(layer, 0, k, -k)
    expected = step.get(1, 6)
    child = pool.fork_request(parent, 12)
    for found, want in zip(pool.activate_step(child).get(1, 6), expected, strict=True):
        np.testing.assert_array_equal(found, want)
    pool.unbind_requests()


@pytest.mark.parametrize("dtype", FORMATS)
def test_attention_reads_codes_with_the_layers_scales(make_pool, dtype):
    options = {"page_size": 4, "max_batch_size": 2}
    eight = make_pool(2, 64, 2, 8, dtype=dtype, k_scale=[0.02, 0.3], v_scale=[0.5, 1], **options)
    plain = make_pool(2, 64, 2, 8, dtype="float32", **options)
    tables, steps = [], []
    for pool in (eight, plain):
        ids = [pool.bind_request(range(n), n) for n in (5, 11)]
        steps.append(pool.activate_step(*ids))
    k, v = rows((16, 2, 8), 1), rows((16, 2, 8), 2)
    q = rows((16, 6, 8), 3)
    qo_indptr = [0, 5, 16]
    for layer in range(2):
        steps[0].put(layer, 0, k, v, qo_indptr=qo_indptr)
        # The plain pool holds what the other one's codes stand for.
        scales = eight.layer_scales(layer)
        k2, v2 = (
            restored(stored(a, dtype, s), dtype, s, np.float32)
            for a, s in zip((k, v), scales, strict=True)
        )
        steps[1].put(layer, 0, k2, v2, qo_indptr=qo_indptr)
        tables = [step.page_table([5, 11]) for step in steps]
        found, expected = (
            paged_attention(q, pool, layer, table, qo_indptr=qo_indptr)
            for pool, table in zip((eight, plain), tables, strict=True)
        )
        np.testing.assert_allclose(found, expected, rtol=0, atol=3e-6)


def test_budget_counts_one_byte(make_pool):
    layout = KVCacheLayout(2, 2, 8, 4, 64)
    made = KVCachePool.allocate(layout, "cpu", "float8_e4m3fn", 1.0, 4, memory=(2**20, 2**14))
    pool = make_pool.keep(made)
    # 2 layers x 2 heads x 8 dims x 2 = 64 bytes a token, 16 KiB hold 256 tokens: just the cap.
    assert layout.bytes_per_token("float8_e4m3fn") == 64
    assert pool.num_slots == 256
    assert pool.key_cache.nbytes == 256 * 32


@pytest.mark.parametrize("scale", [1e-60, 1e-40, 1e60])
def test_scale_that_float32_cannot_hold_raises(scale):
    with pytest.raises(
        ValueError, match=rf"k_scale must be finite and > 0 .*{re.escape(str(scale))}"
    ):
        KVCachePool(1, 16, 1, 8, dtype="float8_e4m3fn", k_scale=scale)


def test_warm_up_touches_nothing(make_pool):
    for dtype in ("float32", *FORMATS):
        pool = case_pool(make_pool, 4, 2, dtype=dtype)
        pool.key_cache[...] = 1
        pool.warm_up()
        assert (pool.key_cache == 1).all()
