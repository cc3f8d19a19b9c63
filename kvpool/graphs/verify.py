"""VerifyGraph: a window of drafted tokens a row."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvpool.errors import KVCacheStateError
from kvpool.graph_buffers import GraphBuffers
from kvpool.graphs.base import Graph, GraphWiring
from kvpool.numbers import INT32_MAX, whole_number
from kvpool.page_table import PageTable
from kvpool.step import Positions


class VerifyGraph(Graph):
    """Buffers for passes that verify a window of drafted tokens: `window_len` tokens a row."""

    name = "verify graph"
    _may_grow = True

    def __init__(self, wiring: GraphWiring) -> None:
        super().__init__(wiring)
        self._reallocated = False
        self._qo_indptr: dict[tuple[int, int], NDArray[np.int32]] = {}

    def prepare(
        self, cache_lengths: Positions, start_positions: Positions, window_len: int
    ) -> PageTable:
        """Fill the buffers for the active step, before a capture and before every replay.

        Writes are declared as by `DecodeGraph.prepare`: an upper bound, as `Step.truncate_to`
        takes back what is rejected, one step later if that suits.

        Parameters
        ----------
        cache_lengths : int or sequence of int
            Readable positions of each row, its window included.
        start_positions : int or sequence of int
            First position of each row's window.
        window_len : int
            Tokens that each row writes.

        Returns
        -------
        PageTable
            Of the bucket. A longer window than before, or more pages than ``max_seq_len`` of the
            pool allows for, makes new arrays: `take_reallocated` tells.

        Raises
        ------
        KVCacheExhaustedError, ValueError, KVCacheStateError
            As `DecodeGraph.prepare`.
        """
        return self._prepare(cache_lengths, start_positions, _checked_window_len(window_len))

    def page_table(self) -> PageTable:
        """The table that was prepared last."""
        return self._latest().table

    def write_slots(self) -> NDArray[np.int64]:
        """Where its rows write, padding included, int64 ``[bucket * window_len]``."""
        return self._latest().write_slots

    def take_reallocated(self) -> bool:
        """Whether arrays of a bucket were replaced since the last call; then it is forgotten.

        A graph that was captured over the old ones must be captured anew.
        """
        self._wiring.gate.check()
        taken, self._reallocated = self._reallocated, False
        return taken

    def qo_indptr(self, batch: int, window_len: int) -> NDArray[np.int32]:
        """CSR of the query rows, int32 ``[bucket + 1]`` on the device: 0, window_len, ...

        The same array for the same bucket and window.
        """
        self._wiring.gate.check()
        num_pages = self._wiring.num_slots // self._wiring.page_size
        batch = whole_number(batch, "batch", 1, max(num_pages, self._wiring.layout.max_batch_size))
        key = (self.bucket(batch), _checked_window_len(window_len))
        if key[0] * key[1] >= 2**31:
            raise ValueError(f"{key[0]} windows of {key[1]} tokens are more than int32 counts")
        found = self._qo_indptr.get(key)
        if found is None:
            host = np.arange(key[0] + 1, dtype=np.int32) * np.int32(window_len)
            found = self._qo_indptr[key] = self._wiring.device.to_device(host)
        return found

    def _replace(self, bucket: int, made: GraphBuffers) -> None:
        self._reallocated |= bucket in self._by_bucket
        super()._replace(bucket, made)

    def _latest(self) -> GraphBuffers:
        self._wiring.gate.check()
        if self.buffers is None or self.buffers.filling is None:
            raise KVCacheStateError("the verify graph was not prepared: call prepare first")
        return self.buffers


def _checked_window_len(window_len: int) -> int:
    return whole_number(window_len, "window_len", 1, INT32_MAX)
