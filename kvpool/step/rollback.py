"""StepRollback: taking tokens back after a speculative reject, and the window that wrote them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from kvpool.step.rows import Positions, StepBase
from kvpool_ext.windows import StepWindow


class StepRollback(StepBase):
    """Calls of a step that lower what its rows hold, without freeing pages."""

    def seal_length(self, sealed_len: Positions) -> bool:
        """Lower the readable length of each row without freeing pages, after a speculative reject.

        Parameters
        ----------
        sealed_len : int or sequence of int
            Committed tokens of each row. Above `valid_len` it is legal and raises nothing.

        Returns
        -------
        bool
            True exactly when no row changed its number of pages and the shared page table was
            bumped in place, so that its addresses survive; False when it was rebuilt or there is
            none.

        Raises
        ------
        ValueError
            Negative, past a row's capacity, or below its ``shared_len``.
        """
        try:
            self._enter()
            lengths = self._rows.positions(sealed_len, "sealed_len")
            self._check_range(lengths, lengths, "seal_length")
            return self._seal(lengths)
        finally:
            self._gate.leave()

    def invalidate_range(self, from_pos: Positions, end_pos: Positions) -> None:
        """Zero K and V of ``[from_pos, end_pos)`` of each row, and take the positions back.

        Raises
        ------
        ValueError
            A reversed or negative range, one past a row's capacity, or one that touches read-only
            pages.
        """
        try:
            self._enter()
            starts = self._rows.positions(from_pos, "from_pos")
            ends = self._rows.positions(end_pos, "end_pos")
            window = self._check_range(starts, ends, "invalidate_range", may_touch=True)
            self._zero(window)
            self._rows.cap_window(window)
        finally:
            self._gate.leave()

    def truncate_to(self, sealed_len: Positions, written_end: Positions) -> bool:
        """Seal each row to `sealed_len` and zero the rejected tail ``[sealed_len, written_end)``.

        Pages and capacity stay. Zeroing follows the pool's ``zero_rejected_kv``.

        Returns
        -------
        bool
            As `seal_length`.

        Raises
        ------
        ValueError
            ``written_end < sealed_len``, past a row's capacity, negative, or below ``shared_len``.
        """
        try:
            self._enter()
            sealed = self._rows.positions(sealed_len, "sealed_len")
            ends = self._rows.positions(written_end, "written_end")
            self._check_range(sealed, sealed, "truncate_to")
            window = self._check_range(sealed, ends, "truncate_to")
            return self._seal(sealed, window if self._zero_rejected_kv else None)
        finally:
            self._gate.leave()

    def _zero(self, window: StepWindow) -> None:
        slots = self._rows.range_slots(window)
        if slots.size:
            self._storage.zero(self._storage.device.to_device(slots))

    def _seal(self, lengths: NDArray[np.int64], rejected: StepWindow | None = None) -> bool:
        """Lower the rows to `lengths`, and zero `rejected`: the tables first, the lengths last.

        So a failure leaves the lengths, and what they promise, as they were; only a graph's
        buffers, which are not the step's own, are then to be prepared again.
        """
        graph = self._graph_mode.current
        in_graph = graph is not None and graph.holds(self._rows)
        table, before, in_place = self._page_table, None, False
        if in_graph or table is not None:
            self._storage.device.check_upload()
        if in_graph:
            graph.buffers.check_room(self._rows.num_pages_over(lengths))
        if table is not None:
            old_lengths = table.lengths_host.copy()
            in_place = table.bump(lengths)
            before = old_lengths if in_place else None
        try:
            if in_graph:
                kept = table if in_place else None
                in_place = graph.buffers.seal(lengths)
            else:
                kept = table if in_place or table is None else self._build(lengths)
            if rejected is not None:
                self._zero(rejected)
        except BaseException:
            if in_graph:
                graph.buffers.filling = None
            if table is not None and before is not None:
                # What was made outside of a graph's block is as it was again, or is gone.
                self._page_table = None
                table.bump(before)
                self._page_table = table
            raise
        self._rows.cap(lengths)
        # What was made outside of a graph's block must not show what is taken back in it.
        self._page_table = kept
        return in_place

    @contextmanager
    def verify_window(self) -> Iterator[StepRollback]:
        """Mark the forward pass inside as a verify window: several causal queries a row."""
        try:
            self._enter()
            before, self._in_verify_window = self._in_verify_window, True
        finally:
            self._gate.leave()
        try:
            yield self
        finally:
            self._in_verify_window = before

    @property
    def in_verify_window(self) -> bool:
        """Whether a `verify_window` block runs."""
        return self._in_verify_window
