"""Races of put, get and zero: rows of 2 KB, in the compute dtype, to and from scattered pages.

A put to an FP8 pool divides by the scale, saturates and encodes, a get decodes and multiplies; the
other contenders do the same in the steps that their library has.
"""

import numpy as np

from bench.data.pools import (
    HEAD_DIM,
    decoded,
    decoded_by_torch,
    encoded,
    encoded_by_torch,
    scattered_pool,
)
from bench.data.race import Race, as_torch, torch, when_torch
from kvpool.dtypes import FLOAT_DTYPES
from kvpool.kernels import for_device
from kvpool.kernels.fp8 import FORMATS

ROW_BYTES = 2_048
ZEROED_LAYERS = 4


def races(dtype, num_rows):
    """Every race of one pool."""
    name = dtype if dtype in FORMATS else None
    compute = FLOAT_DTYPES["bfloat16" if name else dtype]
    heads = ROW_BYTES // HEAD_DIM // compute.itemsize
    with scattered_pool(dtype, 2 * num_rows, heads) as pool:
        request = pool.bind_request(range(num_rows), num_rows)
        step = pool.activate_step(request)
        rng = np.random.default_rng(1)
        shape = 2, 1, num_rows, heads, HEAD_DIM
        rows = rng.standard_normal(shape, np.float32).astype(compute)
        yield from _puts(dtype, name, pool, step, rows)
        yield from _gets(dtype, name, pool, step, rows)
    yield _zero(dtype, num_rows, heads)


def _puts(dtype, name, pool, step, rows):
    k, v = rows
    num_rows = rows.shape[2]
    caches = pool.key_layer(0), pool.value_layer(0)
    slots = step.window_slot_indices(0, num_rows)
    copies = np.zeros_like(rows)

    def by_numpy(count):
        for cache, values in zip(caches, rows, strict=True):
            values = values[0, :count]
            cache[slots[:count]] = encoded(values, name) if name else values

    def by_torch(count):
        for cache, values in zip(tensors, row_tensors, strict=True):
            values = values[0, :count]
            values = encoded_by_torch(values, name) if name else values
            cache.index_put_((slot_tensor[:count],), values)

    if torch is not None:
        tensors, row_tensors = [as_torch(cache) for cache in caches], as_torch(rows)
        slot_tensor = torch.tensor(slots)
    yield Race(
        f"put, {num_rows:,} rows",
        dtype,
        rows.nbytes,
        {
            "kvpool": lambda: step.put(0, 0, k, v, slots=slots),
            "kvpool, slots made inside": lambda: step.put(0, 0, k, v),
            "NumPy": lambda: by_numpy(num_rows),
            "torch": when_torch(lambda: by_torch(num_rows)),
            "copy": lambda: np.copyto(copies, rows),
        },
    )
    k_one, v_one, slots_of_one = k[:, :1], v[:, :1], step.window_slot_indices(0, 1)
    yield Race(
        "put, 1 row",
        dtype,
        rows[:, :, :1].nbytes,
        {
            "kvpool": lambda: step.put(0, 0, k_one, v_one, slots=slots_of_one),
            "NumPy": lambda: by_numpy(1),
            "torch": when_torch(lambda: by_torch(1)),
        },
        repeat=100,
    )


def _gets(dtype, name, pool, step, rows):
    num_rows = rows.shape[2]
    caches = pool.key_layer(0), pool.value_layer(0)
    slots = step.slot_indices(num_rows)
    copies = np.zeros_like(rows)
    step.put(0, 0, *rows)

    def by_numpy():
        for cache in caches:
            found = cache[slots]
            if name:
                found = decoded(found, name, rows.dtype)
        return found

    def by_torch():
        for cache in tensors:
            found = torch.index_select(cache, 0, slot_tensor)
            if name:
                found = decoded_by_torch(found, name, torch.bfloat16)
        return found

    if torch is not None:
        tensors, slot_tensor = [as_torch(cache) for cache in caches], torch.tensor(slots)
        assert (as_torch(step.get(0, num_rows)[1][0]) == by_torch()).all()
    assert (step.get(0, num_rows)[1][0] == by_numpy()).all()
    yield Race(
        f"get, {num_rows:,} rows",
        dtype,
        rows.nbytes,
        {
            "kvpool": lambda: step.get(0, num_rows),
            "NumPy": by_numpy,
            "torch": when_torch(by_torch),
            "copy": lambda: np.copyto(copies, rows),
            "copy, fresh": lambda: [half.copy() for half in rows],
        },
    )


def _zero(dtype, num_rows, heads):
    storage = np.dtype(np.uint8) if dtype in FORMATS else FLOAT_DTYPES[dtype]
    caches = np.ones((2, ZEROED_LAYERS, 2 * num_rows, heads, HEAD_DIM), storage)
    slots = np.random.default_rng(2).permutation(2 * num_rows // 16)[: num_rows // 16]
    slots = (slots[:, None] * 16 + np.arange(16)).reshape(-1)
    target = np.ones((2, ZEROED_LAYERS, num_rows, heads, HEAD_DIM), storage)
    zero = for_device("cpu").zero

    def by_numpy():
        for cache in caches:
            cache[:, slots] = 0

    def by_torch():
        for cache in tensors:
            cache.index_fill_(1, slot_tensor, 0)

    if torch is not None:
        tensors, slot_tensor = as_torch(caches), torch.tensor(slots)
    return Race(
        f"zero, {num_rows:,} rows of {ZEROED_LAYERS} layers",
        dtype,
        target.nbytes,
        {
            "kvpool": lambda: zero(*caches, slots),
            "NumPy": by_numpy,
            "torch": when_torch(by_torch),
            "fill": lambda: target.view(np.uint8).fill(0),
        },
    )
