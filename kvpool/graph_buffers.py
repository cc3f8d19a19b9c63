"""GraphBuffers: what a captured graph reads, at addresses that never change, for one batch bucket.

A bucket serves every step of up to that many rows. Rows behind the step's are padding: they have
no pages, and what they write goes to the scratch page.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvpool.device import Device
from kvpool.page_map import PageMap
from kvpool.page_table import PageTable
from kvpool_ext.tables import StepRows
from kvpool_ext.windows import StepWindow


class GraphTable(PageTable):
    """The page table of a bucket: arrays of a fixed size, filled again before every replay."""

    is_fixed = True

    def __init__(
        self, bucket: int, num_indices: int, page_size: int, scratch_page: int, device: Device
    ) -> None:
        super().__init__(
            np.zeros(bucket + 1, np.int32),
            np.zeros(0, np.int32),
            np.zeros(bucket, np.int32),
            np.zeros(bucket, np.int64),
            page_size,
            scratch_page,
            device,
        )
        self.indices = device.zeros((num_indices,), np.dtype(np.int32))
        self.indices[...] = scratch_page
        self.num_rows = 0
        self.num_listed = 0

    @property
    def indices_host(self) -> NDArray[np.int32]:
        """int32 ``[nnz]`` page ids on the host; on a CUDA device this waits for it."""
        return self._device.to_host(self.indices[: int(self.indptr_host[-1])])

    def list_only(self, num_indices: int) -> None:
        """Put the scratch page behind the last page id, where a longer table left its own.

        A kernel that reads past a row's pages, a dense copy say, finds nothing of another request
        (nano-vllm's issue 258 in `tests/test_cases_kernels.py`).
        """
        if num_indices < self.num_listed:
            self.indices[num_indices : self.num_listed] = self.scratch_page
        self.num_listed = num_indices

    def covers(self, lengths: Any) -> bool:
        """Whether the table is the one for exactly these lengths, padding aside."""
        n = len(lengths)
        return n == self.num_rows and bool(np.array_equal(self.lengths_host[:n], lengths))


@dataclass
class Filling:
    """What the buffers of a bucket hold.

    Attributes
    ----------
    rows : StepRows
        Rows of a step.
    lengths : ndarray
        int64 ``[batch]``, readable positions of each row.
    window : StepWindow or None
        Positions that the step writes; None where all writes go to scratch.
    window_len : int
        Positions that each row writes.
    may_put : bool
        Whether a put may use the write slots; not after `install`, which knows of no positions,
        nor after the block that they were prepared for.
    num_shrinks : int
        How often the rows had given pages back: after one more, the table may list such a page.
    """

    rows: StepRows
    lengths: NDArray[np.int64]
    window: StepWindow | None
    window_len: int
    may_put: bool = True
    num_shrinks: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_shrinks = self.rows.num_shrinks()

    @property
    def has_its_pages(self) -> bool:
        """Whether the rows still have every page that they had."""
        return self.rows.all_live() and self.rows.num_shrinks() == self.num_shrinks


class GraphBuffers:
    """Fixed arrays of one batch bucket of one graph.

    Parameters
    ----------
    bucket : int
        Rows.
    num_indices : int
        Page ids that the table has room for.
    window_len : int
        Positions of each row that the write slots have room for.
    page_size, num_slots : int
        Of the pool.
    device : Device
        Where the arrays are.
    page_map : PageMap
        What fills them.
    """

    def __init__(
        self,
        bucket: int,
        num_indices: int,
        window_len: int,
        page_size: int,
        num_slots: int,
        device: Device,
        page_map: PageMap,
    ) -> None:
        self.bucket = bucket
        self.num_indices = num_indices
        self.max_window_len = window_len
        self.table = GraphTable(bucket, num_indices, page_size, num_slots // page_size, device)
        self.filling: Filling | None = None
        self._all_slots = device.zeros((bucket * window_len,), np.dtype(np.int64))
        # A slice of a device array is an object of its own: one for each number of tokens.
        self._slots = {bucket * window_len: self._all_slots}
        self._scratch_slot = num_slots
        self._page_map = page_map
        self._identity = b""

    def slots(self, num_tokens: int) -> NDArray[np.int64]:
        """The first `num_tokens` write slots, int64, on the device; always the same object."""
        found = self._slots.get(num_tokens)
        if found is None:
            found = self._slots[num_tokens] = self._all_slots[:num_tokens]
        return found

    @property
    def write_slots(self) -> NDArray[np.int64]:
        """Write slots of all rows, padding included, int64 ``[bucket * window_len]``."""
        window_len = self.max_window_len if self.filling is None else self.filling.window_len
        return self.slots(self.bucket * window_len)

    def fill(self, filling: Filling) -> None:
        """Fill the arrays; after an error they hold nothing that can be used."""
        table, rows, n = self.table, filling.rows, len(filling.lengths)
        self.filling, identity = None, rows.identity()
        same_counts = rows.fill_counts(
            filling.lengths, table.indptr_host, table.last_page_len_host
        )
        same_pages = same_counts and identity == self._identity
        self._identity = b""
        if not same_pages:
            num_indices = int(table.indptr_host[-1])
            table.num_listed = max(table.num_listed, num_indices)
        table.lengths_host[:n] = filling.lengths
        table.lengths_host[n:] = 0
        table.num_rows = n
        table.version += 1
        window = filling.window
        self._page_map.refresh(
            rows,
            filling.lengths,
            None if window is None else window.start_positions(),
            filling.window_len,
            self.bucket,
            self._scratch_slot,
            table.indptr,
            table.indices,
            table.last_page_len,
            self.slots(self.bucket * filling.window_len),
            same_pages=same_pages,
        )
        if not same_pages:
            table.list_only(num_indices)
        self.filling, self._identity = filling, identity

    def check_room(self, num_pages: int) -> None:
        """ValueError where a table of so many pages is too long for arrays that do not move."""
        if num_pages > self.num_indices:
            raise ValueError(
                f"a page table of {num_pages} pages is too long for the graph's {self.bucket} "
                f"rows, whose arrays hold {self.num_indices} page ids: make the pool with a "
                "larger max_seq_len"
            )

    def seal(self, lengths: NDArray[np.int64]) -> bool:
        """Take over lower lengths: True if in place, False if pages had to be listed anew."""
        filling = self.filling
        assert filling is not None, "the step asked whether the buffers are its own"
        filling.lengths = lengths
        if self.table.bump(lengths):
            return True
        self.fill(filling)
        return False

    def restore(self, filling: Filling | None) -> None:
        """Go back to what was there before; to nothing, if a row of it has lost pages."""
        self.filling = None
        if filling is not None and filling.has_its_pages:
            self.fill(filling)


class GraphMode:
    """The graphs whose blocks a pool is in: puts and tables of its steps are the innermost's."""

    __slots__ = ("_outer", "current")

    def __init__(self) -> None:
        self.current: Any = None
        self._outer: list[Any] = []

    def enter(self, graph: Any) -> None:
        """Begin a block."""
        self._outer.append(self.current)
        self.current = graph

    def leave(self) -> None:
        """End the innermost block."""
        self.current = self._outer.pop()

    def is_in(self, graph: Any) -> bool:
        """Whether a block of this graph runs."""
        return graph is self.current or graph in self._outer
