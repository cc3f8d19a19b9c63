"""StepInGraph: how a step fills the fixed buffers of a graph, and puts through them."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvpool.errors import KVCacheStateError
from kvpool.graph_buffers import Filling, GraphBuffers
from kvpool.numbers import whole_number
from kvpool.page_table import PageTable
from kvpool.step.rows import Positions, StepBase
from kvpool_ext.windows import StepWindow


class StepInGraph(StepBase):
    """What `kvpool.graphs` asks of a step, and what a step does differently in a graph's block."""

    # ---- for kvpool.graphs

    def fill_graph(
        self, graph: Any, cache_len: Positions, start_pos: Positions, window_len: int
    ) -> GraphBuffers:
        """Fill the graph's buffers for this step and declare its writes; see `Graph.prepare`."""
        try:
            self._enter()
            self._storage.device.check_upload()
            lengths, window = self._positions(cache_len, start_pos, window_len)
            buffers: GraphBuffers = graph.buffers_for(self._rows, lengths, window_len)
            fresh = self._rows.entering(window)
            if fresh is not None:
                self._storage.zero_pages(self._storage.device.to_device(fresh))
            buffers.fill(Filling(self._rows, lengths, window, window_len))
            # Last, as what came before can fail and these cannot.
            if fresh is not None:
                self._rows.enter(window)
            self._rows.advance_all(window)
            return buffers
        finally:
            self._gate.leave()

    def prefetch_graph(
        self, graph: Any, cache_len: Positions, start_pos: Positions, batch: int
    ) -> tuple[GraphBuffers, Filling | None]:
        """Fill the graph's buffers with scratch writes; also what they held before."""
        try:
            self._enter()
            batch = whole_number(batch, "batch", 1)
            if batch not in (self.batch_size, graph.bucket(self.batch_size)):
                raise ValueError(
                    f"prefetch for a batch of {batch}: the active step has {self.batch_size} rows "
                    f"in a bucket of {graph.bucket(self.batch_size)}"
                )
            self._storage.device.check_upload()
            lengths, _ = self._positions(cache_len, start_pos, 1)
            buffers: GraphBuffers = graph.buffers_for(self._rows, lengths, 1)
            before = buffers.filling
            buffers.fill(Filling(self._rows, lengths, None, 1))
            return buffers, before
        finally:
            self._gate.leave()

    def install_graph(self, graph: Any, table: PageTable, uniform_len: Positions) -> GraphBuffers:
        """Make the graph's `table` this step's, at a length, until positions are known."""
        try:
            self._enter()
            self._storage.device.check_upload()
            lengths = self._lengths(uniform_len)
            buffers: GraphBuffers = graph.buffers_for(self._rows, lengths, 1)
            if buffers.table is not table:
                raise ValueError(
                    f"{table!r} is not the table of the bucket of {buffers.bucket} rows, which "
                    f"serves the active step's {self.batch_size}"
                )
            buffers.fill(Filling(self._rows, lengths, None, 1, may_put=False))
            return buffers
        finally:
            self._gate.leave()

    def _positions(
        self, cache_len: Positions, start_pos: Positions, window_len: int
    ) -> tuple[NDArray[np.int64], StepWindow]:
        """Lengths, and the window that lies within them, within capacity and on private pages."""
        lengths = self._lengths(cache_len)
        window = self._rows.window(start_pos, window_len)
        self._check_capacity(window)
        if self._rows.first_shared(window) >= 0:
            raise self._put_on_shared(window)
        row = self._rows.first_past_length(window, lengths)
        if row >= 0:
            start, end = window.positions()[row]
            raise ValueError(
                f"row {row} writes positions [{start}, {end}) and has a cache_len of "
                f"{lengths[row]}: cache_len includes what the step writes"
            )
        return lengths, window

    # ---- in a graph's block

    def _graph_table(self) -> PageTable | None:
        graph = self._graph_mode.current
        held: bool = graph is not None and graph.holds(self._rows)
        table: PageTable | None = graph.buffers.table if held else None
        return table

    def _graph_buffers(self, graph: Any) -> GraphBuffers:
        """The buffers that the graph was prepared with for this step."""
        buffers: GraphBuffers | None = graph.buffers
        if buffers is None or buffers.filling is None:
            raise KVCacheStateError(
                f"the {graph.name} is enabled and was not prepared: call prepare first"
            )
        if buffers.filling.rows is not self._rows:
            raise KVCacheStateError(
                f"the {graph.name} was prepared for another step: call prepare after each "
                "activate_step"
            )
        if not buffers.filling.has_its_pages:
            raise KVCacheStateError(
                f"a row gave pages back since the {graph.name} was prepared: call prepare again"
            )
        return buffers

    def _writable_buffers(self, graph: Any) -> GraphBuffers:
        """The same, if its write slots are those of this pass."""
        buffers = self._graph_buffers(graph)
        if buffers.filling is not None and not buffers.filling.may_put:
            raise KVCacheStateError(
                f"the {graph.name} knows no positions after install, or after the block that it "
                "was prepared for: call prepare before a put"
            )
        return buffers

    def _put_in_graph(self, graph: Any, layer: int, k: Any, v: Any, qo_indptr: Any) -> None:
        """Write K and V of the step's rows, with or without padding, to the graph's slots."""
        buffers = self._writable_buffers(graph)
        filling = buffers.filling
        assert filling is not None
        if filling.window is not None and self._rows.first_shared(filling.window) >= 0:
            raise self._put_on_shared(filling.window)
        storage = self._storage
        k, v = storage.device.float_array(k, "k"), storage.device.float_array(v, "v")
        storage.check_foreign(k, v, verb="put reads")
        shape, row_shape, window_len = k.shape, storage.row_shape, filling.window_len
        if qo_indptr is None:
            fits = shape[1:2] == (window_len,)
            num_rows, leads = shape[0] if shape else 0, 2
        else:
            num_rows, leads = len(qo_indptr) - 1, 1
            fits = shape[:1] == (num_rows * window_len,) and np.array_equal(
                qo_indptr, np.arange(num_rows + 1) * window_len
            )
        fits = fits and num_rows in (self.batch_size, buffers.bucket)
        if not fits or shape[leads:] != row_shape or v.shape != shape:
            lead = f"{self.batch_size} or {buffers.bucket}, {window_len}"
            raise ValueError(
                f"Invalid shape of k and v in the {graph.name}: expected [{lead}, "
                f"{row_shape[0]}, {row_shape[1]}], or its first two dimensions as one with a "
                f"qo_indptr of steps of {window_len}; got {list(shape)} and {list(v.shape)}"
            )
        num_tokens = num_rows * window_len
        flat = (num_tokens, *row_shape)
        if storage.device.flattens_rows:
            k, v = k.reshape(flat), v.reshape(flat)
        storage.write_with_scratch(layer, buffers.slots(num_tokens), k, v)

    def _table_in_graph(self, graph: Any, lengths: NDArray[np.int64]) -> PageTable:
        table = self._graph_buffers(graph).table
        if not table.covers(lengths):
            prepared = table.lengths_host[: self.batch_size].tolist()
            raise KVCacheStateError(
                f"the {graph.name} was prepared for lengths {prepared}, a page table of "
                f"{lengths.tolist()} was asked for"
            )
        return table

    def _slots_in_graph(
        self, graph: Any, start_pos: Positions, seqlen: Positions
    ) -> NDArray[np.int64]:
        buffers = self._writable_buffers(graph)
        filling, window = buffers.filling, self._rows.window(start_pos, seqlen)
        assert filling is not None
        if filling.window is not None and filling.window.key() != window.key():
            raise KVCacheStateError(
                f"the {graph.name} was prepared for positions {filling.window.positions()}, "
                f"slots of {window.positions()} were asked for"
            )
        slots = buffers.write_slots
        if isinstance(slots, np.ndarray):
            slots = slots.view()
            slots.flags.writeable = False
        return slots
