"""PageTable: which pages an attention kernel reads, row by row.

It knows pages and lengths, never requests. The layout is FlashInfer's CSR: row b reads
``indices[indptr[b]:indptr[b + 1]]``, and ``length = page_size * (num_pages - 1) + last_page_len``.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvpool.device import Device
from kvpool.numbers import INT32_MAX, whole_number
from kvpool.paging import num_pages_for_length
from kvpool_ext.tables import change_lengths


class PageTable:
    """Page table of a batch for one set of lengths.

    Arrays and nothing more: it keeps no page alive and does not notice that a request ended. A
    step's shared table follows `seal_length` and `truncate_to` in place where no row changes its
    number of pages; `Step.build_page_table` makes one that never changes.

    Attributes
    ----------
    indptr : array
        int32 ``[batch + 1]`` on the device.
    indices : array
        int32 ``[nnz]`` page ids on the device; longer in a graph's table. Tables of the same pages
        share it, so it is not to be written to.
    last_page_len : array
        int32 ``[batch]`` on the device, in ``1 .. page_size``; 0 for a row of length 0.
    indptr_host, last_page_len_host : ndarray
        The same on the host, where FlashInfer plans without a sync; on a CPU the same arrays.
    lengths_host : ndarray
        int64 ``[batch]``, tokens of each row.
    page_size, batch_size : int
        Tokens per page, rows.
    scratch_page : int
        The page behind the last of the pool's: its number of pages.
    version : int
        Grows whenever the content changes in place: what was planned for a table and a version
        holds for both.
    is_fixed : bool
        Whether it is a graph's: its arrays keep their addresses, and a change of pages too is made
        in place.
    """

    is_fixed = False

    def __init__(
        self,
        indptr: NDArray[np.int32],
        indices: NDArray[np.int32],
        last_page_len: NDArray[np.int32],
        lengths: NDArray[np.int64],
        page_size: int,
        scratch_page: int,
        device: Device,
        *,
        same_pages: PageTable | None = None,
    ) -> None:
        self.indptr: NDArray[np.int32]
        self.indices: NDArray[np.int32]
        # What another table has on the device already needs no second upload.
        if same_pages is not None:
            self.indptr, self.indices = same_pages.indptr, same_pages.indices
        else:
            self.indptr, self.indices = device.to_device(indptr), device.to_device(indices)
        self.last_page_len = device.to_device(last_page_len)
        self.indptr_host = indptr
        self.last_page_len_host = last_page_len
        self.lengths_host = lengths
        self.page_size = page_size
        self.version = 0
        self._indices_host = indices
        self._device = device
        self.scratch_page = scratch_page

    @property
    def indices_host(self) -> NDArray[np.int32]:
        """int32 ``[nnz]`` page ids on the host."""
        return self._indices_host

    @property
    def batch_size(self) -> int:
        """Rows."""
        return int(self.last_page_len_host.shape[0])

    def __repr__(self) -> str:
        return f"PageTable(lengths={self.lengths_host.tolist()}, page_size={self.page_size})"

    def block_table(self, max_pages: int | None = None) -> NDArray[np.int32]:
        """The table as a dense int32 ``[batch, max_pages]`` on the device, for FlashAttention.

        Parameters
        ----------
        max_pages : int, optional
            Columns; default the longest row's pages. Entries behind a row's pages are the scratch
            page. It may be read, but lies behind `key_layer`: give such a kernel the arrays of
            `KVCachePool.layer_with_scratch`.

        Raises
        ------
        ValueError
            A row has more pages than `max_pages`.
        """
        counts = np.diff(self.indptr_host)
        longest = int(counts.max(initial=0))
        if max_pages is None:
            max_pages = longest
        # As many pages as hold the longest request that there can be.
        most = num_pages_for_length(INT32_MAX, self.page_size)
        max_pages = whole_number(max_pages, "max_pages", 0, most)
        if max_pages < longest:
            raise ValueError(
                f"max_pages must be at least {longest}, the longest row's pages, got {max_pages}"
            )
        dense = np.full((self.batch_size, max_pages), self.scratch_page, np.int32)
        dense[np.arange(max_pages) < counts[:, None]] = self.indices_host
        return self._device.to_device(dense)

    def bump(self, lengths: NDArray[np.int64]) -> bool:
        """Take over `lengths` in place; False, and no change, if a row changes its page count.

        Parameters
        ----------
        lengths : ndarray
            int64, one for each row; in a graph's table, for each row that is no padding.
        """
        before, version = self.lengths_host[: len(lengths)].copy(), self.version + 1
        if not self._change(lengths):
            return False
        if self.last_page_len is not self.last_page_len_host:
            try:
                self._device.refresh(self.last_page_len, self.last_page_len_host)
            except BaseException:
                self._change(before)
                raise
        self.version = version
        return True

    def _change(self, lengths: NDArray[np.int64]) -> bool:
        return change_lengths(
            lengths, self.page_size, self.indptr_host, self.lengths_host, self.last_page_len_host
        )

    def covers(self, lengths: Any) -> bool:
        """Whether the table is the one for exactly these lengths."""
        return bool(np.array_equal(self.lengths_host, lengths))
