"""PageMap: a step's page table and write slots, written where a graph bucket keeps them.

The pages of every request are on the device already, in an int32 ``[rows, max_pages]`` whose rows
are those of the pool's requests. So what a step uploads is its rows, lengths and start positions,
in one piece, and one kernel makes the rest. Pages are sent with them, for a second kernel, only
where a request is new or got more of them.

No address here is ever captured: a graph reads the buffers of its bucket, and nothing else.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvpool.device.context import current_stream, enter_device, leave_device, stream_if_current
from kvpool.device.cuda import CudaDevice
from kvpool.device.staging import UploadRing
from kvpool.kernels import cuda_kernels as kernels
from kvpool.kernels import cuda_tables
from kvpool.kernels.cuda_moves import ready
from kvpool.kernels.launch import BoundKernel
from kvpool_ext.page_map import PageMapRows
from kvpool_ext.tables import StepRows

Array = Any

LEAST_ROWS, LEAST_PAGES = 16, 64
SLOT_BYTES = 8  # as a put has them


class PageMap:
    """The page map of one pool, and the upload of its steps.

    It takes ``4 * rows * max_pages`` bytes: rows for the most requests that were bound at once,
    and pages for the longest of them, both rounded up to powers of two.

    Parameters
    ----------
    device : CudaDevice
        Where the pool is.
    page_size : int
        Tokens per page.
    """

    __slots__ = ("_device", "_index", "_known", "_map", "_page_size", "_ring", "_tables")

    def __init__(self, device: CudaDevice, page_size: int) -> None:
        self._device = device
        self._index = device.index
        self._page_size = page_size
        self._ring = UploadRing(device)
        self._known = PageMapRows()
        self._map: Array = None
        self._tables: dict[int, BoundKernel] = {}

    def refresh(
        self,
        rows: StepRows,
        lengths: NDArray[np.int64],
        starts: NDArray[np.int64] | None,
        window_len: int,
        bucket: int,
        scratch_slot: int,
        indptr: Array,
        indices: Array,
        last_page_len: Array,
        slots: Array,
        *,
        same_pages: bool = False,
    ) -> None:
        """Fill the four buffers of a bucket, all of them, on CuPy's current stream.

        The host does not wait for it, nor does it wait for whoever reads the buffers on another
        stream: the caller orders the two. Rows behind the step's pad the bucket: they have no
        pages, last length 0, and scratch slots.

        Parameters
        ----------
        rows : StepRows
            Rows of the step.
        lengths : ndarray
            int64 ``[batch]`` on the host: tokens that attention reads, of each row.
        starts : ndarray or None
            int64 ``[batch]`` on the host: the position that each row writes first. Where it is
            negative, the row writes to scratch slots; None: all rows do.
        window_len : int
            Positions that each row writes.
        bucket : int
            Rows of the buffers.
        scratch_slot : int
            The first slot of the scratch page, which is the number of slots before it. Element i
            of `slots`, where it is for scratch, is ``scratch_slot + i % page_size``.
        indptr, indices, last_page_len : array
            int32 ``[bucket + 1]``, ``[capacity]``, ``[bucket]`` on the device. What `indices` has
            behind ``indptr[bucket]`` is left as it is.
        slots : array
            int64 ``[bucket * window_len]`` on the device.
        same_pages : bool
            Not used: the kernel lists the pages at no cost to the host.

        Raises
        ------
        KVCacheStateError
            CuPy's current stream is in graph capture.
        ValueError
            Positions past a row's pages, a batch beyond the bucket, or more pages than `indices`
            has room for. Nothing was changed.
        """
        stream = stream_if_current(self._index)
        before = -1
        if stream < 0:
            before = enter_device(self._index)
        try:
            if stream < 0:
                stream = current_stream(self._index)
            # Sizes first: a kernel that writes past a buffer is found by nobody.
            if not rows.batch_size <= bucket == last_page_len.size == indptr.size - 1:
                raise ValueError(
                    f"a step of {rows.batch_size} rows, a bucket of {bucket} with an indptr of "
                    f"{indptr.size} and a last_page_len of {last_page_len.size} elements"
                )
            if slots.size != bucket * window_len:
                raise ValueError(
                    f"slots must have {bucket} * {window_len} elements, got {slots.size}"
                )
            self._refresh(
                stream,
                (rows, lengths, starts, window_len, indices.size),
                bucket,
                scratch_slot,
                (indptr.data.ptr, indices.data.ptr, last_page_len.data.ptr, slots.data.ptr),
            )
        finally:
            leave_device(before)

    def _refresh(
        self,
        stream: int,
        step: tuple[StepRows, NDArray[np.int64], NDArray[np.int64] | None, int, int],
        bucket: int,
        scratch_slot: int,
        addresses: tuple[int, int, int, int],
    ) -> None:
        ring, known = self._ring, self._known
        rows, window_len = step[0], step[3]
        num_ints = known.num_ints(rows)
        if num_ints < 0:
            self._grow(rows, scratch_slot // self._page_size)
            num_ints = known.num_ints(rows)
        host = ring.host(num_ints)
        num_runs = known.pack(*step, host)
        table = self._tables.get(bucket)
        if table is None:
            table = self._tables[bucket] = self._bind(kernels.page_table(SLOT_BYTES), bucket)
        new_pages = self._bind(kernels.map_pages(), num_runs) if num_runs else None
        page_map, stride = self._map.data.ptr, 4 * known.max_pages
        batch = 4 * rows.batch_size
        there = ring.send()
        try:
            step_rows = there + 4
            if new_pages is not None:
                new_pages.launch(stream, (step_rows + 3 * batch, there, page_map, stride))
            arguments = (step_rows, step_rows + batch, step_rows + 2 * batch, there)
            sizes = (page_map, stride, self._page_size, window_len, scratch_slot)
            table.launch(stream, (*arguments, *sizes, *addresses))
        finally:
            ring.release()
        if num_runs:
            known.accept(rows)

    def _bind(self, spec: kernels.KernelSpec, num_blocks: int) -> BoundKernel:
        kernel = ready(spec, self._index)
        return kernel.bind(self._index, (num_blocks, 1, 1), (cuda_tables.THREADS, 1, 1))

    def _grow(self, rows: StepRows, num_pages: int) -> None:
        """Make room for a step. All pages are sent again then: this is rare."""
        self._ring.check()
        num_rows, max_pages = self._known.shape_for(rows)
        num_rows = max(LEAST_ROWS, self._known.num_rows, _power_of_two(num_rows))
        max_pages = max(LEAST_PAGES, self._known.max_pages, _power_of_two(max_pages))
        # A request cannot have more pages than the pool.
        shape = (num_rows, min(max_pages, num_pages))
        made = self._device.empty(shape, np.dtype(np.int32))
        # Kernels on another stream may still read the old one, whose memory is free from here on.
        self._ring.wait()
        self._known.resize(*shape)
        self._map = made

    def warm_up(self) -> None:
        """Compile and load the kernels, which a graph capture would forbid."""
        for spec in (kernels.map_pages(), kernels.page_table(SLOT_BYTES)):
            ready(spec, self._index)


def _power_of_two(n: int) -> int:
    """The next power of two from `n` on."""
    return 1 << (n - 1).bit_length()
