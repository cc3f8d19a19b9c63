"""ReadGuard: what an attention call is about to read, looked at before."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvpool.errors import KVCacheCorruptionError, KVCacheStateError
from kvpool.graph_buffers import GraphMode
from kvpool.page_table import PageTable
from kvpool.poison.ledger import PoisonedLedger
from kvpool.poison.table import PoisonedTable
from kvpool.words import page_owner


class ReadGuard:
    """Looks at the pages of a page table before they are read.

    A look waits for a CUDA device, so there is none while the stream is in graph capture; and none
    in the prefetch of a graph, which reads positions that are not written yet, and whose output
    nobody uses.

    Parameters
    ----------
    table : PoisonedTable
        The requests of the pool.
    graph_mode : GraphMode
        The graphs that the pool is in.
    """

    def __init__(self, table: PoisonedTable, graph_mode: GraphMode) -> None:
        self._ledger = table.ledger
        self._graph_mode = graph_mode

    def check_table(self, layer: int, table: PageTable) -> None:
        """KVCacheCorruptionError if a position below the table's lengths holds poison.

        Parameters
        ----------
        layer : int
            Layer that is read; one that is not there is the reader's to refuse.
        table : PageTable
            Page ids below the pool's number of pages.
        """
        stored = self._ledger.books.stored
        if not 0 <= layer < stored.num_layers:
            return
        if not can_look(self._ledger) or self._is_prefetched(table):
            return
        size, indptr = table.page_size, table.indptr_host
        pages = table.indices_host[: int(indptr[-1])].astype(np.int64)
        slots = (pages[:, None] * size + np.arange(size)).ravel()
        counts = np.diff(indptr)
        rows = np.repeat(np.arange(counts.size), counts * size)
        positions = np.arange(slots.size) - indptr[rows] * size
        kept = np.flatnonzero(positions < table.lengths_host[rows])
        found = stored.poisoned_slots(layer, slots[kept])
        if found.any():
            i = kept[int(np.argmax(found))]
            raise read_of_poison(
                self._ledger, f"row {rows[i]}", layer, int(positions[i]), int(slots[i])
            )

    def around(self, plan: Any, table: PageTable) -> CheckedPlan:
        """`plan` of FlashInfer that looks first."""
        return CheckedPlan(plan, table, self)

    def _is_prefetched(self, table: PageTable) -> bool:
        graph = self._graph_mode.current
        buffers = None if graph is None else graph.buffers
        if buffers is None or buffers.table is not table:
            return False
        return buffers.filling is None or buffers.filling.window is None


class CheckedPlan:
    """A plan whose pages are looked at before each run."""

    def __init__(self, plan: Any, table: PageTable, guard: ReadGuard) -> None:
        self._plan, self._table, self._guard = plan, table, guard

    def run(self, layer: int, q: Any, out: Any = None) -> Any:
        """As the plan's."""
        self._guard.check_table(layer, self._table)
        return self._plan.run(layer, q, out)


def can_look(ledger: PoisonedLedger) -> bool:
    """Whether the host may wait for the device now: not in a graph capture."""
    try:
        ledger.books.stored.device.check_upload()
    except KVCacheStateError:
        return False
    return True


def read_of_poison(
    ledger: PoisonedLedger, who: str, layer: int, position: int, slot: int
) -> KVCacheCorruptionError:
    """The error of a read that met poison."""
    page = slot // ledger.page_size
    return KVCacheCorruptionError(
        f"read of a freed or never written page: {who}, position {position} of layer {layer} is "
        f"on page {page}, which holds poison there (owner: {page_owner(ledger, page)})",
        page,
    )
