"""Quantising rows to FP8 and back on the CPU, against the casts of ml_dtypes and torch.

`python -m bench.fp8 [--json FILE]`. Ours divides by a scale, saturates and finds the slot of each
row; the casts of the same array do none of that. All of them run on one thread.
"""

import argparse

import ml_dtypes
import numpy as np

from bench.clock import Table, interleave
from kvpool.kernels import cpu
from kvpool.kernels.fp8 import FORMATS

try:
    import torch
except ImportError:
    torch = None

NUM_ROWS, HEADS, HEAD_DIM = 1_024, 8, 128  # of K and of V
SCALE = 0.015
DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}


def as_torch(array):
    """The same memory as a torch tensor."""
    if array.dtype == DTYPES["bfloat16"]:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def cases(rows, name):
    """Encode and decode cases, `{name: call}`, each over all elements of `rows`."""
    codes = np.zeros(rows.shape, np.uint8)
    out = np.empty_like(rows)
    slots = np.random.default_rng(1).permutation(NUM_ROWS)
    cast = rows.astype(getattr(ml_dtypes, name))
    scales = name, SCALE, SCALE
    encode = {
        "scatter_fp8": lambda: cpu.scatter_fp8(*codes, *rows, slots, *scales),
        "ml_dtypes": lambda: rows.astype(cast.dtype),
    }
    decode = {
        "gather_fp8": lambda: cpu.gather_fp8(*codes, slots, *scales, *out),
        "ml_dtypes": lambda: cast.astype(rows.dtype),
    }
    if torch is not None:
        largest, dtype = FORMATS[name].largest, getattr(torch, name)
        tensor = as_torch(rows)
        stored = tensor.to(dtype)
        encode["torch"] = lambda: tensor.to(dtype)
        encode["torch, scaled and clamped"] = lambda: (
            (tensor.float() / SCALE).clamp(-largest, largest).to(dtype)
        )
        decode["torch"] = lambda: stored.to(tensor.dtype)
        decode["torch, scaled"] = lambda: (stored.float() * SCALE).to(tensor.dtype)
    return encode, decode


def measure(table, rounds):
    """Add a row per format, dtype, direction and case: elements a second, ours as a multiple."""
    rng = np.random.default_rng(0)
    for name in FORMATS:
        for dtype_name, dtype in DTYPES.items():
            rows = rng.standard_normal((2, NUM_ROWS, HEADS, HEAD_DIM), np.float32).astype(dtype)
            for verb, calls in zip(("encode", "decode"), cases(rows, name), strict=True):
                seconds = interleave(calls, rounds=rounds, repeat=4)
                ours, *_ = seconds.values()
                for case, value in seconds.items():
                    label = f"{verb} {name.removeprefix('float8_')}, {dtype_name}: {case}"
                    ratio = (
                        {} if value == ours else {"ratio": value / ours, "to": "ours is faster"}
                    )
                    table.add(label, rows.size / value / 1e9, "G/s", **ratio)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", metavar="FILE", help="also write the table there")
    parser.add_argument("--rounds", type=int, default=15, help="samples a case")
    options = parser.parse_args(argv)
    if torch is not None:
        torch.set_num_threads(1)
    table = Table(f"FP8, {2 * NUM_ROWS * HEADS * HEAD_DIM / 1e6:.1f} M elements, one thread")
    measure(table, options.rounds)
    table.show()
    if options.json:
        table.write_json(options.json)


if __name__ == "__main__":
    main()
