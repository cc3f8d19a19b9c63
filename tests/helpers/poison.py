"""Which pages of a pool hold poison, read from its bytes."""

import numpy as np

from kvpool.poison.stored import POISON


def bits(pool):
    """Stored bits, ``[num_pages, ...]``, K and V of all layers side by side."""
    planes = [
        plane.view(f"u{plane.dtype.itemsize}").reshape(pool.num_layers, pool.num_pages, -1)
        for plane in (pool.key_cache, pool.value_cache)
    ]
    return np.concatenate(planes).swapaxes(0, 1)


def poison_pages(pool):
    """Pages that hold poison and nothing else."""
    return np.flatnonzero((bits(pool) == POISON[pool.dtype]).all(axis=(1, 2))).tolist()
