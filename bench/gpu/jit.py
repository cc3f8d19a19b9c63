"""FlashInfer's kernels, compiled in processes of their own while other sections run.

FlashInfer compiles a kernel when it is first planned for, and that can take longer than all the
rest. Each process here makes one small pool and attends once, which leaves one kernel on disk. One
that fails or takes too long costs the rows that need it, and no others.

`python -m bench.gpu.jit KIND DTYPE` is such a process. MAX_JOBS is FlashInfer's own variable for
how many files one of them compiles at a time; unless it is set they share the processors.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO

ROOT = Path(__file__).resolve().parent.parent.parent
DTYPES = ("bfloat16", "float8_e4m3fn", "float8_e5m2")
# Decode kernels first, which are small. Groups from 4 on, and decode in graphs, use the prefill
# kernels: see `kvpool.interop.flashinfer.use_tensor_cores`.
KERNELS = tuple((kind, dtype) for kind in ("decode", "prefill") for dtype in DTYPES)
POLL_SECONDS = 0.1


@dataclass
class Build:
    """One process."""

    kind: str
    dtype: str
    process: subprocess.Popen[bytes]
    output: IO[bytes]
    started: float
    seconds: float | None = None

    def poll(self):
        if self.seconds is None and self.process.poll() is not None:
            self.seconds = time.perf_counter() - self.started
        return self.seconds is not None

    def stop(self):
        """End the process and the compilers that it started, which are a group of their own."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def last_words(self):
        self.output.seek(0)
        return " ".join(self.output.read().decode(errors="replace").split())[-250:]


def command(kind, dtype):
    """What compiles one kernel."""
    return [sys.executable, "-m", "bench.gpu.jit", kind, dtype]


def start(folder, kernels=KERNELS):
    """Start compiling; `folder` may be used as long as the builds are."""
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    jobs = max(2, 2 * (os.cpu_count() or 2) // len(kernels))
    environment.setdefault("MAX_JOBS", str(jobs))
    library = driver_library()
    if library is not None:
        # FlashInfer links with -lcuda. A driver alone has libcuda.so.1 only.
        Path(folder, "libcuda.so").symlink_to(library)
        paths = [str(folder), os.environ.get("LIBRARY_PATH", "")]
        environment["LIBRARY_PATH"] = os.pathsep.join(filter(None, paths))
    builds = []
    for kind, dtype in kernels:
        output = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115  closed by `stop`
        process = subprocess.Popen(
            command(kind, dtype),
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        builds.append(Build(kind, dtype, process, output, time.perf_counter()))
    return builds


def finish(report, builds, seconds):
    """Wait for the builds so long at most, add a row for each, and say what is missing and why.

    Returns
    -------
    dict
        (kind, dtype) of what is not there, and why.
    """
    missing, deadline = {}, time.perf_counter() + seconds
    while not poll_all(builds) and time.perf_counter() < deadline:
        time.sleep(POLL_SECONDS)
    for build in builds:
        case = f"JIT of {build.kind}, {build.dtype}, with the start of a process"
        if not build.poll():
            build.stop()
            why = f"not compiled within {time.perf_counter() - build.started:.0f} s"
            report.skip("flashinfer", case, why)
        elif build.process.returncode:
            why = "the kernel could not be compiled"
            report.add("flashinfer", case, build.seconds, "s", ok=False, note=build.last_words())
        else:
            report.add("flashinfer", case, build.seconds, "s", ok=True)
            continue
        missing[build.kind, build.dtype] = why
    return missing


def poll_all(builds):
    """Whether all have ended; each is looked at, for the time at which it did."""
    return sum(build.poll() for build in builds) == len(builds)


def stop(builds):
    """End what still runs."""
    for build in builds:
        if not build.poll():
            build.stop()
        build.output.close()


def driver_library():
    """The file of the driver's library that this process has loaded; None where there is none."""
    try:
        maps = Path("/proc/self/maps").read_text()
    except OSError:
        return None
    paths = {line.split(maxsplit=5)[-1] for line in maps.splitlines() if "libcuda.so" in line}
    return min(paths, default=None)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kind", choices=("decode", "prefill"))
    parser.add_argument("dtype", choices=DTYPES)
    options = parser.parse_args(argv)
    attend_once(options.kind, options.dtype)


def attend_once(kind, dtype):
    """Plan and run attention over one small pool, of the sizes that the sections use."""
    import ml_dtypes
    import numpy as np

    from bench.gpu.attention import HEAD_DIM, KV_HEADS
    from bench.gpu.report import upload
    from kvpool import KVCachePool
    from kvpool.attention import PagedAttention
    from kvpool.device import device_of

    cupy = device_of("cuda").array_namespace
    with KVCachePool(1, 64, KV_HEADS, HEAD_DIM, device="cuda", dtype=dtype) as pool:
        pool.bind_request([1, 2, 3], 16)
        table = pool.step.page_table([3])
        count = 1 if kind == "decode" else 2
        q = upload(cupy, np.zeros((count, KV_HEADS, HEAD_DIM), ml_dtypes.bfloat16))
        qo_indptr = None if kind == "decode" else [0, count]
        attention = PagedAttention(pool, table, qo_indptr=qo_indptr)
        attention.run(0, q)
        if attention.backend != "flashinfer":
            raise RuntimeError(f"{attention.backend} attends: kvpool finds no FlashInfer")
        cupy.cuda.Device().synchronize()


if __name__ == "__main__":
    main()
