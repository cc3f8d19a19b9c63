"""PageColumns: the cached pages of a tree in the order of their value.

The most valuable page comes first: the one that eviction would take last. Eviction takes a page
only after all that hangs below it, so in this order a parent stands before its children: any first
part of it is a tree by itself. A smaller pool loads the first pages, a file that was cut off has
lost the last ones, and no order of parents can form a ring.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvpool.errors import SnapshotError
from kvpool.snapshot.namespaces import ExtraKey
from kvpool_ext.radix import RadixCache
from kvpool_ext.survey import node_tokens
from kvpool_ext.views import TreeSurvey


class PageColumns(NamedTuple):
    """One entry a page, the most valuable first.

    Attributes
    ----------
    tokens : ndarray
        int32 ``[n, page_size]``.
    parents : ndarray
        int32 ``[n]``, the page before it on its path, -1 for the first.
    priorities : ndarray
        int32 ``[n]``.
    namespace_ids : ndarray
        int32 ``[n]``, index into `namespaces`.
    namespaces : list
        Namespaces that have pages.
    """

    tokens: NDArray[np.int32]
    parents: NDArray[np.int32]
    priorities: NDArray[np.int32]
    namespace_ids: NDArray[np.int32]
    namespaces: list[ExtraKey]

    @property
    def num_pages(self) -> int:
        """Pages."""
        return self.parents.size

    def start(self, page: int) -> int:
        """Position of the first token of an entry."""
        depth = 0
        while (page := int(self.parents[page])) >= 0:
            depth += 1
        return depth * int(self.tokens.shape[1])


def columns_of(tree: RadixCache) -> tuple[PageColumns, NDArray[np.int32]]:
    """All cached pages of `tree`, and their page ids int32 ``[n]``; changes nothing.

    A locked page counts as the most recent of its priority, for that is what its last unlock makes
    of it. What a reset detached is not cached any more.
    """
    survey = tree.survey()
    nodes = _by_value(survey)
    counts = survey.num_pages[nodes].astype(np.int64)
    num_pages = int(counts.sum())
    firsts = np.cumsum(counts) - counts
    # Where the pages of a node stand in the survey, minus where they stand here.
    all_counts = survey.num_pages.astype(np.int64)
    shifts = (np.cumsum(all_counts) - all_counts)[nodes] - firsts
    page_ids = survey.pages[np.arange(num_pages) + np.repeat(shifts, counts)]
    last_page = np.full(survey.num_nodes + 1, -1, np.int64)  # the last entry: of the parent -1
    last_page[nodes] = firsts + counts - 1
    parents = np.arange(num_pages) - 1
    parents[firsts] = last_page[survey.parents[nodes]]
    tokens = np.empty((num_pages, survey.page_size), np.int32)
    for node, first, count in zip(nodes.tolist(), firsts.tolist(), counts.tolist(), strict=True):
        found = node_tokens(tree, int(survey.handles[node]), 0, count * survey.page_size)
        tokens[first : first + count] = found.reshape(count, survey.page_size)
    # Numbered by first use, not by the history of the tree: equal trees give equal files.
    found_ids, seen = np.unique(survey.namespace_ids[nodes], return_index=True)
    used = found_ids[np.argsort(seen)]
    numbers = np.empty(len(survey.namespaces), np.int32)
    numbers[used] = np.arange(used.size)
    columns = PageColumns(
        tokens,
        parents.astype(np.int32),
        np.repeat(survey.priorities[nodes], counts).astype(np.int32),
        np.repeat(numbers[survey.namespace_ids[nodes]], counts),
        [survey.namespaces[i].extra_key for i in used.tolist()],
    )
    return columns, page_ids


def _by_value(survey: TreeSurvey) -> NDArray[np.int64]:
    """Indices of the nodes to save, the last one to be evicted first."""
    cached = np.flatnonzero(~survey.detached)
    locked = survey.lock_refs[cached] > 0
    # Behind each other, locked nodes keep the survey's order, in which a parent comes first.
    turns = np.where(locked, survey.num_nodes - cached, survey.turns[cached])
    order = np.lexsort((turns, locked, survey.priorities[cached]))
    return cached[order[::-1]]


def check_columns(columns: PageColumns) -> None:
    """Check what comes from a file.

    Raises
    ------
    SnapshotError
        A parent that does not stand before its child or is of another namespace, a namespace that
        is none, a page more important than one before it.
    """
    n = columns.num_pages
    parents, namespace_ids = columns.parents, columns.namespace_ids
    wrong = (parents < -1) | (parents >= np.arange(n))
    if wrong.any():
        page = int(np.argmax(wrong))
        raise SnapshotError(
            f"the parent of page {page} must be in -1 .. {page - 1}, got {parents[page]}"
        )
    wrong = (namespace_ids < 0) | (namespace_ids >= len(columns.namespaces))
    if wrong.any():
        page = int(np.argmax(wrong))
        raise SnapshotError(
            f"the namespace of page {page} must be in 0 .. {len(columns.namespaces) - 1}, got "
            f"{namespace_ids[page]}"
        )
    wrong = (parents >= 0) & (namespace_ids[parents] != namespace_ids)
    if wrong.any():
        raise SnapshotError(
            f"page {int(np.argmax(wrong))} is of another namespace than its parent"
        )
    wrong = columns.priorities[1:] > columns.priorities[:-1]
    if wrong.any():
        page = int(np.argmax(wrong)) + 1
        raise SnapshotError(
            f"page {page} has priority {columns.priorities[page]}, the page before it only "
            f"{columns.priorities[page - 1]}"
        )
