"""PageMap: how the fixed-address tables of a graph are refreshed, on each kind of device.

A graph was captured over arrays at fixed addresses; before every replay they are filled for the
rows and lengths of the step. On a CPU that is a copy out of the rows' page ids. On a CUDA device
the pages of every request are there already (`kvpool.page_map.cuda`), so that a refresh is one
small upload and one kernel.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvpool.device import Device
from kvpool_ext.tables import StepRows
from kvpool_ext.windows import StepWindow


class PageMap:
    """Fills tables on the host; the contract of the others.

    Parameters
    ----------
    device : Device
        Where the tables are.
    page_size : int
        Tokens per page.
    """

    def __init__(self, device: Device, page_size: int) -> None:
        self._device = device
        self._page_size = page_size

    def refresh(
        self,
        rows: StepRows,
        lengths: NDArray[np.int64],
        window: StepWindow | None,
        window_len: int,
        scratch_slot: int,
        indptr: NDArray[np.int32],
        indices: NDArray[np.int32],
        last_page_len: NDArray[np.int32],
        slots: NDArray[np.int64],
        *,
        same_pages: bool,
    ) -> None:
        """Fill the tables of a batch bucket, all of them on the device.

        Parameters
        ----------
        rows : StepRows
            The step's rows, up to a bucket of them.
        lengths : ndarray
            int64 ``[batch]`` on the host, readable positions of each row.
        window : StepWindow or None
            What the step writes, `window_len` positions a row; None sends all writes to scratch.
        window_len : int
            Positions that each row writes.
        scratch_slot : int
            First slot of the scratch page, where padding writes.
        indptr, indices, last_page_len : array
            int32 ``[bucket + 1]``, ``[at least the pages]``, ``[bucket]``. On a host, `indptr` and
            `last_page_len` are filled already: they are the arrays that a plan reads too.
        slots : array
            int64 ``[bucket * window_len]``.
        same_pages : bool
            Whether `indices` holds these rows' pages already.
        """
        if not same_pages:
            rows.fill_page_ids(indptr, indices)
        rows.fill_slots(window, window_len, scratch_slot, slots)

    def warm_up(self) -> None:
        """Compile what a refresh needs."""


def page_map_of(device: Device, page_size: int) -> Any:
    """The page map for a device."""
    return PageMap(device, page_size)
