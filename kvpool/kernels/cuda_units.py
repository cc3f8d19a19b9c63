"""Units: the few elements that one thread of a CUDA kernel moves at a time. No device, no numba.

A unit is as wide as the wider side's 16-byte access allows: 8 elements between 2-byte dtypes and
to FP8, 4 where float32 takes part. So neighbouring threads touch neighbouring memory on both
sides. Where a length or an address does not allow it, the unit is one element; copies of equal
dtypes first try the widths in between.
"""

from functools import cache
from typing import Any

import ml_dtypes
import numpy as np

DTYPES: dict[str, np.dtype[Any]] = {
    "float64": np.dtype(np.float64),
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}
FP8_DTYPES = ("float8_e4m3fn", "float8_e5m2")
ITEMSIZES = {
    **{name: dtype.itemsize for name, dtype in DTYPES.items()},
    **dict.fromkeys(FP8_DTYPES, 1),
}
WIDTHS = (16, 8, 4, 2, 1)


@cache
def units_of(source: str, target: str) -> tuple[int, ...]:
    """Return the units, in elements, that there are for two dtypes; the widest comes first.

    >>> units_of("bfloat16", "bfloat16"), units_of("float32", "float8_e4m3fn")
    ((8, 4, 2, 1), (4, 1))
    """
    widest = max(ITEMSIZES[source], ITEMSIZES[target])
    if source == target:
        return tuple(width // widest for width in WIDTHS if width >= widest)
    # float64 is what a CPU leaves behind, not what a GPU computes: no vectors for it.
    return (1,) if widest == 8 else (16 // widest, 1)


def unit_for(source: str, target: str, source_bits: int, target_bits: int, elements: int) -> int:
    """Return the widest unit that these arrays allow.

    Parameters
    ----------
    source, target : str
        Dtypes by name.
    source_bits, target_bits : int
        Addresses and byte strides of each side, combined by bitwise or.
    elements : int
        Contiguous elements on both sides: ``heads * dim`` or `dim`.

    Raises
    ------
    ValueError
        If an array is not even aligned to its elements.
    """
    source_size, target_size = ITEMSIZES[source], ITEMSIZES[target]
    for unit in units_of(source, target):
        if not (
            source_bits % (unit * source_size)
            or target_bits % (unit * target_size)
            or elements % unit
        ):
            return unit
    raise ValueError(f"an array of {source} or {target} is not aligned to its elements")


def width_for(bits: int) -> int:
    """Return the widest access, in bytes, for addresses, strides and lengths or-ed together.

    >>> width_for(4096 | 30)
    2
    """
    return next(width for width in WIDTHS if bits % width == 0)
