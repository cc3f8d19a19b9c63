"""Plant: pages back into a tree, so that eviction takes them in the order that they were saved in.

A *run* is a stretch of pages that follow each other in this order and down one path. Runs are
inserted with their whole paths, the least valuable first. The last insert that covers a page is
then its own run's, for whatever hangs below came before it: that makes the page more recent than
these, and less recent than what follows. Under fifo a page enters by the first of these inserts
and goes right behind the last of those below it, or by its own insert where that raises its
priority.

A path may have many runs, and there are many paths. So that each is put together from a few
pieces, pages are laid out in *spines* first: a page is followed by the child with most below it,
and any path leaves at most ``log2(n)`` spines.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvpool.snapshot.columns import PageColumns
from kvpool_ext.radix import RadixCache


def plant(
    tree: RadixCache, columns: PageColumns, kept: NDArray[np.int64], page_ids: NDArray[np.int32]
) -> None:
    """Insert the entries `kept` under `page_ids`.

    Parameters
    ----------
    tree : RadixCache
        An empty tree.
    columns : PageColumns
        All entries of the file, the most valuable first.
    kept : ndarray
        int64 ``[k]``, ascending; the parent of each is among them.
    page_ids : ndarray
        int32 ``[k]``, taken by `alloc`.
    """
    if kept.size == 0:
        return
    place = np.full(columns.num_pages + 1, -1, np.int64)  # the last entry: of the parent -1
    place[kept] = np.arange(kept.size)
    parents = place[columns.parents[kept]]
    priorities = columns.priorities[kept]
    namespace_ids = columns.namespace_ids[kept]
    ends_run = np.ones(kept.size, np.bool_)
    follows = parents[1:] == np.arange(kept.size - 1)
    ends_run[:-1] = ~(follows & (priorities[1:] == priorities[:-1]))
    spines = _Spines(parents.tolist())
    tokens = columns.tokens[kept[spines.order]]
    ids = page_ids[spines.order]
    for page in np.flatnonzero(ends_run)[::-1].tolist():
        path = spines.path(page)
        tree.insert(
            np.concatenate([tokens[piece].ravel() for piece in path]),
            np.concatenate([ids[piece] for piece in path]),
            columns.namespaces[namespace_ids[page]],
            int(priorities[page]),
        )


class _Spines:
    """Pages laid out so that a path is a few slices.

    Parameters
    ----------
    parents : list of int
        Of each page the one above it, which stands before it, or -1.
    """

    def __init__(self, parents: list[int]) -> None:
        n = len(parents)
        sizes, longest = [1] * n, [1] * n  # of the subtree, and of the spine from here down
        heavy = [-1] * n
        for page in range(n - 1, -1, -1):
            above = parents[page]
            if heavy[page] >= 0:
                longest[page] += longest[heavy[page]]
            if above >= 0:
                sizes[above] += sizes[page]
                if heavy[above] < 0 or sizes[heavy[above]] < sizes[page]:
                    heavy[above] = page
        self._parents = parents
        self._heads, self._places = list(range(n)), [0] * n
        num_placed = 0
        for page, above in enumerate(parents):
            if above >= 0 and heavy[above] == page:
                self._heads[page] = self._heads[above]
                self._places[page] = self._places[above] + 1
            else:
                self._places[page] = num_placed
                num_placed += longest[page]
        self.order = np.argsort(self._places)
        """Pages in the order of the layout, int64 ``[n]``."""

    def path(self, page: int) -> list[slice]:
        """Where the pages from the top down to `page` lie, in order."""
        pieces = []
        while page >= 0:
            head = self._heads[page]
            pieces.append(slice(self._places[head], self._places[page] + 1))
            page = self._parents[head]
        return pieces[::-1]
