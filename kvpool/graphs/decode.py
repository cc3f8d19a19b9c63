"""DecodeGraph: one new token a row."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from kvpool.graphs.base import Graph
from kvpool.page_table import PageTable
from kvpool.step import Positions


class DecodeGraph(Graph):
    """Buffers for decode passes: one new token a row."""

    name = "decode graph"

    def prepare(self, cache_len: Positions, positions: Positions) -> PageTable:
        """Fill the buffers for the active step, before a capture and before every replay.

        It declares what the pass writes: `valid_len` of each row rises to its position + 1 on all
        layers, if it reached up to the position before. Rows of padding write to the scratch page
        and declare nothing. The tokens are not there before the replay: checkpoint or fork a
        request after it.

        Parameters
        ----------
        cache_len : int or sequence of int
            Readable positions of each row, the new token included.
        positions : int or sequence of int
            Where each row writes.

        Returns
        -------
        PageTable
            Of the bucket: the same object, and the same addresses, every time.

        Raises
        ------
        KVCacheExhaustedError
            A length or position past a row's capacity.
        ValueError
            A position at or past its `cache_len`, or on read-only pages; more pages than
            ``max_seq_len`` of the pool allows for.
        KVCacheStateError
            No step is active; in a graph capture.
        """
        return self._prepare(cache_len, positions, 1)

    def page_table(self, batch: int) -> PageTable:
        """The table for a batch; its arrays keep their addresses for the life of the pool.

        Raises
        ------
        KVCacheStateError
            `prepare` has not run for this batch.
        """
        return self._prepared(batch).table

    def write_slots(self, batch: int) -> NDArray[np.int64]:
        """Where the rows of a batch write, padding included, int64 ``[bucket]`` on the device."""
        return self._prepared(batch).write_slots

    @contextmanager
    def prefetch(
        self, cache_len: Positions, cache_pos: Positions, batch: int
    ) -> Iterator[PageTable]:
        """A block of this graph for capturing a pass ahead of its time.

        The page table is that of the active step's rows at `cache_len`, as replay will have it;
        all writes go to the scratch page, and nothing is declared. On the way out the buffers hold
        again what they held before.

        Parameters
        ----------
        cache_len, cache_pos : int or sequence of int
            As `prepare` will be given them.
        batch : int
            Rows of the active step, or of its bucket.
        """
        step = self._wiring.active_step()
        outer = self.buffers
        buffers, before = step.prefetch_graph(self, cache_len, cache_pos, batch)
        self.buffers = buffers
        try:
            with self:
                yield buffers.table
        finally:
            gate = self._wiring.gate
            try:
                gate.enter()
                self.buffers = outer
                buffers.restore(before)
            finally:
                gate.leave()

    def install(self, table: PageTable, uniform_len: Positions) -> None:
        """Make a prefetched table the active step's, at a length.

        Puts in the block wait for a `prepare`, which says where they go.

        Raises
        ------
        ValueError
            The table is not this graph's for the active step's bucket.
        """
        self.buffers = self._wiring.active_step().install_graph(self, table, uniform_len)
