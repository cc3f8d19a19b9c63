"""Which kernels a device gets, and how they are compiled."""

import os
import subprocess
import sys

import pytest

from kvpool.kernels import cpu, for_device, jit


def test_for_device_cpu_returns_these_kernels():
    assert for_device("cpu") is cpu


def test_for_device_unknown_kind_names_the_known_ones():
    with pytest.raises(ValueError, match=r"'tpu'.*'cpu'"):
        for_device("tpu")


def test_compile_without_a_writable_cache_still_works(monkeypatch):
    seen = []

    def njit(**options):
        seen.append(options)
        if options.get("cache"):
            raise RuntimeError("cannot cache function 'f': no locator available for file 'f.py'")
        return lambda function: function

    monkeypatch.setattr(jit.numba, "njit", njit)

    def f():
        return 1

    assert jit.kernel()(f) is f
    assert [options.get("cache", False) for options in seen] == [True, False]


def test_compile_with_another_runtime_error_raises(monkeypatch):
    def njit(**options):
        raise RuntimeError("out of luck")

    monkeypatch.setattr(jit.numba, "njit", njit)
    with pytest.raises(RuntimeError, match="out of luck"):
        jit.kernel()(len)


def test_run_without_jit_gives_the_same_rows():
    # Coverage runs read the kernels as plain Python; so does this one, in a process of its own.
    code = """
import ml_dtypes, numpy as np
from kvpool.kernels import attention, cpu
rows = np.linspace(-3, 3, 24, dtype=np.float32).reshape(2, 3, 4)
for dtype in (np.float32, np.float16, ml_dtypes.bfloat16):
    cache = np.ones((4, 3, 4), dtype)
    cpu.scatter(cache, cache, rows, rows[:, ::-1].transpose(0, 1, 2), np.array([2, -1]))
    assert (cache[2] == rows[0, ::-1].astype(dtype)).all()
    out = np.empty((2, 3, 4), np.float32)
    cpu.gather(cache, cache, np.array([2, -1]), out, out)
    assert (out[0] == cache[2].astype(np.float32)).all() and (out[1] == 0).all()
    both = cache[None].copy()
    cpu.copy_slots(both, both, np.array([2]), np.array([0]))
    cpu.zero(both, both, np.array([2]))
    assert (both[0, 0] == cache[2]).all() and (both[0, 2] == 0).all()
table = np.array([0, 2], np.int32), np.array([1, 0], np.int32), np.array([3])
keys = rows.reshape(-1, 1, 4)[:4].copy()
seen = attention.paged_attention(rows[:1, :2], keys, keys, *table, 2)
scores = rows[0, :2] @ keys[[2, 3, 0], 0].T / 2
weights = np.exp(scores) / np.exp(scores).sum(1, keepdims=True)
assert abs(seen[0] - weights @ keys[[2, 3, 0], 0]).max() < 1e-5
"""
    environment = {**os.environ, "NUMBA_DISABLE_JIT": "1"}
    subprocess.run([sys.executable, "-W", "error", "-c", code], env=environment, check=True)
