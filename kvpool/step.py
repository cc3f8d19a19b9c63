"""Step: the rows of one forward pass.

A step lives as long as all of its requests are bound; any use after that raises
`KVCacheStateError`. What is the same for all layers of a pass (slots of the written window, the
page table) is made once and found again by value.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvpool.errors import KVCacheStateError
from kvpool.page_table import PageTable
from kvpool.requests import Request, RequestTable
from kvpool.storage import KVStorage
from kvpool_ext.gate import Gate
from kvpool_ext.tables import StepRows, StepWindow

Positions = int | Sequence[int] | NDArray[np.integer[Any]]


class Step:
    """Rows of one forward pass, in the order they were activated; made by
    `KVCachePool.activate_step`.

    Positions count from the start of each request, ranges are half-open, and an argument that
    takes one position a row takes an int for all rows too.
    """

    def __init__(
        self,
        table: RequestTable,
        storage: KVStorage,
        requests: list[Request],
        gate: Gate,
        zero_rejected_kv: bool,
    ) -> None:
        self._table = table
        self._storage = storage
        self._requests = requests
        self._gate = gate
        self._zero_rejected_kv = zero_rejected_kv
        self._rows = StepRows(
            [request.lease for request in requests],
            [request.row for request in requests],
            table.written,
            table.page_size,
        )
        self._page_table: PageTable | None = None
        self._seen_losses = table.losses
        self._seen_shrinks = self._rows.num_shrinks()
        self._in_verify_window = False

    # ---- reading it

    @property
    def request_ids(self) -> list[int]:
        """Ids in row order."""
        return [request.request_id for request in self._requests]

    @property
    def batch_size(self) -> int:
        """Rows."""
        return len(self._requests)

    @property
    def capacities(self) -> list[int]:
        """Slots reserved for each row, in tokens."""
        self._enter()
        try:
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
        return not self._gate.closed and all(request.lease.live for request in self._requests)

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
        self._enter()
        try:
            if batch_size is not None and batch_size != self.batch_size:
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
        earlier owner are ever read.

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
            Wrong layer, shape, dtype or device, a slot at or past ``num_slots``, or a position on
            a read-only page (below ``shared_len``).
        """
        self._enter()
        try:
            storage = self._storage
            layer = storage.check_layer(layer)
            k, v, seqlen = self._token_rows(k, v, qo_indptr)
            window = self._rows.window(start_pos, seqlen, qo_indptr, k.shape[0])
            self._check_capacity(window)
            self._check_writable(window, "put")
            own = slots is None or self._is_own(slots, window)
            slots = self._slots_of(window) if own else self._check_slots(slots, window.num_tokens)
            fresh = self._rows.enter(window)
            if fresh is not None:
                storage.zero(storage.device.to_device(fresh))
            storage.write(layer, slots, k, v)
            if own:
                self._rows.advance(layer, window)
        finally:
            self._gate.leave()

    def get(
        self, layer: int, length: int, *, padded: bool = False, slots: Any = None
    ) -> tuple[NDArray[Any], NDArray[Any]]:
        """Read K and V of positions ``[0, length)`` of every row.

        Parameters
        ----------
        layer : int
            Layer index.
        length : int
            Positions of each row.
        padded : bool
            Let rows shorter than `length` repeat their last slot; mask those positions.
        slots : array, optional
            int64 or int32 ``[batch * length]`` on the device, from `slot_indices`.

        Returns
        -------
        tuple of array
            ``(k, v)``, each ``[batch, length, num_kv_heads, head_dim]`` in the compute dtype, new
            arrays. What this layer has not written reads as zeros.

        Raises
        ------
        KVCacheExhaustedError
            `length` past a row's capacity, without `padded`.
        """
        self._enter()
        try:
            storage = self._storage
            layer = storage.check_layer(layer)
            length = _length(length)
            if not padded:
                self._check_lengths(self._rows.positions(length, "length"))
            if slots is None:
                found = self._rows.slot_indices(length, True)
                slots = storage.device.to_device(found)
            else:
                slots = self._check_slots(slots, self.batch_size * length)
            k, v = storage.read(layer, slots)
            shape = (self.batch_size, length, *storage.row_shape)
            return k.reshape(shape), v.reshape(shape)
        finally:
            self._gate.leave()

    def slot_indices(self, length: int) -> NDArray[np.int64]:
        """Slots of positions ``[0, length)`` of every row, int64 ``[batch * length]`` on the
        device.

        Side caches can use them to share allocation, reuse and eviction with K and V. Positions
        past a row's capacity repeat its last slot: mask them.
        """
        self._enter()
        try:
            return self._storage.device.to_device(self._rows.slot_indices(_length(length), False))
        finally:
            self._gate.leave()

    def window_slot_indices(self, start_pos: Positions, seqlen: Positions) -> NDArray[np.int64]:
        """Slots of ``[start_pos, start_pos + seqlen)`` of each row, int64 ``[nnz]`` on the device,
        for `put`.

        Make them once a step and hand them to the put of every layer.

        Parameters
        ----------
        start_pos, seqlen : int or sequence of int
            First position, and number of positions, of each row.
        """
        self._enter()
        try:
            window = self._rows.window(start_pos, seqlen)
            self._check_capacity(window)
            return self._slots_of(window)
        finally:
            self._gate.leave()

    # ---- taking tokens back

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
        self._enter()
        try:
            lengths = self._rows.positions(sealed_len, "sealed_len")
            self._check_range(lengths, lengths, "seal_length")
            return self._seal(lengths)
        finally:
            self._gate.leave()

    def invalidate_range(self, from_pos: Positions, end_pos: Positions) -> None:
        """Zero K and V of ``[from_pos, end_pos)`` of each row on every layer, and take the
        positions back.

        Raises
        ------
        ValueError
            A reversed or negative range, one past a row's capacity, or one that touches read-only
            pages.
        """
        self._enter()
        try:
            starts = self._rows.positions(from_pos, "from_pos")
            ends = self._rows.positions(end_pos, "end_pos")
            window = self._check_range(starts, ends, "invalidate_range")
            self._zero(window)
            for request, start, end in zip(self._requests, starts, ends, strict=True):
                if end > start:
                    self._table.written.cap(request.row, int(start))
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
        self._enter()
        try:
            sealed = self._rows.positions(sealed_len, "sealed_len")
            ends = self._rows.positions(written_end, "written_end")
            self._check_range(sealed, sealed, "truncate_to")
            window = self._check_range(sealed, ends, "truncate_to")
            if self._zero_rejected_kv:
                self._zero(window)
            return self._seal(sealed)
        finally:
            self._gate.leave()

    @contextmanager
    def verify_window(self) -> Iterator[Step]:
        """Mark the forward pass inside as a verify window: several causal queries a row."""
        self._enter()
        self._gate.leave()
        before, self._in_verify_window = self._in_verify_window, True
        try:
            yield self
        finally:
            self._in_verify_window = before

    @property
    def in_verify_window(self) -> bool:
        """Whether a `verify_window` block runs."""
        return self._in_verify_window

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
            The same object while the same lengths are asked for.

        Raises
        ------
        KVCacheExhaustedError
            A length past a row's capacity.
        """
        self._enter()
        try:
            wanted = self._lengths(lengths)
            if self._page_table is None or not self._page_table.covers(wanted):
                self._page_table = self._build(wanted)
            return self._page_table
        finally:
            self._gate.leave()

    def build_page_table(self, lengths: Positions) -> PageTable:
        """A page table of the caller's own; the step neither keeps nor changes it."""
        self._enter()
        try:
            return self._build(self._lengths(lengths))
        finally:
            self._gate.leave()

    @property
    def current_page_table(self) -> PageTable | None:
        """The shared page table, or None where none was made."""
        self._enter()
        self._gate.leave()
        return self._page_table

    def clear_page_table(self) -> None:
        """Forget the shared page table."""
        self._enter()
        self._gate.leave()
        self._page_table = None

    # ---- inside

    def _enter(self) -> None:
        self._gate.enter()
        if self._seen_losses != self._table.losses:
            try:
                self._recheck()
            except KVCacheStateError:
                self._gate.leave()
                raise

    def _recheck(self) -> None:
        """Some request ended or shrank: die with one of ours, forget pages that one of ours gave."""
        for request in self._requests:
            if not request.lease.live:
                raise KVCacheStateError(
                    f"the step is dead: request {request.request_id} is not bound any more; "
                    "activate a new step"
                )
        self._seen_losses = self._table.losses
        if self._seen_shrinks != self._rows.num_shrinks():
            self._seen_shrinks = self._rows.num_shrinks()
            self._rows.forget_windows()
            self._page_table = None

    def _token_rows(
        self, k: Any, v: Any, qo_indptr: Any
    ) -> tuple[NDArray[Any], NDArray[Any], int]:
        device, row_shape = self._storage.device, self._storage.row_shape
        k, v = device.float_array(k, "k"), device.float_array(v, "v")
        if qo_indptr is None:
            if k.ndim != 4 or k.shape[0] != self.batch_size or k.shape[2:] != row_shape:
                expected = f"[{self.batch_size}, seqlen, {row_shape[0]}, {row_shape[1]}]"
                raise ValueError(f"Invalid shape of k: expected {expected}, got {list(k.shape)}")
        elif k.ndim != 3 or k.shape[1:] != row_shape:
            expected = f"[nnz, {row_shape[0]}, {row_shape[1]}]"
            raise ValueError(f"Invalid shape of k: expected {expected}, got {list(k.shape)}")
        if v.shape != k.shape:
            raise ValueError(
                f"Invalid shape of v: expected {list(k.shape)} as k, got {list(v.shape)}"
            )
        if qo_indptr is not None:
            return k, v, 0
        seqlen = k.shape[1]
        flat = (k.shape[0] * seqlen, *row_shape)
        return k.reshape(flat), v.reshape(flat), seqlen

    def _slots_of(self, window: StepWindow) -> NDArray[np.int64]:
        if window.slots is None:
            window.slots = self._storage.device.to_device(self._rows.window_slots(window))
        slots: NDArray[np.int64] = window.slots
        return slots

    def _is_own(self, slots: Any, window: StepWindow) -> bool:
        if slots is window.slots:
            return True
        for other in self._rows.recent_windows():
            if slots is other.slots:
                raise ValueError(
                    f"slots were made for positions {other.positions()}, start_pos and shape say "
                    f"{window.positions()}"
                )
        return False

    def _check_slots(self, slots: Any, num_rows: int) -> NDArray[Any]:
        found = self._storage.device.asarray(slots, "slots")
        if found.dtype not in (np.int64, np.int32):
            raise TypeError(f"Invalid dtype of slots: expected int64 or int32, got {found.dtype}")
        if found.shape != (num_rows,):
            raise ValueError(
                f"Invalid shape of slots: expected [{num_rows}], got {list(found.shape)}"
            )
        if found.size and found.max() >= self._storage.num_slots:
            raise ValueError(
                f"slot {found.max()} is past the pool's {self._storage.num_slots} slots"
            )
        return found

    def _check_capacity(self, window: StepWindow) -> None:
        row = self._rows.first_past_capacity(window)
        if row >= 0:
            raise self._table.past_capacity(self._requests[row], window.positions()[row][1])

    def _check_lengths(self, lengths: NDArray[np.int64]) -> None:
        row = self._rows.first_length_past_capacity(lengths)
        if row >= 0:
            raise self._table.past_capacity(self._requests[row], int(lengths[row]))

    def _check_writable(self, window: StepWindow, verb: str) -> None:
        row = self._rows.first_shared(window)
        if row >= 0:
            request = self._requests[row]
            shared_len = request.lease.shared_pages * self._table.page_size
            raise ValueError(
                f"{verb} from position {window.positions()[row][0]} of request "
                f"{request.request_id} touches read-only "
                f"pages: its first {shared_len} tokens are shared"
            )

    def _check_range(self, starts: NDArray[Any], ends: NDArray[Any], verb: str) -> StepWindow:
        """Ranges as a window; ValueError if reversed, past capacity, or on read-only pages."""
        for request, start, end in zip(self._requests, starts, ends, strict=True):
            capacity = self._table.capacity(request)
            shared_len = request.lease.shared_pages * self._table.page_size
            if end < start or end > capacity:
                raise ValueError(
                    f"{verb} of request {request.request_id}: expected 0 <= from <= end <= "
                    f"capacity {capacity}, "
                    f"got [{start}, {end})"
                )
            if start < shared_len and (end > start or verb != "invalidate_range"):
                raise ValueError(
                    f"{verb} at position {start} of request {request.request_id} touches "
                    "read-only pages: its first "
                    f"{shared_len} tokens are shared"
                )
        return self._rows.window(starts, ends - starts)

    def _zero(self, window: StepWindow) -> None:
        slots = self._rows.range_slots(window)
        if slots.size:
            self._storage.zero(self._storage.device.to_device(slots))

    def _seal(self, lengths: NDArray[np.int64]) -> bool:
        for request, length in zip(self._requests, lengths, strict=True):
            self._table.written.cap(request.row, int(length))
        if self._page_table is None:
            return False
        if self._page_table.bump(lengths):
            return True
        self._page_table = self._build(lengths)
        return False

    def _lengths(self, lengths: Positions) -> NDArray[np.int64]:
        wanted = self._rows.positions(lengths, "lengths")
        self._check_lengths(wanted)
        return wanted

    def _build(self, lengths: NDArray[np.int64]) -> PageTable:
        indptr, indices, last_page_len = self._rows.page_table(lengths)
        scratch_page = self._table.num_pages
        return PageTable(
            indptr, indices, last_page_len, lengths, self._table.page_size, scratch_page
        )


def _length(length: int) -> int:
    if isinstance(length, bool) or not isinstance(length, (int, np.integer)):
        raise TypeError(f"length must be an int, got {type(length).__name__}")
    if length < 0:
        raise ValueError(f"length must be >= 0, got {length}")
    return int(length)
