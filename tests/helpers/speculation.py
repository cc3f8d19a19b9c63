"""Speculative windows around a page boundary, as rows of one batch, and what is left of them.

Three pages of `page_size` P come first, and every window is P + 2 tokens long: so that each of
them enters pages that a reject takes back.
"""

from typing import NamedTuple

import numpy as np

from tests.helpers.pools import LAYER_STEP, case_pool, window, write

PAGE_SIZES = [1, 4, 16, 64]
COMMITTED, REJECTED = 100, 500_000  # bases of what `window` writes
CAPACITY = 7  # pages of a row


class Window(NamedTuple):
    """One row: `[start, end)` is written, and `[sealed, end)` of it is rejected."""

    start: int
    sealed: int
    end: int


def window_len(page_size):
    return page_size + 2


def windows(page_size):
    """Name -> `Window`."""
    starts = {
        "starts at a page's end": (3 * page_size - 1, 2),
        "rejected back across a boundary": (3 * page_size - 1, 0),
        "whole page rejected": (3 * page_size, 0),
        "sealed at a boundary": (3 * page_size - (page_size + 1) // 2, (page_size + 1) // 2),
        "last token rejected": (3 * page_size, page_size + 1),
        "all accepted": (3 * page_size, page_size + 2),
    }
    size = window_len(page_size)
    return {
        name: Window(start, start + accepted, start + size)
        for name, (start, accepted) in starts.items()
    }


NAMES = list(windows(4))
# How windows come as a batch: alone, three alike, all kinds at once, and two that keep their pages
# (but with page size 1, where every rejected token is a page).
BATCHES = {
    **{f"single: {name}": [name] for name in NAMES},
    **{f"uniform: {name}": [name] * 3 for name in NAMES},
    "ragged": NAMES,
    "ragged, in place": ["last token rejected", "all accepted"],
}


def rows_of(batch, page_size):
    """The windows of one entry of `BATCHES`."""
    return [windows(page_size)[name] for name in BATCHES[batch]]


def prompt_of(row, length):
    """Tokens that no other row has, so that nothing is shared by accident."""
    return [1_000_000 * (row + 1) + i for i in range(length)]


def speculation_pool(make_pool, page_size, rows, **options):
    """A pool with these rows bound and committed up to their windows; pool and request ids."""
    pool = case_pool(make_pool, page_size, CAPACITY * len(rows) + 4, **options)
    ids = []
    for i, row in enumerate(rows):
        ids.append(pool.bind_request(prompt_of(i, row.start), CAPACITY * page_size))
        write(pool, ids[-1], 0, row.start, COMMITTED)
    return pool, ids


def window_rows(pool, row, layer):
    """K and V `[1, window, heads, dim]` of one window: committed values, then rejected ones."""
    parts = [
        window(pool, row.start, row.sealed, COMMITTED, layer),
        window(pool, row.sealed, row.end, REJECTED, layer),
    ]
    return tuple(np.concatenate(pair, axis=1) for pair in zip(*parts, strict=True))


def batch_rows(pool, rows, layer):
    """K and V `[batch, window, heads, dim]` of all windows."""
    pairs = [window_rows(pool, row, layer) for row in rows]
    return tuple(np.concatenate(side) for side in zip(*pairs, strict=True))


def speculate(pool, ids, rows):
    """Write the windows eagerly, with the page table over them; the step."""
    step = pool.activate_step(*ids)
    starts, lens = [row.start for row in rows], [row.end - row.start for row in rows]
    step.page_table([row.end for row in rows])
    with step.verify_window():
        slots = step.window_slot_indices(starts, lens)
        indptr = np.concatenate([[0], np.cumsum(lens)])
        for layer in range(pool.num_layers):
            k, v = (a.reshape(-1, *a.shape[2:]) for a in batch_rows(pool, rows, layer))
            step.put(layer, starts, k, v, qo_indptr=indptr, slots=slots)
    return step


def keys(pool, request_id, length):
    """Keys `[layers, length]` of one request through `get`, after checking V, heads and dims."""
    step = pool.activate_step(request_id)
    found = []
    for layer in range(pool.num_layers):
        k, v = step.get(layer, length)
        np.testing.assert_array_equal(v, -k)
        np.testing.assert_array_equal(k, np.broadcast_to(k[..., :1, :1], k.shape))
        found.append(k[0, :, 0, 0])
    return np.stack(found)


def expected_keys(pool, *spans):
    """What `keys` must give for spans `(start, end, base)` in order; base None: zeros."""
    layers = LAYER_STEP * np.arange(pool.num_layers, dtype=np.float32)[:, None]
    parts = [
        np.zeros((pool.num_layers, end - start), np.float32)
        if base is None
        else layers + base + np.arange(start, end, dtype=np.float32)
        for start, end, base in spans
    ]
    return np.concatenate(parts, axis=1)


def arrays(table):
    """`indptr`, `indices` and `last_page_len` of the pages that a table names, as lists."""
    indptr = np.asarray(table.indptr).tolist()
    indices = np.asarray(table.indices)[: indptr[-1]].tolist()
    return indptr, indices, np.asarray(table.last_page_len).tolist()


def expected_arrays(pool, ids, lengths, bucket=None):
    """The same three lists by comprehension; rows up to `bucket` are padding without pages."""
    size = pool.page_size
    counts = [-(-length // size) for length in lengths]
    padding = [0] * ((len(ids) if bucket is None else bucket) - len(ids))
    held = [pool.request(i).page_ids.tolist() for i in ids]
    last = [n - (count - 1) * size if n else 0 for n, count in zip(lengths, counts, strict=True)]
    return (
        [sum(counts[:n]) for n in range(len(counts) + 1)] + [sum(counts) for _ in padding],
        [page for row, count in zip(held, counts, strict=True) for page in row[:count]],
        last + padding,
    )


def addresses(*found):
    """Where arrays begin, for comparing: equal while nothing was reallocated."""
    return [array.ctypes.data for array in found]


def table_addresses(table):
    return addresses(table.indptr, table.indices, table.last_page_len)


def stays_in_place(rows, page_size):
    """Whether every row has as many pages at the end of its window as where it is sealed."""
    return all(-(-row.end // page_size) == -(-row.sealed // page_size) for row in rows)


def cached_tokens(pool):
    """Every token that the tree holds, of all namespaces."""
    return sorted(int(token) for node in pool.radix.nodes() for token in node.tokens)
