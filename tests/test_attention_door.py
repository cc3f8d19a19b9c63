"""The door for model code: what it checks, and that it reads the pool's own pages."""

import numpy as np
import pytest

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
    with pytest.raises(TypeError, match="Invalid dtype of q"):
        paged_attention(np.zeros((1, Q_HEADS, DIM), np.int32), pool, 0, table)
    other = make_pool(2, 64, HEADS, DIM, page_size=8)
    with pytest.raises(ValueError, match="page_size 4, the pool 8"):
        PagedAttention(other, table)
