"""Cells: the pages of a pool in a grid, several of them to a cell where the pool is large."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvpool.owners import PageOwners, PageState

STEPS = 20  # a cell is drawn in stripes of this part of its width
# The order of stripes and legends: what requests hold, what is cached, the rest.
ORDER = (
    PageState.PRIVATE,
    PageState.LOCKED,
    PageState.EVICTABLE,
    PageState.TAKEN,
    PageState.FREE,
)


class Run(NamedTuple):
    """Neighbouring cells of one row whose pages are all alike, or a single cell of several states.

    Attributes
    ----------
    row, column, num_cells : int
        Where it is.
    counts : dict of PageState to int
        Its pages by state, in `ORDER`.
    request_id : int
        The request that has most of its private pages, 0 where none are.
    first_page, end_page : int
        Its pages, half-open.
    """

    row: int
    column: int
    num_cells: int
    counts: dict[PageState, int]
    request_id: int
    first_page: int
    end_page: int


class Cells(NamedTuple):
    """The pages of a pool in cells of equally many, row by row.

    Attributes
    ----------
    columns : int
        Cells of a row.
    pages_per_cell : int
        1, 2, 5, 10, 20 and so on; the last cell may have fewer.
    num_pages : int
        Pages in all.
    counts : ndarray
        int64 ``[num_cells, num_states]``, pages by `PageState`.
    request_ids : ndarray
        int64 ``[num_cells]``, the request that has most of a cell's private pages, else 0.
    """

    columns: int
    pages_per_cell: int
    num_pages: int
    counts: NDArray[np.int64]
    request_ids: NDArray[np.int64]

    @property
    def num_cells(self) -> int:
        """Cells of the grid."""
        return len(self.counts)

    @property
    def num_rows(self) -> int:
        """Rows of the grid."""
        return -(-self.num_cells // self.columns)

    @property
    def note(self) -> str:
        """What a cell stands for, for a legend; empty where it is a page."""
        if self.pages_per_cell == 1:
            return ""
        return (
            f"A cell is {self.pages_per_cell:,} pages; its colours have the areas of their shares."
        )

    def runs(self) -> Iterator[Run]:
        """All cells, row by row."""
        states = self.counts.argmax(axis=1)
        mixed = (self.counts > 0).sum(axis=1) > 1
        starts = np.ones(self.num_cells, np.bool_)
        starts[1:] = (states[1:] != states[:-1]) | (self.request_ids[1:] != self.request_ids[:-1])
        starts |= mixed
        starts[1:] |= mixed[:-1]
        starts[:: self.columns] = True
        firsts = np.flatnonzero(starts)
        ends = np.append(firsts, self.num_cells)[1:]
        sums = np.add.reduceat(self.counts, firsts, axis=0) if firsts.size else self.counts
        for first, end, counts in zip(firsts.tolist(), ends.tolist(), sums.tolist(), strict=True):
            row, column = divmod(first, self.columns)
            yield Run(
                row,
                column,
                end - first,
                {state: counts[state] for state in ORDER if counts[state]},
                int(self.request_ids[first]),
                first * self.pages_per_cell,
                min(end * self.pages_per_cell, self.num_pages),
            )

    def stripes(self, run: Run) -> list[tuple[PageState, int, int]]:
        """What to draw of a run: states, each from and to a stripe, `STEPS` of them a cell.

        A state that rounds to no stripe is left out.
        """
        drawn, so_far, start = [], 0, 0
        for state, count in run.counts.items():
            so_far += count
            end = round(so_far * STEPS / self.pages_per_cell)
            if end > start:
                drawn.append((state, start, end))
            start = end
        return drawn


def cells_of(owners: PageOwners, columns: int, max_rows: int) -> Cells:
    """Lay the pages out in a grid of `columns` and at most `max_rows`; O(pages) in NumPy."""
    num_pages, num_states = owners.states.size, len(PageState)
    per_cell = _round_number(-(-num_pages // (columns * max_rows)))
    num_cells = -(-num_pages // per_cell)
    cell_of = np.arange(num_pages, dtype=np.int64) // per_cell
    keys = cell_of * num_states + owners.states
    counts = np.bincount(keys, minlength=num_cells * num_states).reshape(num_cells, num_states)
    request_ids = _most_frequent(cell_of, owners.request_ids, num_cells)
    return Cells(columns, per_cell, num_pages, counts, request_ids)


def _most_frequent(
    cell_of: NDArray[np.int64], request_ids: NDArray[np.int64], num_cells: int
) -> NDArray[np.int64]:
    """The request with most pages in each cell, the first bound of several; 0 for none."""
    private = request_ids > 0
    ids, ranks = np.unique(request_ids[private], return_inverse=True)
    found = np.zeros(num_cells, np.int64)
    if ids.size == 0:
        return found
    pairs, counts = np.unique(cell_of[private] * ids.size + ranks, return_counts=True)
    # Assigned last, the largest count stays; among equals, the first request.
    order = np.lexsort((-(pairs % ids.size), counts))
    found[pairs[order] // ids.size] = ids[pairs[order] % ids.size]
    return found


def _round_number(at_least: int) -> int:
    """The smallest of 1, 2, 5, 10, 20, 50, ... that is at least this."""
    unit = 1
    while True:
        for step in (1, 2, 5):
            if step * unit >= at_least:
                return step * unit
        unit *= 10
