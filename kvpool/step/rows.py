"""StepBase: the requests of a step, whether they live, and the checks that its calls share."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvpool.errors import KVCacheExhaustedError, KVCacheStateError
from kvpool.graph_buffers import GraphMode
from kvpool.page_table import PageTable
from kvpool.request import Request
from kvpool.requests import RequestTable
from kvpool.storage import KVStorage
from kvpool.words import past_capacity
from kvpool_ext.gate import Gate
from kvpool_ext.tables import StepRows
from kvpool_ext.windows import StepWindow

Positions = int | Sequence[int] | NDArray[np.integer[Any]]

# Slots handed out before those that nobody holds any more are forgotten.
MANY_HANDED = 256


class LatestTable:
    """The page table that a pool's steps made last.

    From one decode step to the next most rows stay on their pages, so the next table can list the
    same ones: its cost is then one of rows, not of tokens.
    """

    __slots__ = ("identity", "table")

    def __init__(self) -> None:
        self.identity = b""
        self.table: PageTable | None = None

    def lists(self, identity: bytes, indptr: NDArray[np.int32]) -> bool:
        """Whether it lists the pages of these rows, as many of each as `indptr` says."""
        return (
            self.table is not None
            and identity == self.identity
            and np.array_equal(indptr, self.table.indptr_host)
        )


class StepBase:
    """What a step is made of; `Step` adds the calls."""

    def __init__(
        self,
        table: RequestTable,
        storage: KVStorage,
        requests: list[Request],
        gate: Gate,
        zero_rejected_kv: bool,
        graph_mode: GraphMode,
        latest: LatestTable,
    ) -> None:
        self._table = table
        self._storage = storage
        self._requests = requests
        self._gate = gate
        self._zero_rejected_kv = zero_rejected_kv
        self._rows = StepRows(requests, table.ledger.lengths, table.page_size)
        self._graph_mode = graph_mode
        self._page_table: PageTable | None = None
        self._latest = latest
        self._ledger = table.ledger
        self._seen_losses = table.ledger.num_losses
        self._seen_shrinks = self._rows.num_shrinks()
        self._in_verify_window = False
        # id of slots that a caller has -> (the slots, weakly, and the window that they are of).
        self._handed: dict[int, tuple[weakref.ref[Any], bytes]] = {}

    @property
    def batch_size(self) -> int:
        """Rows."""
        return len(self._requests)

    # ---- life

    def _enter(self) -> None:
        """Begin a call, as the first thing in a `try` whose `finally` leaves the gate."""
        self._gate.enter()
        if self._seen_losses != self._ledger.num_losses:
            self._recheck()

    def _recheck(self) -> None:
        """Some request ended or shrank: die with one of ours, forget pages that ours gave back."""
        for request in self._requests:
            if not request.live:
                raise KVCacheStateError(
                    f"the step is dead: request {request.tag} is not bound any more; "
                    "activate a new step"
                )
        self._seen_losses = self._ledger.num_losses
        if self._seen_shrinks != self._rows.num_shrinks():
            self._seen_shrinks = self._rows.num_shrinks()
            self._rows.forget_windows()
            self._handed.clear()
            self._page_table = None

    # ---- arrays of the caller

    def _token_rows(
        self, k: Any, v: Any, qo_indptr: Any
    ) -> tuple[NDArray[Any], NDArray[Any], int, int]:
        """K and V as a kernel takes them, the seqlen of a dense call, and the number of tokens."""
        device = self._storage.device
        plain = device.plain_rows
        if type(k) is not plain:
            k = device.rows(k, "k")
        if type(v) is not plain:
            v = device.rows(v, "v")
        if k.base is not None or v.base is not None:
            self._storage.check_foreign(k, v, verb="put reads")
        shape, row_shape = k.shape, self._storage.row_shape
        if qo_indptr is not None:
            if shape[1:] != row_shape or v.shape != shape:
                raise self._wrong_shape(shape, v.shape, row_shape, "nnz")
            return k, v, 0, shape[0]
        batch_size = self._rows.batch_size
        if shape[2:] != row_shape or shape[0] != batch_size or v.shape != shape:
            raise self._wrong_shape(shape, v.shape, row_shape, f"{batch_size}, seqlen")
        seqlen = shape[1]
        num_tokens = batch_size * seqlen
        if device.flattens_rows:
            flat = (num_tokens, *row_shape)
            return k.reshape(flat), v.reshape(flat), seqlen, num_tokens
        return k, v, seqlen, num_tokens

    def _wrong_shape(self, k: Any, v: Any, row_shape: tuple[int, ...], lead: str) -> ValueError:
        leads = lead.count(",") + 1
        first = len(k) == leads + 2 and (leads == 1 or k[0] == self._rows.batch_size)
        if first and k[leads:] == row_shape:
            return ValueError(f"Invalid shape of v: expected {list(k)} as k, got {list(v)}")
        expected = f"[{lead}, {row_shape[0]}, {row_shape[1]}]"
        return ValueError(f"Invalid shape of k: expected {expected}, got {list(k)}")

    def _slots_of(self, window: StepWindow) -> NDArray[np.int64]:
        if window.slots is None:
            window.slots = self._storage.device.to_device(self._rows.window_slots(window))
        slots: NDArray[np.int64] = window.slots
        return slots

    def _hand_out(self, window: StepWindow) -> NDArray[np.int64]:
        """The window's slots for the caller, who may not change what later puts rely on."""
        if window.handed is None:
            slots = self._slots_of(window)
            if isinstance(slots, np.ndarray):
                slots = slots.view()
                slots.flags.writeable = False
            window.handed = slots
        if len(self._handed) >= MANY_HANDED:
            self._handed = {i: kept for i, kept in self._handed.items() if kept[0]() is not None}
        self._handed[id(window.handed)] = (weakref.ref(window.handed), window.key())
        handed: NDArray[np.int64] = window.handed
        return handed

    def _is_own(self, slots: Any, window: StepWindow) -> bool:
        """Whether `slots` were made by this step for these positions."""
        if slots is window.handed:
            return True
        kept = self._handed.get(id(slots))
        if kept is None or kept[0]() is not slots:
            return False
        if kept[1] != window.key():
            batch_size = self._rows.batch_size
            made_for = np.frombuffer(kept[1], np.int64)[: 2 * batch_size].reshape(2, -1).T.tolist()
            raise ValueError(
                f"slots were made for positions {made_for} of the rows, "
                f"start_pos and shape say {window.positions()}"
            )
        return True

    def _check_slots(self, slots: Any, num_rows: int) -> NDArray[Any]:
        found = self._storage.device.asarray(slots, "slots")
        if found.dtype not in (np.int64, np.int32):
            raise TypeError(f"Invalid dtype of slots: expected int64 or int32, got {found.dtype}")
        if num_rows > 1 and found.shape and found.strides[0] != found.dtype.itemsize:
            raise ValueError(f"slots must be contiguous, got a stride of {found.strides[0]} bytes")
        if found.shape != (num_rows,):
            raise ValueError(
                f"Invalid shape of slots: expected [{num_rows}], got {list(found.shape)}"
            )
        largest = self._storage.device.known_max(found)
        if largest is not None and largest >= self._storage.num_slots:
            raise ValueError(f"slot {largest} is past the pool's {self._storage.num_slots} slots")
        return found

    # ---- positions

    def _check_capacity(self, window: StepWindow) -> None:
        if self._rows.first_past_capacity(window) >= 0:
            raise self._past_capacity(window)

    def _past_capacity(self, window: StepWindow) -> KVCacheExhaustedError:
        row = self._rows.first_past_capacity(window)
        lease, end_pos = self._requests[row], window.positions()[row][1]
        return past_capacity(self._table.ledger, lease, end_pos)

    def _check_lengths(self, lengths: NDArray[np.int64]) -> None:
        row = self._rows.first_length_past_capacity(lengths)
        if row >= 0:
            lease = self._requests[row]
            raise past_capacity(self._table.ledger, lease, int(lengths[row]))

    def _put_on_shared(self, window: StepWindow) -> ValueError:
        row = self._rows.first_shared(window)
        return self._read_only("put", self._requests[row], window.positions()[row][0])

    def _check_range(
        self,
        starts: NDArray[np.int64],
        ends: NDArray[np.int64],
        verb: str,
        may_touch: bool = False,
    ) -> StepWindow:
        """Ranges as a window; ValueError if reversed, past capacity, or on read-only pages.

        With `may_touch`, an empty range may lie anywhere.
        """
        row = self._rows.first_bad_range(starts, ends, may_touch)
        if row >= 0:
            request, start, end = self._requests[row], int(starts[row]), int(ends[row])
            capacity = self._table.capacity(request)
            if start <= end <= capacity:
                raise self._read_only(verb, request, start)
            raise ValueError(
                f"{verb} of request {request.tag}: expected "
                f"0 <= from <= end <= capacity {capacity}, got [{start}, {end})"
            )
        return self._rows.window(starts, ends - starts)

    def _read_only(self, verb: str, request: Request, position: int) -> ValueError:
        shared_len = request.shared_pages * self._table.page_size
        return ValueError(
            f"{verb} at position {position} of request {request.tag} touches read-only "
            f"pages: its first {shared_len} tokens are shared"
        )

    # ---- tables

    def _lengths(self, lengths: Positions) -> NDArray[np.int64]:
        wanted = self._rows.positions(lengths, "lengths")
        self._check_lengths(wanted)
        return wanted

    def _build(self, lengths: NDArray[np.int64], own: bool = True) -> PageTable:
        indptr, last_page_len = self._rows.page_counts(lengths)
        identity, same_pages = self._rows.identity(), self._latest.table
        # A table that becomes the caller's, who may change it, shares nothing.
        if not own or not self._latest.lists(identity, indptr):
            same_pages = None
        indices = self._rows.page_ids(indptr) if same_pages is None else same_pages.indices_host
        made = PageTable(
            indptr,
            indices,
            last_page_len,
            lengths,
            self._table.page_size,
            self._table.num_pages,
            self._storage.device,
            same_pages=same_pages,
        )
        if own:
            self._latest.identity, self._latest.table = identity, made
        return made
