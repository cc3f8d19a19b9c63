"""The GPU script as far as it can be tried without one: arguments, structure, what it says.

What its sections compare is tried in the simulator: `tests/sim/test_gpu_check.py`.
"""

import json
import subprocess
import sys
from importlib.util import find_spec
from types import SimpleNamespace

import pytest

from bench import gpu_check
from bench.gpu import demo, guests, jit
from bench.gpu.report import Report
from tests.conftest import has_gpu


def test_import_needs_no_guest():
    code = "import sys, bench.gpu_check; print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not set(run.stdout.split()) & {"cupy", "torch", "flashinfer", "numba_cuda"}


def test_help_names_the_sections(capsys):
    with pytest.raises(SystemExit) as stop:
        gpu_check.parse(["--help"])
    assert stop.value.code == 0
    assert ", ".join(gpu_check.SECTIONS) in " ".join(capsys.readouterr().out.split())


def test_each_section_is_described_in_the_order_in_which_it_runs():
    lines = gpu_check.__doc__.splitlines()
    described = [line.split()[0] for line in lines if line.startswith(gpu_check.SECTIONS)]
    assert tuple(described) == gpu_check.SECTIONS


@pytest.mark.parametrize(
    "arguments",
    [["--only"], ["--only", "speed"], ["--seconds", "soon"], ["--jit-seconds", "late"]],
)
def test_bad_arguments_stop(arguments, capsys):
    with pytest.raises(SystemExit) as stop:
        gpu_check.parse(arguments)
    assert stop.value.code == 2


@pytest.mark.skipif(find_spec("cupy") is None or has_gpu(), reason="needs CuPy and no GPU")
def test_without_a_gpu_it_says_so_in_one_line(capsys):
    assert gpu_check.main([]) == 2
    (line,) = capsys.readouterr().out.splitlines()
    assert "no CUDA driver answers" in line


# ---- sections


@pytest.fixture
def stubs(monkeypatch):
    """Sections that only note that they ran, and compilers that have nothing to do."""
    ran = []

    def section(name):
        def run(*arguments):
            (report,) = [each for each in arguments if isinstance(each, Report)]
            ran.append(name)
            report.add(name, "case", 1.5, "us", ok=True)

        return run

    for module, function, name in (
        (gpu_check.correct, "run", "correct"),
        (gpu_check.tables, "run", "tables"),
        (gpu_check.tensors, "run", "tensors"),
        (gpu_check.attention, "run_array_code", "attention"),
        (gpu_check.graphs, "run", "graphs"),
        (gpu_check, "with_flashinfer", "flashinfer"),
        (gpu_check.loops, "run", "loops"),
        (gpu_check.bandwidth, "launch_cost", "launch"),
        (gpu_check.prepare, "run", "prepare"),
        (gpu_check.demo, "run", "example"),
        (gpu_check.bandwidth, "run", "bandwidth"),
    ):
        monkeypatch.setattr(module, function, section(name))
    monkeypatch.setattr(guests, "why_no_flashinfer", lambda: None)
    monkeypatch.setattr(guests, "why_no_torch", lambda: "torch is not installed")
    monkeypatch.setattr(jit, "start", lambda folder, kernels: ran.append(kernels) or [])
    monkeypatch.setattr(jit, "finish", lambda *_: ran.append("wait") or {})
    return ran


def test_sections_run_in_order_and_compilers_are_waited_for_once(stubs):
    report = gpu_check.check(gpu_check.parse([]), cupy=None)
    first = gpu_check.SECTIONS.index("flashinfer")
    sections = list(gpu_check.SECTIONS)
    assert stubs == [jit.KERNELS, *sections[:first], "wait", *sections[first:]]
    assert not report.failed


def test_what_needs_no_compiler_starts_none(stubs):
    gpu_check.check(gpu_check.parse(["--only", "correct", "bandwidth"]), cupy=None)
    assert stubs == ["correct", "bandwidth"]


def test_costs_of_a_plan_need_one_kernel(stubs):
    gpu_check.check(gpu_check.parse(["--only", "prepare"]), cupy=None)
    assert stubs == [(("prefill", "bfloat16"),), "wait", "prepare"]


def test_without_flashinfer_all_its_kernels_are_missing(stubs, monkeypatch):
    seen = {}
    monkeypatch.setattr(guests, "why_no_flashinfer", lambda: "not installed")
    monkeypatch.setattr(
        gpu_check, "with_flashinfer", lambda *arguments: seen.update(arguments[-1])
    )
    gpu_check.check(gpu_check.parse(["--only", "flashinfer"]), cupy=None)
    assert stubs == []
    assert seen == dict.fromkeys(jit.KERNELS, "not installed")


def test_a_section_that_dies_fails_and_hides_nothing(stubs, monkeypatch):
    def die(*_):
        raise RuntimeError("illegal address")

    monkeypatch.setattr(gpu_check.graphs, "run", die)
    report = gpu_check.check(gpu_check.parse(["--only", "graphs", "example"]), cupy=None)
    assert [row["case"] for row in report.failed] == ["did not finish"]
    assert "illegal address" in report.failed[0]["note"]
    assert stubs == ["example"]


def test_a_case_that_dies_fails_and_the_next_one_runs():
    report = Report()
    for error in (ValueError("wrong shape"), None):
        with report.attempt("graphs", "case"):
            if error:
                raise error
            report.add("graphs", "next case", 0, "", ok=True)
    assert [row["ok"] for row in report.rows] == [False, True]
    assert "wrong shape" in report.rows[0]["note"]


def test_graphs_of_torch_are_skipped_without_torch(monkeypatch):
    report = Report()
    monkeypatch.setattr(guests, "why_no_torch", lambda: "torch sees no GPU")
    assert list(gpu_check.captures(None, report, "graphs")) == ["CuPy graph"]
    assert [row["note"] for row in report.rows] == ["torch sees no GPU: skipped"]
    monkeypatch.setattr(guests, "why_no_torch", lambda: None)
    monkeypatch.setattr(guests, "torch_or_none", lambda: None)
    assert list(gpu_check.captures(None, report, "graphs")) == ["CuPy graph", "torch graph"]


def test_guests_that_are_missing_are_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    assert guests.why_no_torch() == "torch is not installed"
    assert guests.torch_or_none() is None
    monkeypatch.setattr(guests, "find_spec", lambda name: None)
    assert guests.why_no_flashinfer() == "flashinfer-python is not installed"
    monkeypatch.setattr(guests, "find_spec", lambda name: "there")
    assert guests.why_no_flashinfer() == "torch is not installed"
    no_gpu = SimpleNamespace(cuda=SimpleNamespace(is_available=lambda: False))
    monkeypatch.setitem(sys.modules, "torch", no_gpu)
    assert guests.why_no_flashinfer() == "torch sees no GPU"


def test_report_is_written_as_json(tmp_path, capsys):
    report = Report()
    report.add("launch", "put", 4.5, "us", note="of many")
    report.add("correct", "zero", 3, "differ", ok=False)
    report.write_json(tmp_path / "out.json", {"gpu": "none"})
    written = json.loads((tmp_path / "out.json").read_text())
    assert written["about"] == {"gpu": "none"}
    assert [row["ok"] for row in written["rows"]] == [None, False]
    assert "FAILED" in capsys.readouterr().out


def test_time_that_is_up_leaves_cases_out(monkeypatch):
    report = Report(seconds=0.0)
    gpu_check.bandwidth.run(None, report)
    assert {row["note"] for row in report.rows} == {"out of time"}
    assert len(report.rows) == 15  # 5 numbers of rows x 3 sizes
    monkeypatch.setattr(demo, "find_spec", lambda name: SimpleNamespace())
    demo.run(report)
    assert report.rows[-1]["note"] == "skipped: out of time"
    for section in (gpu_check.with_flashinfer, gpu_check.prepare.run):
        section(None, report, {})
        assert report.rows[-1]["note"] == "out of time: skipped"
    gpu_check.loops.run(None, report, {"CuPy graph": None}, {})
    assert report.rows[-1]["note"] == "out of time: skipped"
