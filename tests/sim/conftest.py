"""Stand-ins and sizes with which the sections of the GPU script run in the simulator."""

import sys

import pytest

from bench.gpu import (
    attention,
    correct,
    graphs,
    loops,
    prepare,
    tables,
    workspaces,
)
from tests.fakes import cupy_like, flashinfer_like, torch_like


@pytest.fixture
def cupy(monkeypatch):
    """The stand-in for CuPy, in its place."""
    fake = cupy_like.module()
    monkeypatch.setitem(sys.modules, "cupy", fake)
    return fake


@pytest.fixture
def guests(cupy, monkeypatch):
    """Stand-ins for torch and FlashInfer."""
    torch_like.install(monkeypatch)
    flashinfer_like.install(monkeypatch)


@pytest.fixture
def tiny(monkeypatch):
    """Sizes for the simulator, which needs a tenth of a millisecond for a thread."""
    sizes = {
        correct: {"SHAPES": ((1, 8), (3, 5)), "SLOTS": 64},
        graphs: {"HEADS": 1, "HEAD_DIM": 8},
        tables: {"PAGE_SIZES": (4,), "MAX_SEQ_LEN": 64, "NUM_PAGES": 40, "MAX_BATCH": 5},
        attention: {"KV_HEADS": 1, "HEAD_DIM": 64, "NUM_SLOTS": 256, "GROUPS": (1, 4)},
        loops: {"KV_HEADS": 1, "NUM_Q_HEADS": 4, "HEAD_DIM": 64, "STEPS": 5, "PAGE_SIZE": 4},
        prepare: {"BATCHES": (1, 3), "LENGTH": 31, "STEPS": 20, "WARM_UP": 3, "HEAD_DIM": 64},
    }
    sizes[workspaces] = {"KV_HEADS": 1, "HEAD_DIM": 64, "LENGTH": 20}
    sizes[workspaces] |= {"CASES": ((5, 1, 1), (3, 2, 4))}
    sizes[attention] |= {"PAGE_SIZES": (4,), "PROMPTS": (13, 9, 5, 1), "PREFIX": 8}
    sizes[loops] |= {"PROMPTS": (2, 5, 7)}
    for module, values in sizes.items():
        for name, value in values.items():
            monkeypatch.setattr(module, name, value)
