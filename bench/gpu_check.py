"""All that only a GPU can show: one command, under four minutes on an H200.

`python -m bench.gpu_check [--json FILE]` needs CuPy and numba-cuda (kvpool[cuda12] or
kvpool[cuda13]); torch, and what the example needs, are used where they are installed. It prints
one table, writes it as JSON, and exits with 1 if anything failed:

(a) every kernel and dtype against the CPU kernels, bit for bit, on fresh random data;
(b) bandwidth against a device copy of the same bytes, and against assignments by index;
(c) what a launch costs the host;
(d) capture and replay in graphs of CuPy and torch;
(e) the example, end to end.

`--sanitize` runs (a), with small sizes, under compute-sanitizer instead.
"""

import argparse
import platform
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from bench.gpu import bandwidth, correct, demo, graphs
from bench.gpu.report import Report

SECTIONS = ("correct", "bandwidth", "launch", "graphs", "example")
PACKAGES = ("kvpool", "numba", "numba-cuda", "cuda-core", "cuda-bindings", "numpy", "ml-dtypes")
PACKAGES += ("cupy-cuda12x", "cupy-cuda13x", "torch", "flashinfer-python")
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
        "--sanitize", action="store_true", help="run `--only correct --small` in compute-sanitizer"
    )
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
    """Run the correctness part under compute-sanitizer; its exit status."""
    tool = shutil.which("compute-sanitizer")
    if tool is None:
        print("compute-sanitizer is not installed: it comes with the CUDA toolkit")
        return 2
    own = [sys.executable, "-m", "bench.gpu_check", "--only", "correct", "--small"]
    return subprocess.run([tool, "--error-exitcode", "3", *own], cwd=ROOT).returncode


def check(options, cupy):
    """Run the sections; the report."""
    report = Report(seconds=options.seconds, small=options.small)
    run = {
        "correct": lambda: correct.run(cupy, report),
        "bandwidth": lambda: bandwidth.run(cupy, report),
        "launch": lambda: bandwidth.launch_cost(cupy, report),
        "graphs": lambda: graphs.run(cupy, report),
        "example": lambda: demo.run(report),
    }
    # Bandwidth has the most to leave out, so it comes when all else is known.
    for section in sorted(options.only, key=lambda name: name == "bandwidth"):
        try:
            run[section]()
        except Exception as error:  # one section must not hide the others
            report.add(section, "did not finish", 0, "", ok=False, note=repr(error)[:300])
    return report


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
