"""Rows ``[n, heads, dim]``: what the CPU kernels that move them have in common."""

from typing import Any

from kvpool.kernels.jit import kernel

# Slots are scattered, so the processor cannot guess the next row. Two rows ahead hid most of that
# latency in pools past the last-level cache (a third off a put or a get of 4,096 rows of 2 KB),
# one row hid less.
ROWS_AHEAD = 2


@kernel()
def has_flat_rows(array: Any) -> Any:
    """Return whether each ``array[i]`` is one contiguous block."""
    _, heads, dim = array.shape
    itemsize = array.itemsize
    return (dim == 1 or array.strides[2] == itemsize) and (
        heads == 1 or array.strides[1] == dim * itemsize
    )


@kernel()
def zero_row(target: Any, index: Any) -> Any:
    """Zero ``target[index]``."""
    for h in range(target.shape[1]):
        for j in range(target.shape[2]):
            target[index, h, j] = 0
