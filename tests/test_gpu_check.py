"""The GPU script as far as it can be tried without one: arguments, structure, what it says."""

import json
import subprocess
import sys
from importlib.util import find_spec
from types import SimpleNamespace

import pytest

from bench import gpu_check
from bench.gpu import demo
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
    assert "correct, bandwidth, launch, graphs, example" in " ".join(
        capsys.readouterr().out.split()
    )


@pytest.mark.parametrize("arguments", [["--only"], ["--only", "speed"], ["--seconds", "soon"]])
def test_bad_arguments_stop(arguments, capsys):
    with pytest.raises(SystemExit) as stop:
        gpu_check.parse(arguments)
    assert stop.value.code == 2


@pytest.mark.skipif(find_spec("cupy") is None or has_gpu(), reason="needs CuPy and no GPU")
def test_without_a_gpu_it_says_so_in_one_line(capsys):
    assert gpu_check.main([]) == 2
    (line,) = capsys.readouterr().out.splitlines()
    assert "no CUDA driver answers" in line


@pytest.fixture
def stubs(monkeypatch):
    """Sections that only note that they ran."""
    ran = []

    def section(name):
        def run(*arguments):
            report = arguments[-1]
            ran.append(name)
            report.add(name, "case", 1.5, "us", ok=True)

        return run

    for module, name in (
        (gpu_check.correct, "correct"),
        (gpu_check.bandwidth, "bandwidth"),
        (gpu_check.graphs, "graphs"),
        (gpu_check.demo, "example"),
    ):
        monkeypatch.setattr(module, "run", section(name))
    monkeypatch.setattr(gpu_check.bandwidth, "launch_cost", section("launch"))
    return ran


def test_all_sections_run_bandwidth_last(stubs):
    report = gpu_check.check(gpu_check.parse([]), cupy=None)
    assert stubs == ["correct", "launch", "graphs", "example", "bandwidth"]
    assert not report.failed


def test_a_section_that_dies_fails_and_hides_nothing(stubs, monkeypatch):
    def die(*_):
        raise RuntimeError("illegal address")

    monkeypatch.setattr(gpu_check.graphs, "run", die)
    report = gpu_check.check(gpu_check.parse(["--only", "graphs", "example"]), cupy=None)
    assert [row["case"] for row in report.failed] == ["did not finish"]
    assert "illegal address" in report.failed[0]["note"]
    assert stubs == ["example"]


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
