"""The GPU script without a GPU: how it captures, and how it compiles FlashInfer's kernels."""

import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from bench.gpu import capture, jit
from bench.gpu.report import Report
from tests.conftest import has_gpu

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
