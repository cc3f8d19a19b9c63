"""What tests of the borders ask for: stand-ins for guests, and a small model of transformers.

The stand-ins take the place of CuPy, torch and FlashInfer for one test; the model needs the real
torch and transformers, which are imported when it is asked for.
"""

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


@pytest.fixture(scope="module")
def model():
    """A random Llama of two layers."""
    from tests.helpers.hf_models import one_thread, random_model

    with one_thread():
        yield random_model(num_hidden_layers=2)


@pytest.fixture
def pool(make_pool, model):
    """A pool for `model` with small pages."""
    from tests.helpers.hf_models import PAGE, pool_for

    return pool_for(make_pool, model, page_size=PAGE)


@pytest.fixture
def no_gradients():
    """For calls of a model that are not `generate`'s."""
    from torch import no_grad

    with no_grad():
        yield
