"""A CPU pool and a CUDA pool with the same bytes, and queries for both."""

import numpy as np

from kvpool.page_table import PageTable
from tests.fakes import torch_like

LAYERS, NUM_SLOTS, HEADS, DIM, Q_HEADS, PAGE = 2, 64, 2, 64, 8, 4
TOLERANCE = {"float16": 2e-3, "bfloat16": 1.6e-2}


def twins(make_pool, **options):
    """A CPU pool and a CUDA pool of the same shape, with the same random bytes in them."""
    shape = {"dtype": "bfloat16", "page_size": PAGE} | options
    if shape["dtype"].startswith("float8"):
        shape |= {"k_scale": [0.5, 2.0], "v_scale": [1.0, 0.25]}
    pools = [
        make_pool(LAYERS, NUM_SLOTS, HEADS, DIM, device=device, **shape)
        for device in ("cpu", "cuda")
    ]
    rng = np.random.default_rng(1)
    for layer in range(LAYERS):
        for mine, theirs in zip(*(pool.layer_with_scratch(layer) for pool in pools), strict=True):
            values = rng.standard_normal(mine.shape, np.float32)
            if mine.dtype == np.uint8:
                values = rng.integers(0, 0x50, mine.shape)  # no code of NaN or infinity
            mine[...] = values.astype(mine.dtype)
            theirs.host[...] = mine
    return pools


def steps(pools, *capacities):
    """The same requests bound in all pools, and active."""
    found = []
    for pool in pools:
        ids = [pool.bind_request([1000 + i, 7], size) for i, size in enumerate(capacities)]
        found.append(pool.activate_step(*ids))
    return found


def random_q(torch, rows, dtype="bfloat16", heads=Q_HEADS):
    """Queries for the CPU pool, and the same as a tensor on the device."""
    kind = torch_like.DTYPES[dtype]
    values = np.random.default_rng(2).standard_normal((rows, heads, DIM), np.float32)
    q = torch.zeros((rows, heads, DIM), dtype=kind, device="cuda:0")
    q.host[...] = values.astype(kind.numpy)
    return q.host.copy(), q


def assert_close(tensor, expected):
    found = tensor.host if hasattr(tensor, "host") else tensor
    assert found.dtype == expected.dtype
    np.testing.assert_allclose(
        found.astype(np.float64),
        expected.astype(np.float64),
        rtol=TOLERANCE[found.dtype.name],
        atol=TOLERANCE[found.dtype.name],
    )


class Bucket:
    """The page table of a graph's bucket: fixed arrays, padding rows last, filled anew each step.

    Row b reads pages `b * MAX_PAGES` onwards, whatever a pool thinks of them.
    """

    MAX_PAGES = 4

    def __init__(self, pool, size):
        zeros = [np.zeros(n, np.int32) for n in (size + 1, size * self.MAX_PAGES, size)]
        lengths = np.zeros(size, np.int64)
        self.table = PageTable(*zeros, lengths, pool.page_size, pool.num_pages, pool.device)
        self.table.is_fixed = True

    def prepare(self, lengths):
        """Refill the table in place, on the host and on the device."""
        table = self.table
        table.lengths_host[:] = 0
        table.lengths_host[: len(lengths)] = lengths
        pages = -(-table.lengths_host // table.page_size)
        table.indptr_host[1:] = np.cumsum(pages)
        table.last_page_len_host[:] = table.lengths_host - np.maximum(pages - 1, 0) * (
            table.page_size
        )
        table.indices_host[:] = 10**6  # what is behind the rows is never looked at
        for row, count in enumerate(pages):
            first = table.indptr_host[row]
            table.indices_host[first : first + count] = row * self.MAX_PAGES + np.arange(count)
        for name in ("indptr", "indices", "last_page_len"):
            table._device.refresh(getattr(table, name), getattr(table, f"{name}_host"))
        table.version += 1
        return table
