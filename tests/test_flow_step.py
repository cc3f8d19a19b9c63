"""One forward pass: what a step writes, reads back and shows to kernels."""

import ml_dtypes
import numpy as np
import pytest

from tests.helpers.pools import R, case_pool, read, values, window, write

STORAGE = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
PAGE_SIZES = [1, 4, 16]


def random_kv(rng, *shape, dtype=np.float32):
    """Normal values, as the model's dtype holds them."""
    return tuple(rng.normal(size=shape).astype(np.float32).astype(dtype) for _ in range(2))


def bits(array):
    """An array as comparable bits."""
    array = np.ascontiguousarray(array)
    return array.view(np.dtype(f"u{array.dtype.itemsize}"))


@pytest.mark.parametrize("given", STORAGE.values(), ids=STORAGE)
@pytest.mark.parametrize("dtype", STORAGE)
@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_put_then_get_rounds_once_to_the_pools_dtype(make_pool, page_size, dtype, given):
    pool = make_pool(2, 48, 3, 5, page_size=page_size, dtype=dtype)
    rng = np.random.default_rng(7)
    a = pool.bind_request(R(1, 7), 13)
    b = pool.bind_request(R(1, 7), 13)
    step = pool.activate_step(a, b)
    written = [random_kv(rng, 2, 7, 3, 5, dtype=given) for _ in range(2)]
    for layer, (k, v) in enumerate(written):
        step.put(layer, 0, k, v)
    for layer, pair in enumerate(written):
        for got, want in zip(step.get(layer, 7), pair, strict=True):
            want = want.astype(np.float32).astype(STORAGE[dtype])
            assert got.dtype == want.dtype
            assert got.shape == (2, 7, 3, 5)
            assert (bits(got) == bits(want)).all()


def test_put_takes_double_precision(make_pool):
    pool = case_pool(make_pool, 4, 4)
    a = pool.bind_request(R(1, 4), 4)
    step = pool.activate_step(a)
    k, v = window(pool, 0, 4, 100)
    step.put(0, 0, k.astype(np.float64), v.astype(np.float64))
    got, _ = step.get(0, 4)
    assert got.dtype == np.float32
    assert (got == k).all()


def test_get_in_another_compute_dtype_converts(make_pool):
    pool = case_pool(make_pool, 4, 4, dtype="bfloat16", compute_dtype="float32")
    assert (pool.dtype, pool.compute_dtype) == ("bfloat16", "float32")
    assert not pool.kv_is_compute_dtype
    a = pool.bind_request(R(1, 4), 4)
    k, v = window(pool, 0, 4, 100)
    step = pool.activate_step(a)
    step.put(0, 0, k, v)
    got, _ = step.get(0, 4)
    assert got.dtype == np.float32
    assert (got == k).all()  # 100..103 are exact in bfloat16
    assert case_pool(make_pool, 4, 4).kv_is_compute_dtype


def test_put_lands_in_the_requests_own_slots_of_the_views(make_pool):
    pool = case_pool(make_pool, 4, 8)
    a = pool.bind_request(R(1, 6), 8)
    write(pool, a, 0, 6)
    assert pool.key_cache.shape == pool.value_cache.shape == (2, 32, 2, 8)
    ids = np.asarray(pool.request(a).page_ids)
    for layer in range(2):
        for position in range(6):
            slot = ids[position // 4] * 4 + position % 4
            assert (pool.key_cache[layer, slot] == 100 + position + 1000 * layer).all()
            assert (pool.key_layer(layer)[slot] == pool.key_cache[layer, slot]).all()
            assert (pool.value_layer(layer)[slot] == -(100 + position + 1000 * layer)).all()
    assert np.shares_memory(pool.key_layer(1), pool.key_cache)
    assert np.shares_memory(pool.value_layer(1), pool.value_cache)


def test_put_with_a_start_per_row(make_pool):
    pool = case_pool(make_pool, 4, 8)
    a = pool.bind_request(R(1, 3), 8)
    b = pool.bind_request(R(50, 56), 12)
    write(pool, a, 0, 3)
    write(pool, b, 0, 7)
    for start in ([3, 7], (3, 7), np.array([3, 7]), np.array([3, 7], np.int32)):
        step = pool.activate_step(a, b)
        for layer in range(2):
            k = np.concatenate([window(pool, p, p + 2, 100, layer)[0] for p in (3, 7)])
            step.put(layer, start, k, -k)
    assert [pool.valid_len(i) for i in (a, b)] == [5, 9]
    assert read(pool, a, 5) == values(100, 0, 5)
    assert read(pool, b, 9) == values(100, 0, 9)


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_ragged_put_mixes_prefills_and_decodes(make_pool, page_size):
    pool = case_pool(make_pool, page_size, 48 // page_size + 16)
    a = pool.bind_request(R(1, 5), 16)
    b = pool.bind_request(R(50, 52), 8)
    c = pool.bind_request(R(60, 70), 16)
    write(pool, b, 0, 3)
    step = pool.activate_step(a, b, c)
    starts, counts = [0, 3, 0], [5, 1, 11]  # a prefill, a decode, a longer prefill
    indptr = np.cumsum([0, *counts])
    for layer in range(2):
        k = np.concatenate(
            [window(pool, s, s + n, 100, layer)[0][0] for s, n in zip(starts, counts, strict=True)]
        )
        step.put(layer, starts, k, -k, qo_indptr=indptr if layer else indptr.tolist())
    assert [pool.valid_len(i) for i in (a, b, c)] == [5, 4, 11]
    for i, length in ((a, 5), (b, 4), (c, 11)):
        assert read(pool, i, length) == values(100, 0, length)


def test_ragged_put_may_leave_rows_out(make_pool):
    pool = case_pool(make_pool, 4, 8)
    a = pool.bind_request(R(1, 4), 8)
    b = pool.bind_request(R(50, 53), 8)
    step = pool.activate_step(a, b)
    for layer in range(2):
        k, v = (x[0] for x in window(pool, 0, 4, 100, layer))
        step.put(layer, 0, k, v, qo_indptr=[0, 0, 4])
    assert [pool.valid_len(i) for i in (a, b)] == [0, 4]
    assert read(pool, b, 4) == values(100, 0, 4)


@pytest.mark.parametrize("index_dtype", [np.int64, np.int32])
def test_put_with_slots_given_once_for_all_layers(make_pool, index_dtype):
    pool = case_pool(make_pool, 4, 8)
    a = pool.bind_request(R(1, 6), 8)
    step = pool.activate_step(a)
    slots = step.window_slot_indices(0, 6)
    assert slots.dtype == np.int64
    if index_dtype is np.int32:
        slots = slots.astype(np.int32)
    for layer in range(2):
        step.put(layer, 0, *window(pool, 0, 6, 100, layer), slots=slots)
    if index_dtype is np.int64:
        assert pool.valid_len(a) == 6  # the step's own slots
    pool.mark_written(a, 6)
    assert read(pool, a, 6) == values(100, 0, 6)


def test_put_with_caller_made_slots_does_not_advance_valid(make_pool):
    pool = case_pool(make_pool, 4, 8)
    a = pool.bind_request(R(1, 4), 4)
    step = pool.activate_step(a)
    own = np.array(step.slot_indices(4))
    for layer in range(2):
        k, v = window(pool, 0, 4, 100, layer)
        step.put(layer, 0, k[:, ::-1].copy(), v[:, ::-1].copy(), slots=own[::-1].copy())
    assert pool.valid_len(a) == 0
    pool.mark_written(a, 4)
    assert read(pool, a, 4) == values(100, 0, 4)


def test_put_skips_negative_slots_of_single_tokens(make_pool):
    pool = case_pool(make_pool, 4, 8)
    a = pool.bind_request(R(1, 4), 4)
    write(pool, a, 0, 4)
    step = pool.activate_step(a)
    slots = np.array(step.slot_indices(4))
    slots[[0, 2]] = -1, -(2**40)
    step.put(0, 0, *window(pool, 0, 4, 900), slots=slots)
    k, _ = step.get(0, 4)
    assert k[0, :, 0, 0].tolist() == [100, 901, 102, 903]


def test_put_of_no_tokens_does_nothing(make_pool):
    pool = case_pool(make_pool, 4, 8)
    a = pool.bind_request(R(1, 4), 4)
    step = write(pool, a, 0, 4)
    step.put(0, 4, *window(pool, 4, 4, 900))
    assert read(pool, a, 4) == values(100, 0, 4)


def test_get_of_length_zero_is_empty(make_pool):
    pool = case_pool(make_pool, 4, 4)
    a = pool.bind_request(R(1, 6), 8)
    k, v = pool.activate_step(a).get(0, 0)
    assert k.shape == v.shape == (1, 0, 2, 8)


def test_get_padded_repeats_the_last_slot_of_short_rows(make_pool):
    pool = case_pool(make_pool, 4, 8)
    a = pool.bind_request(R(1, 4), 4)
    b = pool.bind_request(R(50, 59), 12)
    write(pool, a, 0, 4, 300)
    write(pool, b, 0, 10, 100)
    step = pool.activate_step(a, b)
    k, v = step.get(0, 10, padded=True)
    assert k[0, :, 0, 0].tolist() == [300, 301, 302, *[303] * 7]
    assert k[1, :, 0, 0].tolist() == values(100, 0, 10)
    assert (v == -k).all()
    slots = step.slot_indices(10)
    assert slots.shape == (20,)
    assert slots.dtype == np.int64
    own = np.asarray(pool.request(a).page_ids)[0] * 4
    assert slots[:10].tolist() == [own, own + 1, own + 2, *[own + 3] * 7]
    for got, want in zip(step.get(0, 10, padded=True, slots=slots), (k, v), strict=True):
        assert (got == want).all()


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_slot_indices_are_page_times_size_plus_offset(make_pool, page_size):
    pool = case_pool(make_pool, page_size, 64 // page_size)
    rows = [pool.bind_request(R(1, 5), 17), pool.bind_request(R(1, 5), 17)]
    step = pool.activate_step(*rows)
    ids = [np.asarray(pool.request(i).page_ids).tolist() for i in rows]

    def slot(row, position):
        return ids[row][position // page_size] * page_size + position % page_size

    assert step.slot_indices(17).tolist() == [slot(r, p) for r in (0, 1) for p in range(17)]
    uniform = step.window_slot_indices(3, 5)
    assert uniform.tolist() == [slot(r, p) for r in (0, 1) for p in range(3, 8)]
    ragged = step.window_slot_indices([3, 9], [2, 5])
    assert ragged.tolist() == [slot(0, p) for p in (3, 4)] + [slot(1, p) for p in range(9, 14)]
    assert step.window_slot_indices([16, 0], 1).tolist() == [slot(0, 16), slot(1, 0)]


def test_get_reads_into_arrays_of_the_caller(make_pool):
    pool = case_pool(make_pool, 4, 16)
    ids = [pool.bind_request(R(1, 6), 8) for _ in range(2)]
    for i, request in enumerate(ids):
        write(pool, request, 0, 6, base=100 * (i + 1))
    step = pool.activate_step(ids)
    out = tuple(np.full((2, 6, 2, 8), 7, np.float32) for _ in "kv")
    for layer in range(2):
        assert step.get(layer, 6, out=out) is out
        for found, expected in zip(out, step.get(layer, 6), strict=True):
            np.testing.assert_array_equal(found, expected)
    bad = np.empty((2, 6, 2, 16), np.float32)[..., ::2]
    for other in (np.empty((2, 5, 2, 8), np.float32), np.empty((2, 6, 2, 8), np.float64), bad):
        with pytest.raises(ValueError, match="Invalid out: expected contiguous"):
            step.get(0, 6, out=(out[0], other))
