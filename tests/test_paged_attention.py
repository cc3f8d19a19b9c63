"""CPU attention over pages against a dense softmax in float64."""

import threading
from typing import NamedTuple

import ml_dtypes
import numpy as np
import pytest

from kvpool.kernels.attention import paged_attention

BF16 = np.dtype(ml_dtypes.bfloat16)
F16 = np.dtype(np.float16)
F32 = np.dtype(np.float32)

# Unit roundoff of the dtype of the result, plus what float32 sums lose on the way.
TOLERANCE = {F32: 3e-6, F16: 2e-3, BF16: 1.6e-2}


class Case(NamedTuple):
    """Arguments of one call; `poison` slots belong to no visible position."""

    q: np.ndarray
    k_cache: np.ndarray
    v_cache: np.ndarray
    indptr: np.ndarray
    indices: np.ndarray
    lengths: np.ndarray
    page_size: int
    qo_indptr: np.ndarray

    def run(self, **options):
        return paged_attention(*self, **options)


def make_case(
    query_lens,
    lengths,
    *,
    page_size=16,
    heads=(6, 2),
    dim=24,
    dtype=F32,
    cache_dtype=None,
    seed=0,
):
    """Random queries over scrambled pages; every slot that no row reads holds NaN."""
    rng = np.random.default_rng(seed)
    num_q_heads, num_kv_heads = heads
    num_pages = [-(-length // page_size) for length in lengths]
    total_pages = sum(num_pages) + 3
    indices = rng.permutation(total_pages)[: sum(num_pages)].astype(np.int32)
    indptr = np.concatenate([[0], np.cumsum(num_pages)]).astype(np.int32)
    qo_indptr = np.concatenate([[0], np.cumsum(query_lens)]).astype(np.int32)
    lengths = np.asarray(lengths)

    shape = (total_pages * page_size, num_kv_heads, dim)
    caches = [np.full(shape, np.nan, cache_dtype or dtype) for _ in "kv"]
    for row in range(len(lengths)):
        for cache in caches:
            slots = slots_of(indptr, indices, lengths, page_size, row)
            cache[slots] = rng.standard_normal((len(slots), num_kv_heads, dim))
    q = rng.standard_normal((qo_indptr[-1], num_q_heads, dim)).astype(dtype)
    return Case(q, *caches, indptr, indices, lengths, page_size, qo_indptr)


def slots_of(indptr, indices, lengths, page_size, row):
    positions = np.arange(lengths[row])
    return indices[indptr[row] + positions // page_size] * page_size + positions % page_size


def dense(case, *, causal=True, scale=None):
    """Softmax attention, written out in float64."""
    q = case.q.astype(np.float64)
    group = q.shape[1] // case.k_cache.shape[1]
    scale = q.shape[2] ** -0.5 if scale is None else scale
    out = np.zeros((*q.shape[:2], case.v_cache.shape[2]))
    for row, length in enumerate(case.lengths):
        slots = slots_of(case.indptr, case.indices, case.lengths, case.page_size, row)
        keys = case.k_cache[slots].astype(np.float64).repeat(group, axis=1)
        values = case.v_cache[slots].astype(np.float64).repeat(group, axis=1)
        start, end = case.qo_indptr[row], case.qo_indptr[row + 1]
        for i in range(start, end):
            visible = length - (end - start) + (i - start) + 1 if causal else length
            if visible <= 0:
                continue
            scores = np.einsum("hd,khd->hk", q[i], keys[:visible]) * scale
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            weights /= weights.sum(axis=1, keepdims=True)
            out[i] = np.einsum("hk,khd->hd", weights, values[:visible])
    return out


def assert_matches_dense(case, *, causal=True, scale=None, tolerance=None):
    actual = case.run(causal=causal, scale=scale)
    assert actual.dtype == case.q.dtype
    tolerance = tolerance or TOLERANCE[case.q.dtype]
    expected = dense(case, causal=causal, scale=scale)
    np.testing.assert_allclose(actual.astype(np.float64), expected, tolerance, tolerance)


@pytest.mark.parametrize("page_size", [1, 4, 16, 64])
def test_attend_ragged_batch_matches_dense(page_size):
    # A whole prompt, a decode, a chunk behind a cached prefix, one token alone, a short window;
    # 97 = one tile of 96 keys and one more.
    case = make_case([70, 1, 40, 1, 5], [70, 97, 200, 1, 33], page_size=page_size)
    assert_matches_dense(case)


@pytest.mark.parametrize("page_size", [1, 16])
def test_attend_without_mask_matches_dense(page_size):
    case = make_case([10, 1, 3], [40, 130, 2], page_size=page_size)
    assert_matches_dense(case, causal=False)


@pytest.mark.parametrize("heads", [(1, 1), (4, 4), (9, 3), (8, 1), (16, 1), (40, 2)])
def test_attend_with_grouped_heads_matches_dense(heads):
    case = make_case([20, 1], [50, 100], heads=heads)
    assert_matches_dense(case)


@pytest.mark.parametrize("dim", [1, 7, 16, 64, 80])
def test_attend_with_each_dim_matches_dense(dim):
    case = make_case([33, 1], [40, 99], dim=dim)
    assert_matches_dense(case)


@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
def test_attend_in_half_precision_matches_dense(dtype):
    case = make_case([40, 1], [60, 150], dtype=dtype)
    assert_matches_dense(case)


@pytest.mark.parametrize("cache_dtype", [F16, BF16], ids=str)
def test_attend_float32_queries_over_half_precision_cache_matches_dense(cache_dtype):
    case = make_case([10, 1], [30, 110], cache_dtype=cache_dtype)
    assert_matches_dense(case)


@pytest.mark.parametrize("page_size", [1, 3, 16, 24, 1024])
def test_decode_over_many_chunks_matches_dense(page_size):
    # 512 keys a chunk: none, a part of one, one, one and a key, three and a part.
    case = make_case([1] * 5, [0, 70, 512, 513, 1600], page_size=page_size, dim=32)
    assert_matches_dense(case)


@pytest.mark.parametrize("cache_dtype", [F16, BF16], ids=str)
@pytest.mark.parametrize("heads", [(1, 1), (12, 2), (17, 1)])
def test_decode_with_each_size_of_group_matches_dense(heads, cache_dtype):
    # Groups of 1, 6 and 17: four heads to a block, and 17 are more than are "few".
    case = make_case([1, 1], [600, 33], heads=heads, dim=72, cache_dtype=cache_dtype)
    assert_matches_dense(case)


def test_decode_beside_prefill_gives_the_same_bits_as_alone():
    case = make_case([1, 40, 1], [700, 90, 600])
    together = case.run()
    for row, queries in ((0, slice(0, 1)), (2, slice(41, 42))):
        alone = case._replace(
            q=case.q[queries],
            indptr=np.array([0, case.indptr[row + 1] - case.indptr[row]]),
            indices=case.indices[case.indptr[row] : case.indptr[row + 1]],
            lengths=case.lengths[[row]],
            qo_indptr=np.array([0, 1]),
        )
        np.testing.assert_array_equal(alone.run(), together[queries])


def test_decode_when_one_chunk_holds_nan_gives_nan_in_that_row_only():
    case = make_case([1, 1], [1200, 600])
    expected = case.run()
    slots = slots_of(case.indptr, case.indices, case.lengths, case.page_size, 0)
    case.v_cache[slots[700], 0, 3] = np.nan
    case.k_cache[slots[1100], 1] = np.nan
    actual = case.run()
    assert (actual[1] == expected[1]).all()
    # Heads 0 .. 2 share KV head 0, where one value is NaN; 3 .. 5 share KV head 1.
    assert np.isnan(actual[0, :3, 3]).all()
    assert np.isnan(actual[0, 3:]).all()
    assert (np.delete(actual[0, :3] == expected[0, :3], 3, axis=1)).all()


def test_decode_peaks_far_apart_between_chunks_match_dense():
    # One score of the last chunk stands far above all others, and what went before is nothing.
    case = make_case([1], [1100], dim=16)
    slots = slots_of(case.indptr, case.indices, case.lengths, case.page_size, 0)
    case.k_cache[slots[1050]] *= 100
    assert_matches_dense(case, tolerance=1e-4)


def test_attend_with_own_scale_matches_dense():
    case = make_case([4], [30])
    assert_matches_dense(case, scale=0.5)
    assert_matches_dense(case, scale=0.0)


def test_attend_with_large_scores_matches_dense():
    # Scores reach 1000, where neighbours in float32 are 6e-5 apart.
    case = make_case([40, 1], [60, 200])
    assert_matches_dense(case, scale=40.0, tolerance=1e-3)


def test_attend_by_default_takes_one_query_per_row():
    case = make_case([1, 1, 1], [5, 100, 17])
    assert_matches_dense(case)
    np.testing.assert_array_equal(paged_attention(*case[:-1]), case.run())


def test_attend_when_v_has_another_dim_matches_dense():
    case = make_case([10, 1], [20, 30])
    case = case._replace(v_cache=np.ascontiguousarray(case.v_cache[:, :, :5]))
    assert_matches_dense(case)


def test_attend_rows_of_length_zero_gives_zeros():
    case = make_case([1, 1, 3, 0], [0, 9, 0, 12])
    assert_matches_dense(case)
    assert (case.run(out=np.full_like(case.q, np.nan))[[0, 2, 3, 4]] == 0).all()


def test_attend_more_queries_than_positions_gives_zeros_in_front():
    # Queries 0 .. 45 of 50 stand before the first of 4 positions.
    case = make_case([50], [4])
    assert_matches_dense(case)
    assert (case.run()[:46] == 0).all()


def test_attend_without_queries_returns_empty():
    case = make_case([0, 0], [5, 0])
    assert case.run().shape == (0, 6, 24)


@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_attend_behind_the_mask_ignores_what_is_there(poison):
    case = make_case([40, 8], [120, 20])
    expected = case.run()
    # The last position of row 0 is seen by its last query only.
    last = slots_of(case.indptr, case.indices, case.lengths, case.page_size, 0)[-1]
    case.k_cache[last] = poison
    case.v_cache[last] = poison
    # Without compilation NumPy warns of the infinity that the last query does see.
    with np.errstate(invalid="ignore"):
        actual = case.run()
    assert np.isnan(actual[39]).all()
    others = np.delete(np.arange(48), 39)
    np.testing.assert_allclose(actual[others], expected[others], 3e-6, 3e-6)


def test_attend_to_a_nan_key_gives_nan():
    case = make_case([1], [100])
    case.k_cache[case.indices[0] * 16] = np.nan
    assert np.isnan(case.run()).all()


@pytest.mark.parametrize("causal", [True, False])
def test_attend_with_more_threads_gives_the_same_bits(causal):
    case = make_case([150, 1, 1, 60, 1], [150, 300, 7, 200, 2100])
    one = case.run(causal=causal, num_threads=1)
    for num_threads in (2, 4, 100, None):
        np.testing.assert_array_equal(case.run(causal=causal, num_threads=num_threads), one)


def test_attend_from_several_threads_at_once_gives_the_same_bits():
    case = make_case([100, 1], [150, 300])
    one = case.run(num_threads=1)
    results = [None] * 4

    def attend(n):
        results[n] = case.run(num_threads=2)

    threads = [threading.Thread(target=attend, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in results:
        np.testing.assert_array_equal(result, one)


def test_attend_with_strided_queries_and_output_matches_dense():
    case = make_case([10, 1], [20, 30])
    fused = np.zeros((11, 10, 24), np.float32)
    fused[:, :6] = case.q
    out = np.zeros((6, 11, 24), np.float32)
    strided = case._replace(q=fused[:, :6])
    returned = strided.run(out=out.transpose(1, 0, 2))
    assert np.shares_memory(returned, out)
    np.testing.assert_array_equal(out.transpose(1, 0, 2), case.run())


def test_attend_accepts_any_integer_tables():
    case = make_case([10, 1], [20, 30])
    for dtype in (np.int32, np.int64):
        other = case._replace(
            indptr=case.indptr.astype(dtype),
            indices=case.indices.astype(dtype),
            lengths=case.lengths.astype(dtype),
            qo_indptr=case.qo_indptr.astype(dtype),
        )
        np.testing.assert_array_equal(other.run(), case.run())
