"""The doctor's trip through CUDA pools, in numba's simulator."""

import sys

import pytest

from kvpool.doctor import trips
from tests.fakes import cupy_like

pytestmark = pytest.mark.sim


@pytest.fixture
def cupy(monkeypatch):
    """The stand-in, in CuPy's place."""
    fake = cupy_like.module()
    monkeypatch.setitem(sys.modules, "cupy", fake)
    for name in ("device", "stream", "capturing"):
        monkeypatch.setattr(cupy_like.State, name, getattr(cupy_like.State, name))
    return fake


def test_the_cuda_trip_succeeds(cupy, monkeypatch):
    # Small enough for the simulator, which runs a thread after the other.
    monkeypatch.setattr(trips, "_HEAD_DIM", 8)
    monkeypatch.setattr(trips, "_PROMPT", range(1, 11))
    monkeypatch.setattr(trips, "_PAGE_SIZE", 4)
    assert trips.cuda_pool()["seconds"] > 0
