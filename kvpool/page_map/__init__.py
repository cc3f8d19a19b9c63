"""PageMap: how the fixed-address tables of a graph are refreshed, on each kind of device.

A graph was captured over arrays at fixed addresses; before every replay they are filled for the
rows and lengths of the step. On a CPU that is a copy out of the rows' page ids. On a CUDA device
the pages of every request are there already (`kvpool.kernels.cuda_page_map`), so that a refresh is
one small upload and one kernel.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvpool.device import Device
from kvpool_ext.tables import StepRows

_MODULE_BY_KIND = {"cpu": __name__, "cuda": "kvpool.kernels.cuda_page_map"}


class PageMap:
    """Fills tables on the host. On a CUDA device its place is taken by one of the same calls.

    Parameters
    ----------
    device : Device
        Where the tables are.
    page_size : int
        Tokens per page.
    """

    def __init__(self, device: Device, page_size: int) -> None:
        """Nothing is kept: on a host the pages are in the leases of the rows."""

    def refresh(
        self,
        rows: StepRows,
        lengths: NDArray[np.int64],
        starts: NDArray[np.int64] | None,
        window_len: int,
        bucket: int,
        scratch_slot: int,
        indptr: NDArray[np.int32],
        indices: NDArray[np.int32],
        last_page_len: NDArray[np.int32],
        slots: NDArray[np.int64],
        *,
        same_pages: bool = False,
    ) -> None:
        """Fill the tables of a batch bucket, all of them on the device.

        Parameters
        ----------
        rows : StepRows
            The step's rows, up to a bucket of them.
        lengths : ndarray
            int64 ``[batch]`` on the host, readable positions of each row.
        starts : ndarray or None
            int64 ``[batch]`` on the host, the position that each row writes first; None sends all
            writes to scratch.
        window_len : int
            Positions that each row writes.
        bucket : int
            Rows of the buffers; those behind the step's are padding.
        scratch_slot : int
            First slot of the scratch page. Element i of `slots`, where it is for scratch, is
            ``scratch_slot + i % page_size``.
        indptr, indices, last_page_len : array
            int32 ``[bucket + 1]``, ``[at least the pages]``, ``[bucket]``. On a host, `indptr` and
            `last_page_len` are filled already: they are the arrays that a plan reads too.
        slots : array
            int64 ``[bucket * window_len]``.
        same_pages : bool
            Whether `indices` holds these rows' pages already; a kernel that lists them at no cost
            to the host need not care.
        """
        if not same_pages:
            rows.fill_page_ids(indptr, indices)
        rows.fill_slots(starts, window_len, scratch_slot, slots)


def page_map_of(device: Device, page_size: int) -> Any:
    """The page map for a device."""
    return import_module(_MODULE_BY_KIND[device.kind]).PageMap(device, page_size)
