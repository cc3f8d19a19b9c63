"""What a launch costs the host: a put through kvpool against the same put by numba's dispatcher.

`python -m bench.launch [--json FILE]`. No GPU is used, nor needed: the driver is a stand-in that
returns at once (`tests/fakes/libcuda.c`), so all that is measured is Python, Cython and C++ on
the way to it, in processor time. A real driver adds what it takes to queue a launch, about 2 us,
to each of the paths. Arrays are CuPy's own, over host memory, where CuPy is installed; its current
stream and current device, which it would ask its runtime for, are constants.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from bench.clock import Table
from tests.fakes import cupy_like, driver

HEADS, HEAD_DIM, PAGE_SIZE, BATCH = 8, 128, 16, 64
LAUNCHES = 200
INSIDE = "KVPOOL_BENCH_LAUNCH"


def real_arrays():
    """CuPy with its arrays over host memory, and no runtime under it; None where it is missing."""
    try:
        import cupy
    except ImportError:
        return None

    def over(host):
        memory = cupy.cuda.memory.UnownedMemory(host.ctypes.data, host.nbytes, host, 0)
        return cupy.ndarray(host.shape, host.dtype, cupy.cuda.MemoryPointer(memory, 0))

    stream = SimpleNamespace(ptr=0x1230)
    runtime = cupy.cuda.runtime
    cupy.cuda.get_current_stream = lambda index=None: stream
    cupy.cuda.Device = cupy_like.Device
    runtime.getDevice, runtime.getDeviceCount = lambda: 0, lambda: 1
    runtime.setDevice, runtime.streamIsCapturing = lambda index: None, lambda stream: False
    cupy.zeros = lambda shape, dtype: over(np.zeros(shape, dtype))
    cupy.empty = lambda shape, dtype: over(np.empty(shape, dtype))
    cupy.asarray = lambda host: over(host)
    return cupy


class Interface:
    """An array as numba takes it from any library: by the CUDA array interface, version 3."""

    def __init__(self, array):
        self.__cuda_array_interface__ = {
            "shape": array.shape,
            "strides": array.strides,
            "typestr": np.dtype(np.uint16).str,
            "data": (array.data.ptr, False),
            "version": 3,
            "stream": None,
        }


def numba_calls(arrays, slots):
    """The same put by numba's dispatcher: with arrays, and with integers."""
    from numba import cuda

    @cuda.jit
    def by_arrays(k_cache, v_cache, k_rows, v_rows, slots, num_rows):
        i = cuda.blockIdx.x
        if i < num_rows and slots[i] >= 0:
            j = cuda.threadIdx.x
            k_cache[slots[i], 0, j] = k_rows[i, 0, j]
            v_cache[slots[i], 0, j] = v_rows[i, 0, j]

    from kvpool.kernels import cuda_kernels
    from kvpool.kernels.launch import Kernel

    spec = cuda_kernels.scatter("bfloat16", "bfloat16", 8, 8)
    by_integers = cuda.jit(spec.function)
    grid, block = (BATCH // 2, 1, 1), (128, 2, 1)
    views = [Interface(array) for array in arrays]
    indices = Interface(slots)
    indices.__cuda_array_interface__["typestr"] = "<i8"
    numbers = list(range(1, len(spec.parameters) + 1))
    ours = Kernel(spec.function, len(spec.parameters), spec.name).bind(0, grid, block)
    numbers = tuple(numbers)
    by_arrays_there, by_integers_there = by_arrays[grid, block], by_integers[grid, block]
    return {
        "numba, 5 arrays": lambda: by_arrays[grid, block](*views, indices, BATCH),
        "numba, 5 arrays, configured before": lambda: by_arrays_there(*views, indices, BATCH),
        "numba, 14 integers, configured before": lambda: by_integers_there(*numbers),
        "launch alone, 14 integers": lambda: ours.launch(0x1230, numbers),
    }


def measure(rounds):
    driver.linker_that_fits()
    cupy = real_arrays()
    arrays_of = "CuPy's arrays" if cupy else "stand-ins for CuPy's arrays"
    if cupy is None:
        cupy = cupy_like.install()
    driver.Driver().expect(0)  # parameters to look at
    from cuda.core import Device

    Device(0).set_current()

    from kvpool import KVCachePool
    from kvpool.kernels import cuda

    bf16 = np.dtype("bfloat16")
    pools = {
        name: KVCachePool(
            1,
            2048,
            HEADS,
            HEAD_DIM,
            page_size=PAGE_SIZE,
            device="cuda",
            dtype=name,
            max_batch_size=BATCH,
        )
        for name in ("bfloat16", "float8_e4m3fn")
    }
    k, v = (cupy.zeros((BATCH, 1, HEADS, HEAD_DIM), bf16) for _ in "kv")
    k_rows, v_rows = k.reshape(BATCH, HEADS, HEAD_DIM), v.reshape(BATCH, HEADS, HEAD_DIM)
    calls = {}
    for name, pool in pools.items():
        ids = [pool.bind_request([1], 16) for _ in range(BATCH)]
        step = pool.activate_step(*ids)
        slots = step.window_slot_indices(0, 1)
        step.put(0, 0, k, v)
        calls[f"step.put, {name}"] = lambda step=step, slots=slots: step.put(
            0, 0, k, v, slots=slots
        )
        if name == "bfloat16":
            caches = pool.layer_with_scratch(0)
            calls["kernels.cuda.scatter"] = lambda caches=caches, slots=slots: cuda.scatter(
                *caches, k_rows, v_rows, slots
            )
            arrays = [*caches, k_rows, v_rows]
            calls |= numba_calls(arrays, slots)
    for call in calls.values():
        call()
    return arrays_of, processor_time(calls, rounds)


def processor_time(calls, rounds):
    """Median seconds a call; the cases take turns, and time of other processes is left out."""
    samples = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            start = time.thread_time()
            for _ in range(LAUNCHES):
                call()
            samples[name].append((time.thread_time() - start) / LAUNCHES)
    return {name: statistics.median(times) for name, times in samples.items()}


def inside(options):
    arrays_of, seconds = measure(options.rounds)
    table = Table(f"host cost of a put of {BATCH} rows, driver faked, {arrays_of}, medians")
    numba = seconds["numba, 5 arrays"]
    for name, value in sorted(seconds.items(), key=lambda item: item[1]):
        table.add(name, value * 1e6, "us", ratio=numba / value, to="less than numba, 5 arrays")
    table.show()
    if options.json:
        table.write_json(options.json)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", metavar="FILE", help="also write the table there")
    parser.add_argument("--rounds", type=int, default=15, help="samples a case")
    options = parser.parse_args(argv)
    if os.environ.get(INSIDE):
        inside(options)
        return
    reason = driver.missing()
    if reason:
        print(f"bench.launch: skipped, {reason}")
        return
    with tempfile.TemporaryDirectory() as folder:
        paths = [str(driver.build(folder)), os.environ.get("LD_LIBRARY_PATH", "")]
        environment = os.environ | {
            "LD_LIBRARY_PATH": os.pathsep.join(filter(None, paths)),
            "NUMBA_CUDA_LOW_OCCUPANCY_WARNINGS": "0",
            INSIDE: "1",
        }
        command = [sys.executable, "-m", "bench.launch", *(sys.argv[1:] if argv is None else argv)]
        root = Path(__file__).resolve().parent.parent
        sys.exit(subprocess.run(command, env=environment, cwd=root).returncode)


if __name__ == "__main__":
    main()
