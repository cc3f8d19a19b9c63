"""The GPU script as far as it can be tried without one: arguments, structure, what it says.

What its sections compare is tried in the simulator: `tests/sim/test_gpu_check.py`.
"""

import json
import os
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest

from bench import gpu_check
from bench.gpu import capture, demo, guests, jit
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


# ---- capture


class Streams:
    """What the captures ask of CuPy and torch, noted in order."""

    def __init__(self):
        self.done = []
        self.cuda = self

    def Device(self):
        return self

    def Stream(self, non_blocking):
        return self

    def ExternalStream(self, pointer):
        self.done.append(f"CuPy on {pointer}")
        return self

    def synchronize(self):
        self.done.append("wait")

    def begin_capture(self):
        self.done.append("begin")

    def end_capture(self):
        self.done.append("end")
        return self

    def launch(self, stream):
        self.done.append(f"launch on {stream}")

    def get_current_stream(self):
        return "the current stream"

    def current_stream(self):
        return SimpleNamespace(cuda_stream=7)

    def CUDAGraph(self):
        return SimpleNamespace(replay=lambda: self.done.append("replay"))

    def graph(self, graph):
        return self

    def __enter__(self):
        self.done.append("enter")

    def __exit__(self, *_):
        self.done.append("leave")


def test_cupy_captures_on_a_stream_of_its_own_and_replays_on_the_callers():
    streams = Streams()
    replay = capture.by_cupy(streams)(lambda: streams.done.append("work"))
    replay()
    inside = ["enter", "begin", "work", "end", "leave"]
    assert streams.done == ["wait", *inside, "launch on the current stream"]


def test_torch_captures_on_the_stream_that_it_is_on_by_then():
    streams = Streams()
    replay = capture.by_torch(streams, streams)(lambda: streams.done.append("work"))
    replay()
    inside = ["enter", "CuPy on 7", "enter", "work", "leave", "leave"]
    assert streams.done == ["wait", *inside, "replay"]


def test_work_that_cannot_be_captured_says_why_and_ends_the_capture():
    streams = Streams()

    def work():
        raise ValueError("an upload in a capture")

    with pytest.raises(ValueError, match="an upload in a capture"):
        capture.by_cupy(streams)(work)
    assert streams.done == ["wait", "enter", "begin", "end", "leave"]


# ---- compilers


@pytest.fixture
def compilers(monkeypatch, tmp_path):
    """Start processes that run other code; all of them are ended after the test."""
    started = []

    def start(*codes):
        programs = iter(codes)
        monkeypatch.setattr(jit, "command", lambda *_: [sys.executable, "-c", next(programs)])
        kernels = jit.KERNELS[: len(codes)]
        started.append(jit.start(tmp_path, kernels))
        return started[-1]

    yield start
    for builds in started:
        jit.stop(builds)


def test_kernels_that_compile_are_there_and_the_others_are_named(compilers):
    report = Report()
    builds = compilers("", "print('cannot find -lcuda'); exit(1)")
    missing = jit.finish(report, builds, 60)
    assert missing == {jit.KERNELS[1]: "the kernel could not be compiled"}
    assert [row["ok"] for row in report.rows] == [True, False]
    assert report.rows[0]["value"] > 0
    assert report.rows[1]["note"] == "cannot find -lcuda"


def test_kernels_that_take_too_long_are_left_out_with_all_that_they_started(compilers, tmp_path):
    child = tmp_path / "child"
    slow = (
        "import subprocess, sys, time; "
        "run = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']); "
        f"open({str(child)!r}, 'w').write(str(run.pid)); time.sleep(60)"
    )
    report = Report()
    builds = compilers(slow)
    deadline = time.perf_counter() + 30
    while not (child.exists() and child.read_text()) and time.perf_counter() < deadline:
        time.sleep(0.05)
    missing = jit.finish(report, builds, 0)
    assert "not compiled within" in missing[jit.KERNELS[0]]
    assert [row["ok"] for row in report.rows] == [None]
    status = Path(f"/proc/{child.read_text()}/status")
    while is_running(status) and time.perf_counter() < deadline:
        time.sleep(0.05)
    assert not is_running(status)


def is_running(status):
    """Whether a process is there and no zombie, which nobody may be there to reap."""
    try:
        return "State:\tZ" not in status.read_text()
    except OSError:
        return False


def test_compilers_share_the_processors_and_find_the_driver(compilers, monkeypatch, tmp_path):
    monkeypatch.delenv("MAX_JOBS", raising=False)
    monkeypatch.setenv("LIBRARY_PATH", "elsewhere")
    library = tmp_path / "libcuda.so.1"
    library.touch()
    monkeypatch.setattr(jit, "driver_library", lambda: str(library))
    said = "import os; print(os.environ['MAX_JOBS'], os.environ['LIBRARY_PATH']); exit(1)"
    report = Report()
    jit.finish(report, compilers(said), 60)
    jobs, paths = report.rows[0]["note"].split()
    assert int(jobs) == 2 * os.cpu_count()
    assert paths.split(os.pathsep) == [str(tmp_path), "elsewhere"]
    assert (tmp_path / "libcuda.so").resolve() == library


def test_the_number_of_jobs_can_be_said(compilers, monkeypatch):
    monkeypatch.setenv("MAX_JOBS", "3")
    report = Report()
    jit.finish(report, compilers("import os; print(os.environ['MAX_JOBS']); exit(1)"), 60)
    assert report.rows[0]["note"] == "3"


def test_a_driver_is_found_where_one_is_loaded(tmp_path):
    # In a process of its own: others of these tests load a stand-in for the driver.
    code = (
        "import ctypes, sys; from bench.gpu import jit; print(jit.driver_library()); "
        "ctypes.CDLL(sys.argv[1]); print(jit.driver_library())"
    )
    (some_library,) = {
        line.split()[-1]
        for line in Path("/proc/self/maps").read_text().splitlines()
        if "kvpool_ext/gate" in line
    }
    library = tmp_path / "libcuda.so.1"
    library.write_bytes(Path(some_library).read_bytes())
    command = [sys.executable, "-c", code, str(library)]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    before, after = run.stdout.split()
    assert after == str(library)
    assert has_gpu() or before == "None"


def test_each_kernel_is_compiled_by_a_process_of_its_own():
    for kind, dtype in jit.KERNELS:
        assert jit.command(kind, dtype)[-3:] == ["bench.gpu.jit", kind, dtype]
    with pytest.raises(SystemExit) as stop:
        jit.main(["decode", "float32"])
    assert stop.value.code == 2
