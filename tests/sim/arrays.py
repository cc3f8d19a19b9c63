"""Arrays for the simulator tests: aligned as device memory is, and compared by their bits."""

import ml_dtypes
import numpy as np

BF16 = np.dtype(ml_dtypes.bfloat16)
F16 = np.dtype(np.float16)
F32 = np.dtype(np.float32)
F64 = np.dtype(np.float64)
FLOATS = (F32, F16, BF16)


def aligned(array, *, skip=0):
    """Return a copy that starts `skip` bytes after a multiple of 16."""
    memory = np.zeros(array.nbytes + 32 + skip, np.uint8)
    start = -memory.ctypes.data % 16 + skip
    copy = memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


def random_floats(rng, shape, dtype):
    """Values of every magnitude that float32 has, zeros and infinities; no NaN."""
    values = rng.integers(0, 2**32, shape, dtype=np.uint32).view(F32)
    values = np.where(np.isnan(values), F32.type(1.5), values)
    values = np.where(rng.random(shape) < 0.5, rng.standard_normal(shape).astype(F32), values)
    with np.errstate(over="ignore"):
        return aligned(values.astype(dtype))


def random_bits(rng, shape, dtype):
    """Bits of any kind, NaN included."""
    raw = rng.integers(0, 256, (*shape[:-1], shape[-1] * dtype.itemsize), dtype=np.uint8)
    return aligned(raw.view(dtype))


def assert_same_bits(actual, expected):
    assert actual.dtype == expected.dtype
    kind = f"u{actual.dtype.itemsize}"
    np.testing.assert_array_equal(
        np.ascontiguousarray(actual).view(kind), np.ascontiguousarray(expected).view(kind)
    )
