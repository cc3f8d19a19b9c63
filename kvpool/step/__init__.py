"""Step: the rows of one forward pass.

A step lives as long as all of its requests are bound; any use after that raises
`KVCacheStateError`. What is the same for all layers of a pass (slots of the written window, the
page table) is made once and found again by value.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvpool.numbers import whole_number
from kvpool.page_table import PageTable
from kvpool.step.in_graph import StepInGraph
from kvpool.step.reading import StepReading
from kvpool.step.rollback import StepRollback
from kvpool.step.rows import LatestTable, Positions

__all__ = ["LatestTable", "Positions", "Step"]


class Step(StepReading, StepInGraph, StepRollback):
    """Rows of one forward pass, in the order of `KVCachePool.activate_step`, which makes it.

    Positions count from the start of each request, ranges are half-open, and an argument that
    takes one position a row takes an int for all rows too.
    """

    # ---- reading it

    @property
    def request_ids(self) -> list[int]:
        """Ids in row order."""
        return [request.tag for request in self._requests]

    def __repr__(self) -> str:
        return f"Step(request_ids={self.request_ids}{'' if self.is_alive else ', dead'})"

    @property
    def capacities(self) -> list[int]:
        """Slots reserved for each row, in tokens."""
        try:
            self._enter()
            return self._rows.capacities()
        finally:
            self._gate.leave()

    @property
    def capacity(self) -> int:
        """The smallest capacity of the rows, in tokens: generation must stop there or extend."""
        return min(self.capacities)

    @property
    def is_alive(self) -> bool:
        """Whether every request of the step is still bound."""
        return not self._gate.closed and self._rows.all_live()

    def require(self, end_pos: Positions, batch_size: int | None = None) -> None:
        """Make sure that every row has pages for positions up to `end_pos`.

        Parameters
        ----------
        end_pos : int or sequence of int
            Exclusive end of the positions that will be used.
        batch_size : int, optional
            Rows that the caller expects.

        Raises
        ------
        KVCacheExhaustedError
            A position past a row's capacity.
        ValueError
            Another number of rows.
        """
        try:
            self._enter()
            if batch_size is not None and (
                whole_number(batch_size, "batch_size") != self.batch_size
            ):
                raise ValueError(f"the step has {self.batch_size} rows, expected {batch_size}")
            self._check_lengths(self._rows.positions(end_pos, "end_pos"))
        finally:
            self._gate.leave()

    # ---- K and V

    def put(
        self,
        layer: int,
        start_pos: Positions,
        k: Any,
        v: Any,
        *,
        qo_indptr: Any = None,
        slots: Any = None,
    ) -> None:
        """Write K and V of one layer at ``[start_pos, start_pos + seqlen)`` of each row.

        The first put that enters a page zeroes that page on all layers, so that no bits of an
        earlier owner are ever read. In the block of a graph it writes where `prepare` said:
        `start_pos` and `slots` are not read, and rows that pad the batch may come along.

        Parameters
        ----------
        layer : int
            Layer index.
        start_pos : int or sequence of int
            First position of each row.
        k, v : array
            ``[batch, seqlen, num_kv_heads, head_dim]``, or ragged ``[nnz, num_kv_heads,
            head_dim]`` with `qo_indptr`; any strides. Floats of another dtype than the pool's are
            converted.
        qo_indptr : sequence of int, optional
            Host integers ``[batch + 1]``, CSR of each row's tokens.
        slots : array, optional
            int64 or int32 ``[nnz]`` on the device. `window_slot_indices` makes them once a step
            for all layers; slots of the caller's own making are written as they are, and do not
            advance `valid_len`. A negative slot is skipped.

        Raises
        ------
        KVCacheExhaustedError
            A position past a row's capacity.
        ValueError, TypeError
            Wrong layer, shape, dtype or device, a slot at or past ``num_slots``, a position on a
            read-only page (below ``shared_len``), or `k`, `v` that are views of the pool.
        """
        try:
            self._enter()
            storage = self._storage
            layer = storage.check_layer(layer)
            graph = self._graph_mode.current
            if graph is not None:
                return self._put_in_graph(graph, layer, k, v, qo_indptr)
            k, v, seqlen, num_tokens = self._token_rows(k, v, qo_indptr)
            window = self._rows.window(start_pos, seqlen, qo_indptr, num_tokens)
            own = slots is None or self._is_own(slots, window)
            if not own:
                slots = self._check_slots(slots, window.num_tokens)
            if self._seen_losses != self._ledger.num_losses:
                self._recheck()  # foreign arrays may run code when they are read
            if self._rows.first_past_capacity(window) >= 0:
                raise self._past_capacity(window)
            if self._rows.first_shared(window) >= 0:
                raise self._put_on_shared(window)
            if own:
                slots = self._slots_of(window)
            moves = storage.moves
            launches = None if moves is None else moves[layer].prepare(slots, k, v)
            fresh = self._rows.entering(window)
            if fresh is not None:
                storage.zero_pages(storage.device.to_device(fresh))
            if launches is None:
                storage.write(layer, slots, k, v)
            else:
                storage.run(launches)
            if fresh is not None:
                # Only now: after a failure, or an interrupt, these pages were never entered, and
                # the next put zeroes them again.
                self._rows.enter(window)
            if own:
                self._rows.advance(layer, window)
        finally:
            self._gate.leave()

    def window_slot_indices(self, start_pos: Positions, seqlen: Positions) -> NDArray[np.int64]:
        """Slots of ``[start_pos, start_pos + seqlen)`` of each row, int64 ``[nnz]``.

        They are on the device: make them once a step and hand them to the put of every layer.

        Parameters
        ----------
        start_pos, seqlen : int or sequence of int
            First position, and number of positions, of each row.
        """
        try:
            self._enter()
            graph = self._graph_mode.current
            if graph is not None:
                return self._slots_in_graph(graph, start_pos, seqlen)
            window = self._rows.window(start_pos, seqlen)
            self._check_capacity(window)
            return self._hand_out(window)
        finally:
            self._gate.leave()

    # ---- page tables

    def page_table(self, lengths: Positions) -> PageTable:
        """The step's shared page table for these lengths, made once for all layers.

        Parameters
        ----------
        lengths : int or sequence of int
            Readable positions of each row, this step's tokens included.

        Returns
        -------
        PageTable
            The same object while the same lengths are asked for. In the block of a graph it is
            the graph's, and its last rows may be padding.

        Raises
        ------
        KVCacheExhaustedError
            A length past a row's capacity.
        KVCacheStateError
            In the block of a graph that was prepared for other lengths.
        """
        try:
            self._enter()
            wanted = self._lengths(lengths)
            graph = self._graph_mode.current
            if graph is not None:
                return self._table_in_graph(graph, wanted)
            if self._page_table is None or not self._page_table.covers(wanted):
                self._page_table = self._build(wanted)
            return self._page_table
        finally:
            self._gate.leave()

    def build_page_table(self, lengths: Positions) -> PageTable:
        """A page table of the caller's own; the step neither keeps nor changes it."""
        try:
            self._enter()
            return self._build(self._lengths(lengths), own=False)
        finally:
            self._gate.leave()

    @property
    def current_page_table(self) -> PageTable | None:
        """The shared page table, or None where none was made."""
        try:
            self._enter()
            return self._graph_table() or self._page_table
        finally:
            self._gate.leave()

    def clear_page_table(self) -> None:
        """Forget the shared page table."""
        try:
            self._enter()
            self._page_table = None
        finally:
            self._gate.leave()
