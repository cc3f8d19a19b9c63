"""(b) Bandwidth against a device copy of the same bytes, and (c) what a launch costs the host."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from bench.gpu.guests import torch_or_none
from bench.gpu.report import device_seconds, event_seconds, host_seconds, upload

ROWS = (1, 16, 256, 4_096, 65_536)
ROW_BYTES = (256, 2_048, 8_192)
DEVICE_TO_DEVICE = 3
# What the issue of the GPU path asks for, at 65,536 rows of 2 KB.
GOALS = {"scatter": 0.90, "gather": 0.90, "zero": 0.90, "scatter_fp8": 0.85}
E4M3 = "float8_e4m3fn"


def run(cupy, report):
    """Add a row per kernel, number of rows and size of a row."""
    for row_bytes in ROW_BYTES[:1] if report.small else ROW_BYTES:
        for num_rows in ROWS[:3] if report.small else ROWS:
            if report.time_is_up:
                report.add("bandwidth", f"{num_rows} x {row_bytes}", 0, "", note="out of time")
                continue
            measure(cupy, report, num_rows, row_bytes)


def measure(cupy, report, num_rows, row_bytes):
    from kvpool.kernels import cuda

    heads, dim = 1, row_bytes // 2
    total = max(2 * num_rows, 1024)
    bf16 = np.dtype(ml_dtypes.bfloat16)
    host_slots = np.random.default_rng(num_rows).permutation(total)[:num_rows].astype(np.int64)
    slots = cupy.asarray(host_slots)
    k, v = (cupy.zeros((num_rows, heads, dim), np.uint16).view(bf16) for _ in "kv")
    caches = [cupy.zeros((total, heads, dim), np.uint16).view(bf16) for _ in "kv"]
    codes = [cupy.zeros((total, heads, dim), np.uint8) for _ in "kv"]
    layers = [cache[None] for cache in caches]
    moves = {
        "scatter": cuda.Move("scatter", *caches),
        "gather": cuda.Move("gather", *caches),
        "scatter_fp8": cuda.Move("scatter", *codes, E4M3, 0.015, 0.015),
        "gather_fp8": cuda.Move("gather", *codes, E4M3, 0.015, 0.015),
    }
    payload = 2 * num_rows * row_bytes  # K and V
    # Bytes read and written: a copy of n bytes moves 2 n.
    moved = {"zero": payload, "scatter_fp8": 1.5 * payload, "gather_fp8": 1.5 * payload}
    copies = {}
    for name in (*moves, "zero"):
        traffic = int(moved.get(name, 2 * payload))
        if traffic not in copies:
            copies[traffic] = device_seconds(cupy, copier(cupy, traffic // 2))
        if name == "zero":
            # Its launch is made anew at every call, which a graph leaves out of the time.
            seconds = device_seconds(cupy, lambda: cuda.zero(*layers, slots))
        else:
            launches = moves[name].prepare(slots, k, v)
            seconds = device_seconds(cupy, lambda launches=launches: cuda.run(launches))
        share = copies[traffic] / seconds
        at_goal = name in GOALS and (num_rows, row_bytes) == (65_536, 2_048)
        note = f"{share:6.1%} of a copy, {seconds * 1e6:.2f} us"
        ok = share >= GOALS[name] if at_goal else None
        case = f"{name}, {num_rows:,} rows of {row_bytes:,} bytes"
        report.add("bandwidth", case, traffic / seconds / 1e9, "GB/s", ok=ok, note=note)
    by_index(cupy, report, caches, slots, (k, v), payload)


def by_index(cupy, report, caches, slots, rows, payload):
    """What one would write without kvpool: two assignments by index."""
    num_rows = len(slots)
    words = [cache.view(np.uint16) for cache in caches]
    sources = [row.view(np.uint16) for row in rows]

    def assign():
        for word, source in zip(words, sources, strict=True):
            word[slots] = source

    stream = cupy.cuda.get_current_stream()
    seconds = event_seconds(cupy, stream, assign)
    case = f"cupy cache[idx] = k, {num_rows:,} rows of {payload // 2 // num_rows:,} bytes"
    report.add(
        "bandwidth", case, 2 * payload / seconds / 1e9, "GB/s", note=f"{seconds * 1e6:.2f} us"
    )
    torch = torch_or_none()
    if torch is None:
        return
    tensors = [torch.from_dlpack(word.view(np.int16)) for word in words]
    values = [torch.from_dlpack(source.view(np.int16)) for source in sources]
    index = torch.from_dlpack(slots)

    def assign_torch():
        for tensor, value in zip(tensors, values, strict=True):
            tensor[index] = value

    with torch.cuda.stream(torch.cuda.ExternalStream(stream.ptr)):
        seconds = event_seconds(cupy, stream, assign_torch)
    case = f"torch cache[idx] = k, {num_rows:,} rows of {payload // 2 // num_rows:,} bytes"
    report.add(
        "bandwidth", case, 2 * payload / seconds / 1e9, "GB/s", note=f"{seconds * 1e6:.2f} us"
    )


def copier(cupy, num_bytes):
    """A copy of so many bytes on the current stream."""
    source, target = (cupy.zeros(max(num_bytes, 1), np.uint8) for _ in "st")

    def copy():
        stream = cupy.cuda.get_current_stream()
        cupy.cuda.runtime.memcpyAsync(
            target.data.ptr, source.data.ptr, num_bytes, DEVICE_TO_DEVICE, stream.ptr
        )

    return copy


def launch_cost(cupy, report):
    """(c) Host seconds of a put and of a launch, beside numba's dispatcher."""
    from numba import cuda as numba_cuda

    from kvpool import KVCachePool
    from kvpool.kernels import cuda

    batch = 64
    bf16 = np.dtype(ml_dtypes.bfloat16)
    k = upload(cupy, np.ones((batch, 1, 8, 128), bf16))
    wait = cupy.cuda.get_current_stream().synchronize
    for dtype in ("bfloat16", E4M3):
        with KVCachePool(
            1, 2048, 8, 128, device="cuda", dtype=dtype, max_batch_size=batch
        ) as pool:
            step = pool.activate_step(*(pool.bind_request([1], 16) for _ in range(batch)))
            slots = step.window_slot_indices(0, 1)
            step.put(0, 0, k, k, slots=slots)
            seconds = host_seconds(
                lambda step=step, slots=slots: step.put(0, 0, k, k, slots=slots), wait
            )
            report.add("launch", f"step.put, {dtype}", seconds * 1e6, "us")
            if dtype == "bfloat16":
                caches = pool.layer_with_scratch(0)
                launches = cuda.Move("scatter", *caches).prepare(slots, k, k)
                seconds = host_seconds(lambda launches=launches: cuda.run(launches), wait)
                report.add("launch", "launch alone, 14 integers", seconds * 1e6, "us")

    @numba_cuda.jit
    def scatter(k_cache, v_cache, k_rows, v_rows, slots):
        i = numba_cuda.blockIdx.x
        j = numba_cuda.threadIdx.x
        k_cache[slots[i], j] = k_rows[i, j]
        v_cache[slots[i], j] = v_rows[i, j]

    caches = [cupy.zeros((2048, 128), np.uint16) for _ in "kv"]
    rows = [cupy.zeros((batch, 128), np.uint16) for _ in "kv"]
    slots = cupy.arange(batch)
    launch = scatter[batch, 128]
    seconds = host_seconds(lambda: launch(*caches, *rows, slots), wait, samples=4)
    report.add("launch", "numba's dispatcher, 5 arrays", seconds * 1e6, "us")
