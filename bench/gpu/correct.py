"""(a) Every kernel and dtype against the CPU kernels and NumPy, bit for bit."""

from __future__ import annotations

import itertools

import ml_dtypes
import numpy as np

from bench.gpu.report import bits, upload
from kvpool.dtypes import FLOAT_DTYPES, FP8_DTYPES
from kvpool.kernels import cpu

SOURCES = {**FLOAT_DTYPES, "float64": np.dtype(np.float64)}
# heads, dim: 16-byte rows, and rows that only single elements fit.
SHAPES = ((8, 128), (3, 5))
LAYERS, SLOTS = 2, 512
SCALES = (1.0, 0.015, 3.0, 1e-3, 240.0)


def run(cupy, report):
    """Add a row per kernel and pair of dtypes; the value is how many elements differ."""
    from kvpool.kernels import cuda, cuda_moves

    seed = np.random.SeedSequence()  # fresh data at every run, printed to be repeated
    report.add("correct", f"seed {seed.entropy}", 0, "")
    rng = np.random.default_rng(seed)
    for heads, dim in SHAPES:
        for stored, source in itertools.product(FLOAT_DTYPES, SOURCES):
            check_moves(cupy, report, cuda, rng, (heads, dim), stored, source)
        over_layers(cupy, report, cuda, rng, (heads, dim))
    for way in ways(cuda_moves):
        for stored, source in itertools.product(FP8_DTYPES, SOURCES):
            check_moves(cupy, report, cuda, rng, (3, 5), stored, source, way)
            check_moves(cupy, report, cuda, rng, (8, 128), stored, source, way)
        for stored in FP8_DTYPES:
            exhaustive(cupy, report, cuda, rng, stored, way)


def ways(cuda_moves):
    """FP8 by the hardware where there is some, then by integers."""
    real = cuda_moves.has_fp8_hardware
    if real(0):
        yield "hardware"
    cuda_moves.has_fp8_hardware = lambda index: False
    cuda_moves._plans.clear()
    yield "integers"
    cuda_moves.has_fp8_hardware = real
    cuda_moves._plans.clear()


def odd_slots(rng, n, dtype):
    """Slots in no order, some of them negative, some past the end, none twice."""
    slots = rng.permutation(SLOTS)[:n].astype(dtype)
    slots[::7] = -1
    slots[3::11] = SLOTS + 5
    return slots


def random_rows(rng, shape, dtype):
    """Bit patterns of all kinds: NaN, infinities, subnormals."""
    width = dtype.itemsize
    return rng.integers(0, 256, (*shape[:-1], shape[-1] * width), np.uint8).view(dtype)


def check_moves(cupy, report, cuda, rng, shape, stored, source, way=""):
    """Scatter and gather of one pair of dtypes, from slices of a fused projection."""
    heads, dim = shape
    is_fp8 = stored in FP8_DTYPES
    storage = np.dtype(np.uint8) if is_fp8 else FLOAT_DTYPES[stored]
    dtype, n = SOURCES[source], 61 if report.small else 301
    differing = 0
    for slot_dtype, scale in ((np.int64, 1.0), (np.int32, 0.015)):
        fused = random_rows(rng, (n, 3 * heads, dim), dtype)
        there = upload(cupy, fused)
        k, v = slice(heads, 2 * heads), slice(2 * heads, None)
        slots = odd_slots(rng, n, slot_dtype)
        caches = [random_rows(rng, (SLOTS, heads, dim), storage) for _ in "kv"]
        device = [upload(cupy, cache) for cache in caches]
        extra = (stored, scale, 2 * scale) if is_fp8 else ()
        verb = "scatter_fp8" if is_fp8 else "scatter"
        on_device = cupy.asarray(slots)
        getattr(cpu, verb)(*caches, fused[:, k], fused[:, v], slots, *extra)
        getattr(cuda, verb)(*device, there[:, k], there[:, v], on_device, *extra)
        differing += sum(map(differences, device, caches))
        if source == "float64":
            continue
        outs = [np.empty((n, heads, dim), dtype) for _ in "kv"]
        device_outs = [upload(cupy, out) for out in outs]
        verb = "gather_fp8" if is_fp8 else "gather"
        getattr(cpu, verb)(*caches, slots, *extra, *outs)
        getattr(cuda, verb)(*device, on_device, *extra, *device_outs)
        differing += sum(map(differences, device_outs, outs))
    name = f"{source} <-> {stored}, {heads} x {dim} {way}".rstrip()
    report.add("correct", name, differing, "differ", ok=differing == 0)


def differences(device, host):
    """Elements whose bits differ, where a NaN equals any NaN of its dtype but a code's."""
    found = device.view(f"u{host.dtype.itemsize}").get()
    unequal = found != bits(host)
    if host.dtype != np.uint8:
        with np.errstate(invalid="ignore"):
            unequal &= ~(np.isnan(found.view(host.dtype)) & np.isnan(host))
    return int(unequal.sum())


def over_layers(cupy, report, cuda, rng, shape):
    """Zero and copy slots on all layers."""
    for name in (*FLOAT_DTYPES, "uint8"):
        dtype = np.dtype(FLOAT_DTYPES.get(name, name))
        caches = [random_rows(rng, (LAYERS, SLOTS, *shape), dtype) for _ in "kv"]
        device = [upload(cupy, cache) for cache in caches]
        order = rng.permutation(SLOTS).astype(np.int64)
        source, target, zeroed = order[:100], order[100:200], odd_slots(rng, 200, np.int64)
        source[0], target[1] = -1, SLOTS
        for module, arrays, put in ((cpu, caches, np.asarray), (cuda, device, cupy.asarray)):
            module.copy_slots(*arrays, put(source), put(target))
            module.zero(*arrays, put(zeroed))
        differing = sum(map(differences, device, caches))
        case = f"zero and copy_slots of {name}, {shape[0]} x {shape[1]}"
        report.add("correct", case, differing, "differ", ok=differing == 0)


def exhaustive(cupy, report, cuda, rng, stored, way):
    """All 16-bit inputs, many float32 bit patterns, all codes, at several scales."""
    inputs = {
        "bfloat16": np.arange(2**16, dtype=np.uint16).view(ml_dtypes.bfloat16),
        "float16": np.arange(2**16, dtype=np.uint16).view(np.float16),
        "float32": rng.integers(0, 2**32, 2**16 if report.small else 2**22, np.uint32).view(
            np.float32
        ),
    }
    codes = np.arange(256, dtype=np.uint8).reshape(16, 1, 16)
    for name, values in inputs.items():
        rows = values.reshape(-1, 1, 64)
        slots = np.arange(len(rows))
        there, on_device = upload(cupy, rows), cupy.asarray(slots)
        differing = 0
        for scale in SCALES:
            caches = [np.zeros(rows.shape, np.uint8) for _ in "kv"]
            device = [cupy.zeros(rows.shape, np.uint8) for _ in "kv"]
            arguments = (stored, scale, 1.0)
            cpu.scatter_fp8(*caches, rows, rows, slots, *arguments)
            cuda.scatter_fp8(*device, there, there, on_device, *arguments)
            outs = [np.zeros(codes.shape, rows.dtype) for _ in "kv"]
            device_outs = [upload(cupy, out) for out in outs]
            there_codes = cupy.asarray(codes)
            cpu.gather_fp8(codes, codes, slots[:16], *arguments, *outs)
            cuda.gather_fp8(there_codes, there_codes, on_device[:16], *arguments, *device_outs)
            differing += sum(map(differences, device + device_outs, caches + outs))
        case = f"{len(values):,} of {name} to {stored}, 256 codes back, {way}"
        report.add("correct", case, differing, "differ", ok=differing == 0)
