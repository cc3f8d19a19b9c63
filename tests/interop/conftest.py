"""Stand-ins for CuPy, torch and FlashInfer, each in the place of the real one for one test."""

import sys

import pytest

from tests.fakes import cupy_like, flashinfer_like, torch_like


@pytest.fixture
def cupy(monkeypatch):
    fake = cupy_like.module()
    monkeypatch.setitem(sys.modules, "cupy", fake)
    # Kernels that write K and V are not launched here, so that numba-cuda is not needed.
    monkeypatch.setattr("kvpool.device.cuda._check_numba_cuda", lambda wanted: None)
    for name in ("device", "stream", "capturing", "events"):
        monkeypatch.setattr(cupy_like.State, name, getattr(cupy_like.State, name))
    return fake


@pytest.fixture
def torch(cupy, monkeypatch):
    return torch_like.install(monkeypatch)


@pytest.fixture
def flashinfer(torch, monkeypatch):
    return flashinfer_like.install(monkeypatch)
