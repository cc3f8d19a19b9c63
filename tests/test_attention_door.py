"""The door for model code: what it checks, and that it reads the pool's own pages."""

import numpy as np
import pytest

from kvpool import KVCacheStateError
from kvpool.attention import PagedAttention, paged_attention

HEADS, DIM, Q_HEADS = 2, 8, 4


@pytest.fixture
def pool(make_pool):
    return make_pool(2, 64, HEADS, DIM, page_size=4)


@pytest.fixture
def rng():
    return np.random.default_rng(0)


def bind_written(pool, rng, length):
    """A request with random K and V at `[0, length)` on both layers, and these."""
    request = pool.bind_request(rng.integers(0, 1000, length, dtype=np.int32), length + 4)
    step = pool.activate_step(request)
    written = []
    for layer in range(2):
        k, v = rng.standard_normal((2, 1, length, HEADS, DIM), dtype=np.float32)
        step.put(layer, 0, k, v)
        written.append((k[0], v[0]))
    return request, written


def dense(q, k, v, scale):
    """Causal attention of the last `len(q)` positions in float64."""
    k, v = (np.repeat(a.astype(np.float64), Q_HEADS // HEADS, axis=1) for a in (k, v))
    scores = np.einsum("qhd,khd->hqk", q.astype(np.float64), k) * scale
    seen = np.arange(len(k)) <= np.arange(len(k) - len(q), len(k))[:, None]
    scores = np.where(seen, scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return np.einsum("hqk,khd->qhd", weights, v)


def test_ragged_rows_equal_dense_attention_on_every_layer(pool, rng):
    (a, kv_a), (b, kv_b) = (bind_written(pool, rng, length) for length in (11, 6))
    step = pool.activate_step(b, a)
    table = step.page_table([6, 11])
    q = rng.standard_normal((4, Q_HEADS, DIM), dtype=np.float32)
    attention = PagedAttention(pool, table, qo_indptr=[0, 1, 4])
    for layer in range(2):
        expected = [
            dense(q[:1], *kv_b[layer], DIM**-0.5),
            dense(q[1:], *kv_a[layer], DIM**-0.5),
        ]
        out = attention.run(layer, q)
        np.testing.assert_allclose(out, np.concatenate(expected), rtol=1e-5, atol=1e-5)
        again = paged_attention(q, pool, layer, table, qo_indptr=np.array([0, 1, 4]))
        np.testing.assert_array_equal(again, out)


def test_default_is_one_query_a_row_and_out_is_filled(pool, rng):
    _, written = bind_written(pool, rng, 9)
    q = rng.standard_normal((1, Q_HEADS, DIM), dtype=np.float32)
    out = np.empty_like(q)
    found = paged_attention(q, pool, 1, pool.step.page_table(9), scale=0.5, out=out)
    assert found is out
    np.testing.assert_allclose(out, dense(q, *written[1], 0.5), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("shape", "options", "text"),
    [
        ((2, Q_HEADS, DIM), {}, r"\[1, num_q_heads, 8\]"),
        ((1, Q_HEADS, DIM + 1), {}, r"\[1, num_q_heads, 8\]"),
        ((1, 3, DIM), {}, "3 heads, no multiple of 2"),
        ((1, 0, DIM), {}, "0 heads"),
        ((1, Q_HEADS, DIM), {"qo_indptr": [1, 2]}, r"qo_indptr must be \[batch \+ 1\] = \[2\]"),
        ((1, Q_HEADS, DIM), {"qo_indptr": [0, 1, 1]}, "qo_indptr"),
        ((1, Q_HEADS, DIM), {"out": np.empty((1, 1, DIM), np.float32)}, "Invalid out"),
        ((1, Q_HEADS, DIM), {"layer": 2}, "layer must be in 0 .. 1"),
    ],
)
def test_bad_arguments_name_both_sides(pool, rng, shape, options, text):
    bind_written(pool, rng, 9)
    layer = options.pop("layer", 0)
    q = np.zeros(shape, np.float32)
    with pytest.raises(ValueError, match=text):
        paged_attention(q, pool, layer, pool.step.page_table(9), **options)


def test_integer_queries_and_foreign_tables_raise(pool, make_pool, rng):
    bind_written(pool, rng, 9)
    table = pool.step.page_table(9)
    for dtype in (np.int32, np.float64):
        with pytest.raises(TypeError, match=f"Invalid dtype of q: .*got {np.dtype(dtype).name}"):
            paged_attention(np.zeros((1, Q_HEADS, DIM), dtype), pool, 0, table)
    other = make_pool(2, 64, HEADS, DIM, page_size=8)
    with pytest.raises(ValueError, match="page_size 4, the pool 8"):
        PagedAttention(other, table)


# ---- an object that is held


def test_held_object_follows_a_table_that_changes_in_place(pool, rng):
    bind_written(pool, rng, 11)
    step = pool.step
    table = step.page_table(11)
    q = rng.standard_normal((1, Q_HEADS, DIM), dtype=np.float32)
    attention = PagedAttention(pool, table)
    assert attention.backend == "numba"
    attention.run(0, q)
    assert step.seal_length(10)  # the same pages, one position less
    assert table.lengths_host.tolist() == [10]
    fresh = paged_attention(q, pool, 0, step.build_page_table(10))
    np.testing.assert_array_equal(attention.run(0, q), fresh)


def test_held_object_takes_queries_of_another_kind(pool, rng):
    bind_written(pool, rng, 9)
    attention = PagedAttention(pool, pool.step.page_table(9))
    for heads, dtype in ((4, np.float32), (2, np.float32), (2, np.float16)):
        q = rng.standard_normal((1, heads, DIM)).astype(dtype)
        found = attention.run(0, q)
        assert (found.shape, found.dtype) == (q.shape, q.dtype)
    with pytest.raises(ValueError, match=r"\[1, num_q_heads, 8\]"):
        attention.run(0, q[0])
    np.testing.assert_array_equal(attention.run(0, q), found)


def test_plan_ahead_checks_what_run_would(pool, rng):
    bind_written(pool, rng, 9)
    attention = PagedAttention(pool, pool.step.page_table(9))
    with pytest.raises(ValueError, match="the first plan needs num_q_heads and q_dtype"):
        attention.plan()
    with pytest.raises(ValueError, match="3 heads, no multiple of 2 KV heads"):
        attention.plan(3, "float32")
    attention.plan(Q_HEADS, "float32")
    attention.plan()
    q = rng.standard_normal((1, Q_HEADS, DIM), dtype=np.float32)
    np.testing.assert_array_equal(
        attention.run(1, q), paged_attention(q, pool, 1, pool.step.page_table(9))
    )


def test_more_queries_than_positions_raise_with_a_causal_mask_only(pool, rng):
    bind_written(pool, rng, 2)
    table = pool.step.page_table(2)
    q = rng.standard_normal((3, Q_HEADS, DIM), dtype=np.float32)
    with pytest.raises(ValueError, match="row 0 has 3 queries over 2 positions"):
        PagedAttention(pool, table, qo_indptr=[0, 3])
    assert paged_attention(q, pool, 0, table, qo_indptr=[0, 3], causal=False).shape == q.shape


def test_closed_pool_attends_no_more(pool, rng):
    bind_written(pool, rng, 9)
    q = np.zeros((1, Q_HEADS, DIM), np.float32)
    attention = PagedAttention(pool, pool.step.page_table(9))
    attention.run(0, q)
    pool.close()
    with pytest.raises(KVCacheStateError, match="the pool is closed"):
        attention.run(0, q)


def test_queries_that_only_speak_dlpack_are_read(pool, rng):
    class Foreign:
        def __init__(self, array):
            self.__dlpack__, self.__dlpack_device__ = array.__dlpack__, array.__dlpack_device__

    bind_written(pool, rng, 9)
    q = rng.standard_normal((1, Q_HEADS, DIM), dtype=np.float32)
    attention = PagedAttention(pool, pool.step.page_table(9))
    np.testing.assert_array_equal(attention.run(0, Foreign(q)), attention.run(0, q))
