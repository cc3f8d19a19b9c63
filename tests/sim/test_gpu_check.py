"""The parts of the GPU script that the simulator can run: what they compare, and page tables."""

import sys

import numpy as np
import pytest

from bench.gpu import correct, graphs
from bench.gpu.report import Report
from kvpool import KVCachePool
from tests.fakes import cupy_like

pytestmark = pytest.mark.sim


@pytest.fixture
def cupy(monkeypatch):
    """The stand-in for CuPy, in its place."""
    fake = cupy_like.module()
    monkeypatch.setitem(sys.modules, "cupy", fake)
    return fake


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setattr(correct, "SHAPES", ((1, 8), (3, 5)))
    monkeypatch.setattr(correct, "SLOTS", 64)


@pytest.mark.parametrize("stored", ["float16", "float8_e4m3fn"])
def test_checks_pass_where_kernels_are_right(cupy, tiny, stored):
    from kvpool.kernels import cuda

    report, rng = Report(small=True), np.random.default_rng(0)
    correct.check_moves(cupy, report, cuda, rng, (2, 8), stored, "bfloat16")
    assert [row["ok"] for row in report.rows] == [True]


def test_checks_of_layers_pass_and_notice_a_wrong_byte(cupy, tiny, monkeypatch):
    from kvpool.kernels import cuda

    monkeypatch.setattr(correct, "FLOAT_DTYPES", {})
    monkeypatch.setattr(correct, "SLOTS", 210)
    report, rng = Report(), np.random.default_rng(0)
    correct.over_layers(cupy, report, cuda, rng, (3, 5))
    monkeypatch.setattr(cuda, "zero", lambda *_: None)
    correct.over_layers(cupy, report, cuda, rng, (3, 5))
    assert [row["ok"] for row in report.rows] == [True, False]


def test_page_table_kernel_equals_the_table_of_the_step(cupy):
    with KVCachePool(1, 256, 1, 8, page_size=16, device="cuda") as pool:
        step = pool.activate_step(*(pool.bind_request(range(20), 48) for _ in range(3)))
        tables, launch = graphs.page_tables(cupy, pool, step)
        for lengths in ([21, 30, 48], [1, 16, 17]):
            tables["lengths"].set(np.array([*lengths, 0], np.int32))
            tables["starts"].set(np.array([*(n - 1 for n in lengths), 0], np.int32))
            launch()
            table = step.build_page_table(lengths)
            assert tables["indptr"].get()[:4].tolist() == table.indptr_host.tolist()
            num_pages = len(table.indices_host)
            assert tables["indices"].get()[:num_pages].tolist() == table.indices_host.tolist()
            assert tables["last"].get().tolist() == [*table.last_page_len_host.tolist(), 0]
            expected = step.window_slot_indices([n - 1 for n in lengths], 1).get().tolist()
            # The padded row writes to the scratch page: element 3 to its slot 3.
            assert tables["slots"].get().tolist() == [*expected, 256 + 3]
