"""All that only a GPU can show: one command, under four minutes on an H200.

`python -m bench.gpu_check [--json FILE]` needs CuPy and numba-cuda (kvpool[cuda12] or
kvpool[cuda13]); torch, FlashInfer, and what the example needs, are used where they are installed,
and rows say where they are not. It prints one table, writes it as JSON, and exits with 1 if
anything failed. Its sections, in the order in which they run:

correct     every kernel and dtype against the CPU kernels, bit for bit, on fresh random data;
tables      what `prepare` of graphs leaves on the device, against lists, for random batches;
tensors     torch over the pool's arrays: the same memory, both ways, under the right dtype;
attention   attention in plain array code against float64, from the stored bytes;
graphs      capture and replay of puts and page tables, in graphs of CuPy and torch;
flashinfer  decode, prefill and verify windows by FlashInfer against float64, bfloat16 and FP8;
loops       captured decode and verify loops with FlashInfer against eager ones;
launch      what a launch costs the host;
prepare     what the tables of a step, `prepare` and FlashInfer's plan cost the host;
example     the example, end to end;
bandwidth   against a device copy of the same bytes, and against assignments by index.

FlashInfer compiles its kernels when they are first used. They are compiled ahead, in processes
beside the first sections, and waited for `--jit-seconds` at most: nothing is timed before that.

`--sanitize` runs `correct` and `tables`, with small sizes, under compute-sanitizer instead.
"""

import argparse
import platform
import shutil
import subprocess
import sys
import tempfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from bench.gpu import (
    attention,
    bandwidth,
    capture,
    correct,
    demo,
    graphs,
    guests,
    jit,
    loops,
    prepare,
    tables,
    tensors,
    workspaces,
)
from bench.gpu.report import Report

# In this order; bandwidth has the most to leave out, so it comes when all else is known.
SECTIONS = ("correct", "tables", "tensors", "attention", "graphs", "flashinfer", "loops", "launch")
SECTIONS += ("prepare", "example", "bandwidth")
PACKAGES = ("kvpool", "numba", "numba-cuda", "cuda-core", "cuda-bindings", "numpy", "ml-dtypes")
PACKAGES += ("cupy-cuda12x", "cupy-cuda13x", "torch", "flashinfer-python", "apache-tvm-ffi")
ROOT = Path(__file__).resolve().parent.parent


def parse(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", metavar="FILE", help="also write the table there")
    parser.add_argument(
        "--only",
        metavar="SECTION",
        choices=SECTIONS,
        nargs="+",
        default=SECTIONS,
        help=f"some of: {', '.join(SECTIONS)}",
    )
    parser.add_argument("--small", action="store_true", help="small sizes only")
    parser.add_argument("--seconds", type=float, default=230.0, help="leave out what comes later")
    parser.add_argument(
        "--jit-seconds",
        type=float,
        default=100.0,
        help="how long to wait for FlashInfer's kernels at most",
    )
    parser.add_argument("--sanitize", action="store_true", help="run some in compute-sanitizer")
    return parser.parse_args(argv)


def about(cupy):
    """The machine and the versions, for the JSON."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = None
    properties = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.Device().id)
    return {
        "gpu": properties["name"].decode(),
        "compute_capability": cupy.cuda.Device().compute_capability,
        "driver": cupy.cuda.runtime.driverGetVersion(),
        "python": platform.python_version(),
        "versions": versions,
    }


def sanitized():
    """Run what compares bits under compute-sanitizer; its exit status."""
    tool = shutil.which("compute-sanitizer")
    if tool is None:
        print("compute-sanitizer is not installed: it comes with the CUDA toolkit")
        return 2
    own = [sys.executable, "-m", "bench.gpu_check", "--small"]
    own += ["--only", "correct", "tables"]
    return subprocess.run([tool, "--error-exitcode", "3", *own], cwd=ROOT).returncode


def check(options, cupy):
    """Run the sections; the report."""
    report = Report(seconds=options.seconds, small=options.small)
    with tempfile.TemporaryDirectory() as folder:
        kernels = FlashInferKernels(options, report, folder)
        run = {
            "correct": lambda: correct.run(cupy, report),
            "tables": lambda: tables.run(report),
            "tensors": lambda: tensors.run(cupy, report),
            "attention": lambda: attention.run_array_code(cupy, report),
            "graphs": lambda: graphs.run(cupy, report, captures(cupy, report, "graphs")),
            "flashinfer": lambda: with_flashinfer(cupy, report, kernels.missing()),
            "loops": lambda: loops.run(
                cupy, report, captures(cupy, report, "loops"), kernels.missing()
            ),
            "launch": lambda: bandwidth.launch_cost(cupy, report),
            "prepare": lambda: prepare.run(cupy, report, kernels.missing()),
            "example": lambda: demo.run(report),
            "bandwidth": lambda: bandwidth.run(cupy, report),
        }
        try:
            for section in (name for name in SECTIONS if name in options.only):
                try:
                    run[section]()
                except Exception as error:  # one section must not hide the others
                    report.add(section, "did not finish", 0, "", ok=False, note=repr(error)[:300])
        finally:
            kernels.stop()
    return report


def with_flashinfer(cupy, report, missing):
    """Attention by FlashInfer, and what its planner needs for large steps."""
    attention.run_flashinfer(cupy, report, missing)
    workspaces.run(cupy, report, missing)


class FlashInferKernels:
    """FlashInfer's kernels: compiled beside the first sections, waited for once.

    Parameters
    ----------
    options : argparse.Namespace
        Sections, and how long to wait.
    report : Report
        Gets a row per kernel.
    folder : str
        For their output; it must outlive this.
    """

    def __init__(self, options, report, folder):
        self._options, self._report = options, report
        self._why = guests.why_no_flashinfer()
        self._missing = None
        wanted = {"flashinfer", "loops"} & set(options.only)
        is_needed = wanted or "prepare" in options.only
        # The costs of a plan need one kernel only.
        kernels = jit.KERNELS if wanted else (("prefill", "bfloat16"),)
        self._builds = jit.start(folder, kernels) if is_needed and not self._why else []

    def missing(self):
        """(kind, dtype) of kernels that are not there, and why; the first call waits for them."""
        if self._missing is None:
            if self._why:
                self._missing = dict.fromkeys(jit.KERNELS, self._why)
            else:
                seconds = self._options.jit_seconds
                self._missing = jit.finish(self._report, self._builds, seconds)
        return self._missing

    def stop(self):
        """End what still compiles."""
        jit.stop(self._builds)


def captures(cupy, report, section):
    """Ways to capture a function: by CuPy, and by torch where that sees the GPU."""
    found = {"CuPy graph": capture.by_cupy(cupy)}
    why = guests.why_no_torch()
    if why:
        report.skip(section, "torch graph", why)
    else:
        found["torch graph"] = capture.by_torch(cupy, guests.torch_or_none())
    return found


def main(argv=None):
    options = parse(argv)
    if options.sanitize:
        return sanitized()
    from kvpool.device import device_of

    try:
        cupy = device_of("cuda").array_namespace
    except ValueError as error:
        print(f"bench.gpu_check: {error}")
        return 2
    report = check(options, cupy)
    if options.json:
        report.write_json(options.json, about(cupy))
    print(f"{len(report.rows)} rows, {len(report.failed)} failed")
    return 1 if report.failed else 0


if __name__ == "__main__":
    sys.exit(main())
