"""Grids and blocks of the CUDA kernels: pure arithmetic, no device.

A block is two-dimensional: x runs over the units of a row (16 bytes, where all goes well), y over
rows. So an index is a multiply-add, where one running number would need a division per thread (a
64-bit one is a routine of some 150 instructions), and one compiled kernel serves every shape. The
second dimension of the grid is what a row has several of: its heads, or the layers it is on.
"""

Shape = tuple[int, int, int]

# 256 threads: eight blocks fill an SM's 2,048 places. Rows longer than 256 units are walked in a
# loop.
MAX_THREADS = 256
MAX_GRID_X = 2**31 - 1
MAX_GRID_Y = 65_535
# Kernels count rows in 32 bits.
MAX_ROWS = 2**31 - 1


def launch_shape(
    num_rows: int, units: int, outer: int = 1, rows_per_thread: int = 1
) -> tuple[Shape, Shape]:
    """Return the grid and the block of a kernel over rows.

    Parameters
    ----------
    num_rows : int
        Rows, at least 1.
    units : int
        Units of each row, at least 1: how many threads can work on it side by side.
    outer : int
        Heads or layers, at least 1.
    rows_per_thread : int
        How many rows one thread handles.

    Raises
    ------
    ValueError
        If a count is below 1 or past what a grid can hold.

    Examples
    --------
    >>> launch_shape(64, 128)  # rows of 2 KB
    ((32, 1, 1), (128, 2, 1))
    >>> launch_shape(1000, 16, outer=80)  # rows of 256 bytes, on 80 layers
    ((63, 80, 1), (16, 16, 1))
    """
    if min(num_rows, units, outer, rows_per_thread) < 1:
        raise ValueError(
            f"a launch needs rows, units and layers, got {num_rows}, {units} and {outer}"
        )
    if num_rows > MAX_ROWS:
        raise ValueError(f"a launch takes up to {MAX_ROWS} rows, got {num_rows}")
    if outer > MAX_GRID_Y:
        raise ValueError(f"a launch takes up to {MAX_GRID_Y} heads or layers, got {outer}")
    x = min(units, MAX_THREADS)
    y = MAX_THREADS // x
    blocks = -(-num_rows // (y * rows_per_thread))
    return (blocks, outer, 1), (x, y, 1)
