"""Pinned memory: host memory that a GPU copies from and to by itself."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvpool.device import device_of


def pinned_bytes(num_bytes: int) -> NDArray[np.uint8]:
    """Page-locked host memory, uint8 ``[num_bytes]``, of no defined content.

    It is given back when the last array that looks at it goes. The machine has that much less for
    everything else from the call on, used or not.

    Raises
    ------
    ValueError
        CuPy is not installed, or no driver answers.
    MemoryError
        The driver has no such amount.
    """
    cupy = device_of("cuda").array_namespace
    pinned = cupy.cuda.pinned_memory
    try:
        # Not from CuPy's pool of pinned memory, which would keep a block of this size for ever.
        memory = pinned.PinnedMemoryPointer(pinned.PinnedMemory(num_bytes), 0)
    except cupy.cuda.runtime.CUDARuntimeError as error:
        raise MemoryError(f"no {num_bytes} bytes of pinned memory: {error}") from None
    return np.frombuffer(memory, np.uint8, num_bytes)
