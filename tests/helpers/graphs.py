"""What tests of captured steps share: batches to decode, and a stand-in for a captured kernel."""

import numpy as np

from tests.helpers.pools import case_pool, window, write
from tests.helpers.speculation import COMMITTED, addresses, prompt_of


def batch_pool(make_pool, page_size, lengths, *, room, **options):
    """A pool with one request a length, written so far, and `room` tokens more; pool and ids."""
    num_pages = sum(-(-(length + room) // page_size) for length in lengths)
    pool = case_pool(make_pool, page_size, num_pages + 4, **options)
    ids = []
    for i, length in enumerate(lengths):
        ids.append(pool.bind_request(prompt_of(i, length), length + room))
        write(pool, ids[-1], 0, length, COMMITTED)
    return pool, ids


def tokens_at(pool, starts, window_len, layer, base=COMMITTED):
    """K and V `[batch, window_len, heads, dim]` of `[start, start + window_len)` of each row."""
    pairs = [window(pool, start, start + window_len, base, layer) for start in starts]
    return tuple(np.concatenate(side) for side in zip(*pairs, strict=True))


def put_tokens(pool, step, starts, window_len=1, base=COMMITTED):
    """Put the same tokens on every layer through the step."""
    for layer in range(pool.num_layers):
        step.put(layer, starts, *tokens_at(pool, starts, window_len, layer, base))


def slots_at(pool, request_id, start, end):
    """Slot ids of `[start, end)` of a request, from its pages."""
    pages, size = pool.request(request_id).page_ids, pool.page_size
    return [int(pages[p // size]) * size + p % size for p in range(start, end)]


def scratch_slots(pool):
    """Slots of the scratch page."""
    return range(pool.num_slots, pool.num_slots + pool.page_size)


class Captured:
    """What a captured kernel keeps: arrays as they were at capture, and no object of the pool.

    `write` and `read` look into those arrays only, so that a graph that swaps one for another,
    where it should refresh it, is found out.
    """

    def __init__(self, pool, table, slots):
        self.pool = pool
        self.table = (table.indptr, table.indices, table.last_page_len)
        self.slots = slots
        self.bucket = table.batch_size

    def addresses(self):
        return addresses(*self.table, self.slots)

    def write(self, starts, window_len=1, base=COMMITTED):
        """The scatter of all layers: real rows, then padded rows that hold something else."""
        padding = self.bucket - len(starts)
        for layer in range(self.pool.num_layers):
            k, v = tokens_at(self.pool, starts, window_len, layer, base)
            pad = np.full((padding, *k.shape[1:]), -7, np.float32)
            for cache, rows in zip(self.pool.layer_with_scratch(layer), (k, v), strict=True):
                everything = np.concatenate([rows, pad])
                cache[self.slots] = everything.reshape(-1, *cache.shape[1:])

    def read(self, row, layer):
        """Keys `[length]` of one row, along the captured page table."""
        indptr, indices, last_page_len = self.table
        size = self.pool.page_size
        pages = indices[indptr[row] : indptr[row + 1]].astype(np.int64)
        length = size * (len(pages) - 1) + last_page_len[row] if len(pages) else 0
        slots = (pages[:, None] * size + np.arange(size)).ravel()[:length]
        return self.pool.layer_with_scratch(layer)[0][slots][:, 0, 0]
