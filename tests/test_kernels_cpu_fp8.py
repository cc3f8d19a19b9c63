"""CPU kernels of FP8 caches against the reference, bit for bit, and attention over their pages."""

import itertools
import os
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from kvpool.kernels import cpu, for_device
from kvpool.kernels.attention import paged_attention
from tests import fp8_reference as reference

BF16 = np.dtype(ml_dtypes.bfloat16)
F16 = np.dtype(np.float16)
F32 = np.dtype(np.float32)
F64 = np.dtype(np.float64)
FORMATS = reference.FORMATS

ROOT = Path(__file__).resolve().parent.parent
TOTAL_SLOTS = 23
HEADS, DIM = 3, 5
K_SCALE, V_SCALE = 0.015, 0.3


@pytest.fixture
def rng():
    return np.random.default_rng(20)


def random_codes(rng, *, slots=TOTAL_SLOTS, heads=HEADS, dim=DIM):
    return rng.integers(0, 256, (slots, heads, dim)).astype(np.uint8)


def random_rows(rng, shape, dtype=F32):
    """Rows in reach of FP8, with some that saturate, are zero or not finite."""
    rows = rng.normal(0, 2, shape)
    special = np.array([0.0, -0.0, 1e4, -1e38, np.inf, -np.inf, np.nan, 1e-7])
    rows = np.where(rng.random(shape) < 0.2, rng.choice(special, shape), rows)
    with np.errstate(over="ignore"):
        return rows.astype(F32).astype(dtype)


def assert_same_values(actual, expected):
    """Equal bits, but for the payloads of NaN."""
    assert actual.dtype == expected.dtype
    actual, expected = (np.ascontiguousarray(array) for array in (actual, expected))
    is_nan = np.isnan(expected.astype(F32))
    np.testing.assert_array_equal(np.isnan(actual.astype(F32)), is_nan)
    unsigned = f"u{actual.dtype.itemsize}"
    np.testing.assert_array_equal(actual.view(unsigned)[~is_nan], expected.view(unsigned)[~is_nan])


def test_for_device_cpu_has_both_kernels():
    assert for_device("cpu").scatter_fp8 is cpu.scatter_fp8
    assert for_device("cpu").gather_fp8 is cpu.gather_fp8


# Scatter


@pytest.mark.parametrize(
    ("name", "source"), list(itertools.product(FORMATS, (F32, F16, BF16, F64))), ids=str
)
def test_scatter_each_dtype_matches_reference(name, source, rng):
    k_cache, v_cache = random_codes(rng), random_codes(rng)
    k_rows, v_rows = (random_rows(rng, (7, HEADS, DIM), source) for _ in "kv")
    slots = rng.permutation(TOTAL_SLOTS)[:7]
    k_expected, v_expected = k_cache.copy(), v_cache.copy()
    k_expected[slots] = reference.quantise(k_rows, K_SCALE, name)
    v_expected[slots] = reference.quantise(v_rows, V_SCALE, name)
    cpu.scatter_fp8(k_cache, v_cache, k_rows, v_rows, slots, name, K_SCALE, V_SCALE)
    np.testing.assert_array_equal(k_cache, k_expected)
    np.testing.assert_array_equal(v_cache, v_expected)


@pytest.mark.parametrize("slot_dtype", [np.int64, np.int32])
def test_scatter_slots_outside_are_not_written(slot_dtype, rng):
    cache = random_codes(rng)
    rows = random_rows(rng, (7, HEADS, DIM))
    # 20 is the first slot that the caller keeps out of reach, 23 the first past the end.
    slots = np.array([3, -1, 20, 19, TOTAL_SLOTS, -(2**31), 2**31 - 1], slot_dtype)
    expected = cache.copy()
    expected[[3, 19]] = reference.quantise(rows[[0, 3]], K_SCALE, FORMATS[0])
    cpu.scatter_fp8(cache, cache, rows, rows, slots, FORMATS[0], K_SCALE, K_SCALE, num_slots=20)
    np.testing.assert_array_equal(cache, expected)


def test_scatter_limit_past_the_end_stops_at_the_end(rng):
    buffer = random_codes(rng)
    rows = random_rows(rng, (2, HEADS, DIM))
    cache, expected = buffer[:4], buffer.copy()
    expected[1] = reference.quantise(rows[0], 1.0, FORMATS[1])
    cpu.scatter_fp8(cache, cache, rows, rows, np.array([1, 4]), FORMATS[1], 1, 1, num_slots=100)
    np.testing.assert_array_equal(buffer, expected)


@pytest.mark.parametrize("name", FORMATS)
def test_scatter_strided_rows_match_reference(name, rng):
    n, source = 6, BF16
    fused = random_rows(rng, (n, 3 * HEADS, DIM), source)
    sources = {
        "slices of a fused projection": (fused[:, HEADS : 2 * HEADS], fused[:, 2 * HEADS :]),
        "heads first": (random_rows(rng, (HEADS, n, DIM), source).transpose(1, 0, 2),) * 2,
        "dim before heads": (random_rows(rng, (n, DIM, HEADS), source).transpose(0, 2, 1),) * 2,
        "every second row": (random_rows(rng, (2 * n, HEADS, DIM), source)[::2],) * 2,
        "rows from the last": (random_rows(rng, (n, HEADS, DIM), source)[::-1],) * 2,
        "one row for all": (np.broadcast_to(fused[:1, :HEADS], (n, HEADS, DIM)),) * 2,
    }
    slots = rng.permutation(TOTAL_SLOTS)[:n]
    for layout, (k_rows, v_rows) in sources.items():
        k_cache, v_cache = random_codes(rng), random_codes(rng)
        cpu.scatter_fp8(k_cache, v_cache, k_rows, v_rows, slots, name, K_SCALE, V_SCALE)
        assert (k_cache[slots] == reference.quantise(k_rows, K_SCALE, name)).all(), layout
        assert (v_cache[slots] == reference.quantise(v_rows, V_SCALE, name)).all(), layout


@pytest.mark.parametrize(("heads", "dim"), [(1, 1), (1, 7), (5, 1), (2, 64), (3, 33), (8, 128)])
def test_move_odd_shapes_matches_reference(heads, dim, rng):
    name = FORMATS[0]
    cache = random_codes(rng, heads=heads, dim=dim)
    rows = random_rows(rng, (4, heads, dim))
    slots = np.array([5, 0, 22, 7])
    expected = cache.copy()
    expected[slots] = reference.quantise(rows, K_SCALE, name)
    cpu.scatter_fp8(cache, cache, rows, rows, slots, name, K_SCALE, K_SCALE)
    np.testing.assert_array_equal(cache, expected)
    k_out, v_out = np.empty_like(rows), np.empty_like(rows)
    cpu.gather_fp8(cache, cache, slots, name, K_SCALE, V_SCALE, k_out, v_out)
    assert_same_values(k_out, reference.dequantise(expected[slots], K_SCALE, name))
    assert_same_values(v_out, reference.dequantise(expected[slots], V_SCALE, name))


def test_move_when_v_has_another_dim_keeps_each_shape(rng):
    name = FORMATS[1]
    k_cache, v_cache = random_codes(rng), random_codes(rng, dim=2)
    slots = np.array([4, 9])
    k_rows, v_rows = random_rows(rng, (2, HEADS, DIM)), random_rows(rng, (2, HEADS, 2))
    cpu.scatter_fp8(k_cache, v_cache, k_rows, v_rows, slots, name, K_SCALE, V_SCALE)
    np.testing.assert_array_equal(k_cache[slots], reference.quantise(k_rows, K_SCALE, name))
    np.testing.assert_array_equal(v_cache[slots], reference.quantise(v_rows, V_SCALE, name))
    k_out, v_out = np.empty_like(k_rows), np.empty_like(v_rows)
    cpu.gather_fp8(k_cache, v_cache, slots, name, K_SCALE, V_SCALE, k_out, v_out)
    assert_same_values(k_out, reference.dequantise(k_cache[slots], K_SCALE, name))
    assert_same_values(v_out, reference.dequantise(v_cache[slots], V_SCALE, name))


# Gather


@pytest.mark.parametrize(
    ("name", "wanted"), list(itertools.product(FORMATS, (F32, F16, BF16))), ids=str
)
def test_gather_each_dtype_matches_reference(name, wanted, rng):
    k_cache, v_cache = random_codes(rng), random_codes(rng)
    slots = rng.permutation(TOTAL_SLOTS)[:7]
    slots[4] = slots[1]
    k_out, v_out = (np.empty((7, HEADS, DIM), wanted) for _ in "kv")
    cpu.gather_fp8(k_cache, v_cache, slots, name, K_SCALE, V_SCALE, k_out, v_out)
    assert_same_values(k_out, reference.dequantise(k_cache[slots], K_SCALE, name, wanted))
    assert_same_values(v_out, reference.dequantise(v_cache[slots], V_SCALE, name, wanted))


@pytest.mark.parametrize("slot_dtype", [np.int64, np.int32])
def test_gather_slots_outside_reads_zeros(slot_dtype, rng):
    cache = random_codes(rng)
    slots = np.array([2, -1, TOTAL_SLOTS, TOTAL_SLOTS - 1], slot_dtype)
    k_out, v_out = (np.full((4, HEADS, DIM), np.nan, F32) for _ in "kv")
    cpu.gather_fp8(cache, cache, slots, FORMATS[0], K_SCALE, K_SCALE, k_out, v_out)
    expected = reference.dequantise(cache[slots * (slots < TOTAL_SLOTS)], K_SCALE, FORMATS[0])
    expected[1:3] = 0
    assert_same_values(k_out, expected)
    assert_same_values(v_out, expected)


def test_gather_into_strided_rows_matches_reference(rng):
    cache = random_codes(rng)
    out = np.zeros((2, HEADS, 4, DIM), BF16)
    slots = np.array([1, 8, -1, 3])
    rows = [heads_first.transpose(1, 0, 2) for heads_first in out]
    cpu.gather_fp8(cache, cache, slots, FORMATS[1], K_SCALE, K_SCALE, *rows)
    expected = reference.dequantise(cache[slots], K_SCALE, FORMATS[1], BF16)
    expected[2] = 0
    assert_same_values(rows[0], expected)
    assert_same_values(rows[1], expected)


def test_call_without_slots_changes_nothing(rng):
    cache = random_codes(rng)
    expected = cache.copy()
    none, no_rows = np.empty(0, np.int64), np.empty((0, HEADS, DIM), F32)
    cpu.scatter_fp8(cache, cache, no_rows, no_rows, none, FORMATS[0], 1.0, 1.0)
    cpu.gather_fp8(cache, cache, none, FORMATS[0], 1.0, 1.0, no_rows, no_rows)
    np.testing.assert_array_equal(cache, expected)


# Attention


def make_pages(rng, name, *, heads=2, dim=24, page_size=16):
    """Tables of three rows over scrambled pages, and codes; slots that no row reads hold NaN."""
    lengths, query_lens = np.array([130, 1, 33]), np.array([50, 1, 4])
    num_pages = -(-lengths // page_size)
    indices = rng.permutation(sum(num_pages) + 2)[: sum(num_pages)].astype(np.int32)
    indptr = np.concatenate([[0], np.cumsum(num_pages)])
    qo_indptr = np.concatenate([[0], np.cumsum(query_lens)])
    caches = [
        np.full(((sum(num_pages) + 2) * page_size, heads, dim), 0x7F, np.uint8) for _ in "kv"
    ]
    slots = []
    for row, length in enumerate(lengths):
        positions = np.arange(length)
        pages = indices[indptr[row] + positions // page_size]
        slots.append(pages * page_size + positions % page_size)
        for cache, scale in zip(caches, (K_SCALE, V_SCALE), strict=True):
            rows = rng.standard_normal((length, heads, dim))
            cache[slots[-1]] = reference.quantise(rows, scale, name)
    tables = indptr, indices, lengths, page_size, qo_indptr
    return caches, tables, slots


def dense(q, keys, values, slots, qo_indptr):
    """Causal softmax attention over float64 K and V, written out."""
    out = np.zeros(q.shape)
    group = q.shape[1] // keys.shape[1]
    for row, row_slots in enumerate(slots):
        row_keys = keys[row_slots].repeat(group, axis=1)
        row_values = values[row_slots].repeat(group, axis=1)
        start, end = qo_indptr[row], qo_indptr[row + 1]
        for i in range(start, end):
            seen = len(row_slots) - (end - i) + 1
            scores = np.einsum("hd,khd->hk", q[i], row_keys[:seen]) * q.shape[2] ** -0.5
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            weights /= weights.sum(axis=1, keepdims=True)
            out[i] = np.einsum("hk,khd->hd", weights, row_values[:seen])
    return out


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(F32, 3e-6), (BF16, 1.6e-2)], ids=str)
def test_attend_over_codes_matches_dense(dtype, tolerance, name, rng):
    (k_cache, v_cache), tables, slots = make_pages(rng, name)
    q = rng.standard_normal((tables[-1][-1], 6, 24)).astype(dtype)
    options = {"fp8_format": name, "k_scale": K_SCALE, "v_scale": V_SCALE}
    actual = paged_attention(q, k_cache, v_cache, *tables, **options)
    assert actual.dtype == dtype
    keys = reference.dequantise(k_cache, K_SCALE, name, F64)
    values = reference.dequantise(v_cache, V_SCALE, name, F64)
    expected = dense(q.astype(F64), keys, values, slots, tables[-1])
    np.testing.assert_allclose(actual.astype(F64), expected, tolerance, tolerance)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("heads", "dim", "page_size"), [(2, 24, 16), (1, 7, 1), (2, 64, 4)])
def test_attend_over_codes_gives_the_bits_of_a_gathered_cache(heads, dim, page_size, name, rng):
    codes, tables, _ = make_pages(rng, name, heads=heads, dim=dim, page_size=page_size)
    everything = np.arange(len(codes[0]))
    floats = [np.empty(codes[0].shape, F32) for _ in "kv"]
    cpu.gather_fp8(*codes, everything, name, K_SCALE, V_SCALE, *floats)
    q = rng.standard_normal((tables[-1][-1], 4 * heads, dim)).astype(F32)
    options = {"fp8_format": name, "k_scale": K_SCALE, "v_scale": V_SCALE}
    seen = paged_attention(q, *codes, *tables, **options)
    np.testing.assert_array_equal(seen, paged_attention(q, *floats, *tables))
    assert np.isfinite(seen).all()


def test_run_without_jit_gives_the_same_codes():
    # Coverage runs read the kernels as plain Python; so does this one, in a process of its own.
    code = """
import numpy as np
from kvpool.kernels import cpu
from kvpool.kernels.attention import paged_attention
from tests import fp8_reference as reference
rows = np.linspace(-3, 3, 24, dtype=np.float32).reshape(4, 2, 3)
slots, table = np.arange(4), (np.array([0, 2]), np.array([1, 0]), np.array([4]), 2)
for name in reference.FORMATS:
    cache, out = np.ones((4, 2, 3), np.uint8), np.empty((4, 2, 3), np.float32)
    turned = rows[:, ::-1].copy()[:, ::-1]
    cpu.scatter_fp8(cache, cache.copy(), rows, turned, slots, name, 0.3, 0.3)
    assert (cache == reference.quantise(rows, 0.3, name)).all()
    cpu.gather_fp8(cache, cache, slots, name, 0.3, 0.3, out, out[:, ::-1].copy()[:, ::-1])
    assert (out == reference.dequantise(cache, 0.3, name)).all()
    scales = {"fp8_format": name, "k_scale": 0.3, "v_scale": 0.3}
    seen = paged_attention(rows[:1], cache, cache, *table, **scales)
    assert (seen == paged_attention(rows[:1], out, out, *table)).all()
"""
    environment = {**os.environ, "NUMBA_DISABLE_JIT": "1"}
    command = [sys.executable, "-W", "error", "-c", code]
    subprocess.run(command, cwd=ROOT, env=environment, check=True)
