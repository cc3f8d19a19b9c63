"""What a process on the fake driver does for `tests/test_launch.py`; prints JSON.

It runs as ``python -m tests.fakes.launches CASE`` with the fake driver on ``LD_LIBRARY_PATH``.
"""

from __future__ import annotations

import json
import sys

import numpy as np

from tests.fakes import cupy_like, driver

CASES = {}


def case(function):
    CASES[function.__name__] = function
    return function


def three(a, b, c):
    """A kernel of three parameters."""


def start():
    """The driver, with a context current, and stand-ins for CuPy's arrays."""
    driver.linker_that_fits()
    fake = driver.Driver()
    fake.expect(0)
    from cuda.core import Device

    Device(0).set_current()
    return fake, cupy_like.install()


def shown(launch):
    return launch._asdict()


@case
def parameters():
    from kvpool.kernels.launch import Kernel

    fake, _ = start()
    bound = Kernel(three, 3, "three").bind(0, (3, 2, 1), (32, 4, 2))
    fake.expect(3)
    bound.launch(0x1234, (11, 2**63 - 1, -5))
    first = shown(fake.last)
    bound.launch(0, (1, 2, 3))
    return [first, shown(fake.last)]


@case
def big_grid():
    from kvpool.kernels.launch import Kernel

    fake, _ = start()
    Kernel(three, 3, "three").bind(0, (2**31 - 1, 65_535, 65_535), (256, 4, 1)).launch(
        0, (1, 2, 3)
    )
    return shown(fake.last)


@case
def compiled_once():
    """How often code was compiled and loaded: at first, again, from disk, from a broken file."""
    from kvpool.kernels import code_cache, launch

    fake, _ = start()
    compiled = []
    real = launch.compile_code
    launch.compile_code = lambda *args: compiled.append(args[2]) or real(*args)
    kernel = launch.Kernel(three, 3, "three")
    for _ in range(3):
        kernel.bind(0, (1, 1, 1), (32, 1, 1)).launch(0, (1, 2, 3))
    counts = [len(compiled), fake.libraries]
    launch.Kernel(three, 3, "three").bind(0, (1, 1, 1), (32, 1, 1))  # as a new process would
    counts += [len(compiled), fake.libraries]
    fake.expect(0, capability=100)
    files = sorted(path.name for path in code_cache.folder().iterdir())
    for path in code_cache.folder().iterdir():
        path.write_bytes(path.read_bytes()[:-1])  # cut short
    launch.Kernel(three, 3, "three").bind(0, (1, 1, 1), (32, 1, 1))
    return {"counts": [*counts, len(compiled)], "files": files, "capabilities": compiled}


@case
def old_linker():
    """A linker that refuses the PTX of a newer compiler: the driver gets it as it is."""
    import cuda.core

    from kvpool.kernels import code_cache, launch

    fake, _ = start()

    def refuse(*_):
        raise RuntimeError("unsupported version of PTX")

    cuda.core.Program = refuse
    launch.Kernel(three, 3, "three").bind(0, (1, 1, 1), (32, 1, 1)).launch(0, (1, 2, 3))
    code = code_cache.find("three", 3, (9, 0))
    return {"kind": code.kind, "launches": fake.last.count, "text": code.data[:2000].decode()}


@case
def pool_put():
    """A decode step and a ragged prefill from a slice of a fused projection."""
    fake, cupy = start()
    from kvpool import KVCachePool

    bf16 = np.dtype("bfloat16")
    pool = KVCachePool(3, 64, 2, 16, page_size=16, device="cuda:1", dtype=bf16)
    ids = [pool.bind_request(range(4), 32), pool.bind_request(range(9, 12), 16)]
    step = pool.activate_step(*ids)
    with cupy.cuda.Device(1):
        qkv = cupy.zeros((7, 8, 16), bf16)
    k, v = qkv[:, 4:6], qkv[:, 6:]
    slots = step.window_slot_indices([0, 0], [4, 3])
    step.put(1, [0, 0], k, v, qo_indptr=[0, 4, 7], slots=slots)
    k_layer, v_layer = pool.layer_with_scratch(2)
    fake.expect(14)
    cupy_like.State.stream = 0x77
    step.put(2, [0, 0], k, v, qo_indptr=[0, 4, 7], slots=slots)
    return {
        "launch": shown(fake.last),
        "expected": [
            *(k.data.ptr, v.data.ptr, 256, 256, 32, 32),
            *(k_layer.data.ptr, v_layer.data.ptr, 64, 32),
            *(slots.data.ptr, 7, 64, 4),
        ],
        "device_afterwards": cupy_like.State.device,
    }


@case
def capture():
    """What calls do in a graph capture, before and after `warm_up`; a put on new pages too."""
    _, cupy = start()
    from kvpool import KVCachePool, KVCacheStateError
    from kvpool.kernels import cuda, cuda_kernels

    # Two variants in place of all of them: compiling takes a while.
    cuda.specs_for = lambda stored, hardware: [
        cuda_kernels.scatter("float32", "float32", 8, 4),
        cuda_kernels.scatter("float32", "float32", 8, 1),
    ]
    said = {}

    def attempt(name, call):
        try:
            call()
            said[name] = "done"
        except KVCacheStateError as error:
            said[name] = str(error)

    pool = KVCachePool(1, 32, 1, 8, page_size=16, device="cuda", dtype="float32")
    step = pool.activate_step(pool.bind_request([1], 32))
    k = cupy.zeros((1, 1, 1, 8), np.float32)
    other = cupy.zeros((1, 1, 1, 9), np.float32)[..., 1:]  # only 4-byte aligned
    slots = step.window_slot_indices(0, 1)
    first = step.slot_indices(1)
    far = step.window_slot_indices(16, 1)
    with cupy_like.capture():
        attempt("cold", lambda: step.put(0, 0, k, k, slots=slots))
        attempt("warm_up", pool.warm_up)
    pool.warm_up()
    step.put(0, 0, k, k, slots=slots)  # enters the page, which zeroes it
    with cupy_like.capture():
        attempt("warm", lambda: step.put(0, 0, k, k, slots=slots))
        attempt("other alignment", lambda: step.put(0, 0, other, other, slots=slots))
        attempt("new page", lambda: step.put(0, 16, k, k, slots=far))
        attempt("slots made inside", lambda: step.window_slot_indices(1, 1))
        attempt("table", lambda: step.page_table(1))
        attempt("get", lambda: step.get(0, 1, slots=first))
        attempt("fork", lambda: pool.fork_request(step.request_ids[0], 16))
        said["forbidden"] = cupy_like.State.events
    fake = driver.Driver()
    before = fake.last.count if not fake.expect(0) else 0
    step.put(0, 16, k, k, slots=far)
    said["launches of the next put"] = fake.last.count - before  # the zeroing that was due, too
    return said


if __name__ == "__main__":
    print(json.dumps(CASES[sys.argv[1]]()))
