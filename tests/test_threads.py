"""Threads that share a kernel's work: every share once, and none left running."""

import os
import threading
import time

import ml_dtypes
import numpy as np
import pytest

from kvpool.kernels import cpu, threads
from kvpool.kernels.threads import MIN_BYTES_TO_SHARE, run_rows, run_shares


@pytest.mark.parametrize(
    ("num_shares", "num_threads"), [(1, 1), (1, 4), (7, 2), (40, 100), (3, 0)]
)
def test_run_shares_does_each_share_once(num_shares, num_threads):
    done = []
    run_shares(done.append, num_shares, num_threads)
    assert sorted(done) == list(range(num_shares))


def test_run_shares_uses_the_threads_it_may():
    both_here = threading.Barrier(2, timeout=30)
    names = set()

    def work(share):
        names.add(threading.current_thread().name)
        both_here.wait()

    run_shares(work, 2, 2)
    assert len(names) == 2


@pytest.mark.parametrize("failing", [0, 1])
def test_run_shares_when_one_fails_raises_when_all_have_ended(failing):
    both_here = threading.Barrier(2, timeout=30)
    ended = []

    def work(share):
        both_here.wait()
        if share == failing:
            raise ValueError(f"share {share}")
        time.sleep(0.05)
        ended.append(share)

    with pytest.raises(ValueError, match=f"share {failing}"):
        run_shares(work, 2, 2)
    assert ended == [1 - failing]


def test_run_shares_in_a_forked_child_starts_threads_of_its_own():
    if not hasattr(os, "fork"):
        pytest.skip("no fork on this system")
    run_shares(lambda share: None, 4, 2)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        done = []
        run_shares(done.append, 8, 2)
        os.write(writing, bytes([len(done)]))
        os._exit(0)
    assert os.read(reading, 1) == bytes([8])
    os.waitpid(child, 0)
    os.close(reading)
    os.close(writing)


def test_run_rows_covers_all_rows_in_slices(monkeypatch):
    monkeypatch.setattr(threads, "available_cpus", lambda: 3)
    for num_rows in (1, 2, 11, 1000):
        moved = []
        run_rows(lambda rows: moved.extend(range(num_rows)[rows]), num_rows, 1 << 30)  # noqa: B023
        assert sorted(moved) == list(range(num_rows))


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16], ids=str)
@pytest.mark.parametrize("num_cpus", [1, 3])
def test_moves_of_megabytes_are_the_same_on_any_number_of_threads(num_cpus, dtype, monkeypatch):
    monkeypatch.setattr(threads, "available_cpus", lambda: num_cpus)
    rng = np.random.default_rng(0)
    num_rows, heads, dim = 2_003, 4, 128
    rows = rng.standard_normal((2, num_rows, heads, dim), np.float32).astype(dtype)
    assert rows.nbytes >= MIN_BYTES_TO_SHARE
    caches = np.zeros((2, 1, 2_500, heads, dim), dtype)
    slots = rng.permutation(2_500)[:num_rows]
    slots[100] = -1
    expected = np.zeros_like(caches)
    for cache, values in zip(expected, rows, strict=True):
        cache[0, np.delete(slots, 100)] = np.delete(values, 100, axis=0)
    cpu.scatter(*caches[:, 0], *rows, slots)
    np.testing.assert_array_equal(caches.view(np.uint8), expected.view(np.uint8))
    out = np.ones_like(rows)
    cpu.gather(*caches[:, 0], slots, *out)
    rows[:, 100] = 0
    np.testing.assert_array_equal(out.view(np.uint8), rows.view(np.uint8))
    cpu.zero(*caches, slots)
    assert not caches.view(np.uint8).any()


@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2"])
def test_fp8_moves_of_megabytes_are_the_same_on_any_number_of_threads(name, monkeypatch):
    rng = np.random.default_rng(0)
    num_rows, heads, dim = 1_003, 4, 128
    rows = rng.standard_normal((2, num_rows, heads, dim), np.float32)
    assert rows.nbytes >= MIN_BYTES_TO_SHARE
    slots = rng.permutation(1_500)[:num_rows]
    slots[100] = -1
    found = []
    for num_cpus in (1, 3):
        monkeypatch.setattr(threads, "available_cpus", lambda num_cpus=num_cpus: num_cpus)
        codes, out = np.zeros((2, 1_500, heads, dim), np.uint8), np.ones_like(rows)
        cpu.scatter_fp8(*codes, *rows, slots, name, 0.015, 0.3)
        cpu.gather_fp8(*codes, slots, name, 0.015, 0.3, *out)
        assert not out[:, 100].any()
        found.append((codes, out))
    for one, other in zip(*found, strict=True):
        np.testing.assert_array_equal(one, other)
    # A slice by itself, as small as a call that is never shared.
    codes = np.zeros_like(found[0][0])
    for first in range(0, num_rows, 50):
        part = slice(first, first + 50)
        cpu.scatter_fp8(*codes, *rows[:, part], slots[part], name, 0.015, 0.3)
    np.testing.assert_array_equal(codes, found[0][0])


@pytest.mark.parametrize("num_cpus", [1, 3])
def test_zero_of_few_slots_on_many_layers_clears_them_alone(num_cpus, monkeypatch):
    monkeypatch.setattr(threads, "available_cpus", lambda: num_cpus)
    caches = np.ones((2, 40, 3, 64, 128), np.float32)
    assert caches[:, :, 1].nbytes >= MIN_BYTES_TO_SHARE
    cpu.zero(*caches, np.array([1]))
    assert not caches[:, :, 1].any()
    assert caches[:, :, [0, 2]].all()
