"""The GPU script in the simulator: every section that compares runs here, at small sizes.

Arrays, torch and FlashInfer are stand-ins; kernels, launcher, pools, graphs and the script itself
are the real ones. Each section must pass, and must notice what it is there to notice.
"""

import re
import sys
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import numpy as np
import pytest

from bench import gpu_check
from bench.gpu import (
    correct,
    graphs,
    jit,
    loops,
    prepare,
    reference,
    tables,
    tensors,
)
from bench.gpu.report import Report
from kvpool import KVCachePool
from kvpool.attention import PagedAttention
from tests.fakes import cupy_like, flashinfer_like
from tests.sim.checking import DOCS, capture, verdicts

pytestmark = pytest.mark.sim


# ---- kernels and tables


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
        launched, launch = graphs.page_tables(cupy, pool, step)
        for lengths in ([21, 30, 48], [1, 16, 17]):
            launched["lengths"].set(np.array([*lengths, 0], np.int32))
            launched["starts"].set(np.array([*(n - 1 for n in lengths), 0], np.int32))
            launch()
            table = step.build_page_table(lengths)
            assert launched["indptr"].get()[:4].tolist() == table.indptr_host.tolist()
            num_pages = len(table.indices_host)
            assert launched["indices"].get()[:num_pages].tolist() == table.indices_host.tolist()
            assert launched["last"].get().tolist() == [*table.last_page_len_host.tolist(), 0]
            expected = step.window_slot_indices([n - 1 for n in lengths], 1).get().tolist()
            *slots, padding = launched["slots"].get().tolist()
            assert slots == expected
            assert 256 <= padding < 256 + 16  # the scratch page


def test_graphs_replay_puts_and_tables(cupy, tiny):
    report = Report()
    graphs.run(cupy, report, {"stand-in": capture})
    assert list(verdicts(report).values()) == [True, True]


def test_graphs_that_do_nothing_fail(cupy, tiny):
    report = Report()
    graphs.run(cupy, report, {"stand-in": lambda work: lambda: None})
    assert list(verdicts(report).values()) == [True, False]


@pytest.mark.slow
def test_tables_equal_lists(cupy, tiny):
    report = Report(small=True)
    tables.run(report)
    assert list(verdicts(report).values()) == [True, True]
    assert all(row["note"].split()[0] != "0" for row in report.rows[1:])


@pytest.mark.slow
def test_tables_notice_a_wrong_entry(cupy, tiny, monkeypatch):
    from kvpool.graphs import Graph

    real = Graph._prepare

    def prepare_and_spoil(graph, *arguments):
        table = real(graph, *arguments)
        table.indices[0] = table.indices[0] + 1
        return table

    monkeypatch.setattr(Graph, "_prepare", prepare_and_spoil)
    report = Report(small=True)
    tables.run(report)
    assert list(verdicts(report).values()) == [False, False]


# ---- loops and costs


@pytest.mark.slow
@pytest.mark.parametrize("loop", [loops.decode, loops.verify])
@pytest.mark.parametrize("stored", ["bfloat16", "float8_e4m3fn"])
def test_captured_loops_equal_eager_ones(guests, cupy, tiny, loop, stored):
    report = Report()
    loop(cupy, report, "loop", capture, stored)
    assert len(report.rows) == (5 if loop is loops.decode else 4)
    assert all(verdicts(report).values())


@pytest.mark.slow
@pytest.mark.parametrize("loop", [loops.decode, loops.verify])
def test_a_replay_that_does_nothing_fails(guests, cupy, tiny, loop):
    report = Report()
    loop(cupy, report, "loop", lambda work: lambda: None, "bfloat16")
    failed = " ".join(row["case"] for row in report.failed)
    assert "outputs" in failed
    assert "K and V" in failed


def test_loops_leave_out_what_was_not_compiled(guests, cupy, tiny):
    report = Report()
    missing = dict.fromkeys(jit.KERNELS, "flashinfer-python is not installed")
    loops.run(cupy, report, {"stand-in": capture}, missing)
    assert {row["note"] for row in report.rows} == {"flashinfer-python is not installed: skipped"}


@pytest.mark.slow
def test_costs_have_a_row_for_each_stage_and_kind_of_step(guests, cupy, tiny):
    report = Report()
    prepare.run(cupy, report, {})
    stages = ("activate + page_table + slots", "prepare", "plan of FlashInfer")
    for batch in (1, 3):
        for enters in prepare.ENTERS.values():
            for stage in stages:
                case = f"{stage}, {batch} x 31 tokens, {enters}"
                (row,) = [row for row in report.rows if row["case"] == case]
                assert row["value"] > 0
    assert not report.failed


@pytest.mark.slow
def test_costs_without_flashinfer(cupy, tiny):
    report = Report(small=True)
    prepare.run(cupy, report, {("prefill", "bfloat16"): "torch is not installed"})
    assert report.rows[-1]["note"] == "torch is not installed: skipped"
    assert not any("plan" in row["case"] for row in report.rows[:-1])


def test_the_recipe_of_the_docs_runs(guests, cupy, tiny, monkeypatch):
    blocks = re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL)
    (recipe,) = [block for block in blocks if "prefetch" in block]
    side = loops.Side(cupy, "bfloat16", loops.BUCKET, 1)
    side.load(np.random.default_rng(0))

    def forward(step, attention):
        side.step = step
        side.forward(attention)

    @contextmanager
    def graph(captured):
        with cupy_like.capture():
            yield

    def replay():
        flashinfer_like.State.captured.clear()
        with cupy_like.capture():
            forward(names["step"], names["attention"])
        flashinfer_like.replay()

    torch = sys.modules["torch"]
    torch.cuda.graph = graph
    torch.cuda.CUDAGraph = lambda: SimpleNamespace(replay=replay)
    cupy.cuda.ExternalStream = lambda pointer: nullcontext()
    names = {
        "PagedAttention": PagedAttention,
        "cupy": cupy,
        "forward": forward,
        "lengths": side.lengths,
        "num_q_heads": loops.NUM_Q_HEADS,
        "num_tokens": 3,
        "pool": side.pool,
        "requests": side.step.request_ids,
        "torch": torch,
    }
    with side.pool:
        exec(recipe, names)
        written = [side.pool.valid_len(request) for request in names["requests"]]
        assert written == [length + 3 for length in loops.PROMPTS]
        caches = [reference.stored(side.pool, layer) for layer in range(loops.LAYERS)]
        assert side.error(side.pool, caches, names["lengths"]) <= 1.0


# ---- torch itself, over the host memory of the stand-in for CuPy


@pytest.fixture
def torch(cupy, monkeypatch):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    array = cupy_like.ndarray
    monkeypatch.setattr(array, "__dlpack__", lambda self, **_: self.host.__dlpack__(), False)
    monkeypatch.setattr(array, "__dlpack_device__", lambda self: (1, 0), raising=False)
    stream = SimpleNamespace(cuda_stream=0)
    for name, value in (
        ("is_available", True),
        ("synchronize", None),
        ("is_current_stream_capturing", False),
        ("current_device", 0),
        ("current_stream", stream),
    ):
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    monkeypatch.setattr(tensors, "DEVICE_TYPE", "cpu")
    return torch


def test_tensors_share_memory(torch, cupy):
    report = Report()
    tensors.run(cupy, report)
    assert len(report.rows) == 6  # 5 dtypes, and one that outlives its pool
    assert all(verdicts(report).values())


def test_tensors_that_are_copies_are_noticed(torch, cupy, monkeypatch):
    from kvpool.interop import torch as interop

    real = interop.tensor_of
    monkeypatch.setattr(interop, "tensor_of", lambda *arguments: real(*arguments).clone())
    report = Report()
    tensors.run(cupy, report)
    shared = [row for row in report.rows if "same memory" in row["case"]]
    assert not any(row["ok"] for row in shared)
    assert "address" in shared[0]["note"]


# ---- the whole


@pytest.mark.slow
def test_sections_run_from_the_command_line(guests, cupy, tiny, monkeypatch):
    monkeypatch.setattr(jit, "start", lambda folder, kernels: [])
    monkeypatch.setattr(gpu_check, "captures", lambda *_: {"stand-in": capture})
    monkeypatch.setattr(gpu_check.guests, "why_no_torch", lambda: None)
    sections = ["flashinfer", "graphs"]
    options = gpu_check.parse(["--small", "--only", *sections])
    report = gpu_check.check(options, cupy)
    assert not report.failed
    found = list(dict.fromkeys(row["section"] for row in report.rows))
    assert found == [name for name in gpu_check.SECTIONS if name in sections]
