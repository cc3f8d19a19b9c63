"""The GPU script in the simulator: attention is right, and what is wrong is noticed."""

import sys

import numpy as np
import pytest

from bench.gpu import (
    attention,
    jit,
    reference,
    workspaces,
)
from bench.gpu.report import Report
from tests.fakes import flashinfer_like
from tests.sim.checking import verdicts

pytestmark = pytest.mark.sim


# ---- attention


def test_array_code_is_within_tolerance(cupy, tiny, monkeypatch):
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    monkeypatch.setattr(attention, "FP8_DTYPES", ("float8_e5m2",))
    report = Report()
    attention.run_array_code(cupy, report)
    assert len(report.rows) == 9  # 3 stored dtypes x 3 kinds of steps
    assert all(row["ok"] for row in report.rows)


def test_flashinfer_is_within_tolerance(guests, cupy, tiny):
    report = Report()
    attention.run_flashinfer(cupy, report, {})
    assert len(report.rows) == 9
    assert all(row["ok"] for row in report.rows)
    assert flashinfer_like.State.count("plan") == 18  # 9 x 2 groups; one for both layers


def test_kernels_that_were_not_compiled_leave_their_groups_out(guests, cupy, tiny):
    report = Report()
    missing = {("decode", "bfloat16"): "not compiled", ("prefill", "float8_e5m2"): "not compiled"}
    attention.run_flashinfer(cupy, report, missing)
    skipped = [row["case"] for row in report.rows if "skipped" in row["note"]]
    assert skipped == [
        "decode, bfloat16, pages of 4, groups 1",
        "prefill, float8_e5m2, pages of 4, groups 1 4",
        "decode, float8_e5m2, pages of 4, groups 4",
        "verify, float8_e5m2, pages of 4, groups 1 4",
    ]
    assert len(verdicts(report)) == 7
    assert all(verdicts(report).values())


def test_large_steps_are_planned_over_a_graph(guests, cupy, tiny):
    report = Report()
    workspaces.run(cupy, report, {})
    assert list(verdicts(report).values()) == [True, True]
    assert flashinfer_like.State.count("plan") == 2


def test_a_plan_that_does_not_fit_fails(guests, cupy, tiny, monkeypatch):
    def plan(*_, **__):
        raise RuntimeError("Failed to allocate memory for batch_prefill_tmp_v")

    monkeypatch.setattr(flashinfer_like.Wrapper, "_plan", plan)
    report = Report()
    workspaces.run(cupy, report, {})
    assert list(verdicts(report).values()) == [False, False]
    assert "batch_prefill_tmp_v" in report.failed[0]["note"]


@pytest.mark.parametrize("kind", ["decode", "prefill"])
def test_a_process_that_compiles_attends_once(guests, tiny, kind):
    jit.attend_once(kind, "float8_e4m3fn")
    made = {type(wrapper) for name, wrapper, _ in flashinfer_like.State.calls if name == "run"}
    assert [each.__name__ for each in made] == [f"Batch{kind.title()}WithPagedKVCacheWrapper"]


def test_a_process_that_compiles_nothing_fails(cupy, tiny, monkeypatch):
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    with pytest.raises(RuntimeError, match="kvpool finds no FlashInfer"):
        jit.attend_once("decode", "bfloat16")


def other_layer(monkeypatch):
    from kvpool.interop.torch import PoolTensors

    real = PoolTensors.paged_layer
    monkeypatch.setattr(PoolTensors, "paged_layer", lambda self, layer: real(self, 0))


def no_mask(monkeypatch):
    real = flashinfer_like.Wrapper._plan

    def plan(self, *arguments, causal, **rest):
        return real(self, *arguments, causal=False, **rest)

    monkeypatch.setattr(flashinfer_like.Wrapper, "_plan", plan)


def other_scale(monkeypatch):
    real = flashinfer_like.Wrapper.run

    def run(self, *arguments, v_scale=None, **rest):
        return real(self, *arguments, v_scale=v_scale and v_scale * 1.02, **rest)

    monkeypatch.setattr(flashinfer_like.Wrapper, "run", run)


def no_numbers(monkeypatch):
    real = flashinfer_like.Wrapper.run

    def run(self, **arguments):
        real(self, **arguments).host[-1, -1, -1] = np.nan

    monkeypatch.setattr(flashinfer_like.Wrapper, "run", run)


@pytest.mark.parametrize(
    ("spoil", "stored", "failing"),
    [
        (other_layer, "bfloat16", "prefill decode verify"),
        (no_mask, "bfloat16", "prefill verify"),
        (other_scale, "float8_e4m3fn", "prefill decode verify"),
        (no_numbers, "bfloat16", "prefill decode verify"),
    ],
)
def test_wrong_attention_is_noticed(guests, cupy, tiny, monkeypatch, spoil, stored, failing):
    spoil(monkeypatch)
    report = Report()
    attention.flow(cupy, report, "flashinfer", stored, 4, attention.BF16)
    found = [row["case"].split(",")[0] for row in report.failed]
    assert " ".join(found) == failing


def test_attention_of_another_backend_is_no_success(guests, cupy, tiny, monkeypatch):
    from kvpool.interop.flashinfer import FlashInferWorkspace

    monkeypatch.setattr(FlashInferWorkspace, "unsupported", lambda *_: "not today")
    report = Report()
    attention.flow(cupy, report, "flashinfer", "bfloat16", 4, attention.BF16)
    assert len(report.failed) == 3
    assert "dense attends, and not flashinfer" in report.failed[0]["note"]


def test_reference_is_softmax_over_what_is_seen():
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal(shape) for shape in ((2, 2, 3), (5, 1, 3), (5, 1, 3)))
    out, most = reference.attend(q, k, v, 0.5)
    for i, head in np.ndindex(2, 2):
        seen = 4 + i
        weights = np.exp(0.5 * k[:seen, 0] @ q[i, head])
        weights /= weights.sum()
        np.testing.assert_allclose(out[i, head], weights @ v[:seen, 0])
        np.testing.assert_allclose(most[i, head], weights @ np.abs(v[:seen, 0]))
