"""The doctor's round trips, and that they see what is wrong."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from kvpool import Step
from kvpool.doctor import trips

ROOT = Path(__file__).resolve().parents[1]


def test_the_cpu_trip_succeeds():
    assert trips.cpu_pool()["seconds"] > 0


def test_a_row_that_comes_back_different_is_seen(monkeypatch):
    real = Step.get

    def wrong(step, *args, **options):
        k, v = real(step, *args, **options)
        v[..., -1, -1, -1] += 1
        return k, v

    monkeypatch.setattr(Step, "get", wrong)
    with pytest.raises(RuntimeError, match="V in float32 came back different"):
        trips.cpu_pool()


def test_a_prefix_that_is_not_found_is_seen(monkeypatch):
    from kvpool import KVCachePool

    monkeypatch.setattr(KVCachePool, "matched_prefix_len", lambda pool, request: 16)
    with pytest.raises(RuntimeError, match="16 tokens were found in the cache, not 32"):
        trips.cpu_pool()


def test_attention_is_compared_with_float64(make_pool, monkeypatch):
    class Attention:
        """Attends to nothing but what a test says."""

        backend = "numba"
        out = None

        def __init__(self, pool, table):
            assert (pool.num_kv_heads, table.lengths_host.tolist()) == (2, [40])

        def run(self, layer, q):
            assert (layer, q.shape, q.dtype) == (0, (1, 2, 64), np.float32)
            return self.out

    pool = make_pool(1, 128, 2, 64)
    request = trips._written(pool)
    k, v = (rows.astype(np.float64) for rows in trips._rows(40))
    q = np.random.default_rng(1).integers(-2, 3, (1, 2, 64)) / 8
    expected = np.empty((1, 2, 64))
    for head in range(2):  # softmax by its definition, head by head
        weights = np.exp([float(q[0, head] @ k[i, head]) / 8 for i in range(40)])
        expected[0, head] = (weights / weights.sum()) @ v[:, head]
    monkeypatch.setattr(trips, "PagedAttention", Attention)
    Attention.out = expected.astype(np.float32)
    assert trips._attend(pool, request) == "numba"
    for out in (expected + 0.2, np.full_like(expected, np.nan)):
        Attention.out = out.astype(np.float32)
        with pytest.raises(RuntimeError, match="attention is off by"):
            trips._attend(pool, request)


def test_torch_over_a_pool_succeeds():
    pytest.importorskip("torch", reason="torch is not installed")
    # In a process of its own, as the doctor does it: what torch starts stays out of this one.
    code = "from kvpool.doctor import trips; print(trips.torch_border()['seconds'] > 0)"
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert run.stdout.strip() == "True"
