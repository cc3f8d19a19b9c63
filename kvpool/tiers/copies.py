"""PageCopies: K and V of pages between the buffers of a pool and staging rows, in the background.

Nothing is locked. Whoever reads cached pages asks afterwards whether they were still cached, and
throws the copy away if not; whoever writes pages has taken them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvpool.storage import KVStorage


class PageCopies:
    """Copies of one background thread.

    Parameters
    ----------
    storage : KVStorage
        Whose pages.
    """

    def __init__(self, storage: KVStorage) -> None:
        self._storage = storage
        self._on_host = storage.device.kind == "cpu"
        self.stream = storage.device.side_stream()
        if self._on_host:
            shape = (storage.num_layers, -1, storage.page_size, *storage.row_shape)
            self._k = storage.key_cache.reshape(shape)
            self._v = storage.value_cache.reshape(shape)
            assert np.may_share_memory(self._k, storage.key_cache), "a copy would not be written"

    def read(self, page_ids: NDArray[np.int32], kv: NDArray[Any], mark: Any = None) -> None:
        """Copy pages out.

        Parameters
        ----------
        page_ids : ndarray
            int32 ``[n]``.
        kv : ndarray
            ``[n, 2, num_layers, page_size, num_kv_heads, head_dim]`` on the host, to be filled.
        mark : object
            On a GPU: of the scheduler's stream, behind the writes of these pages.
        """
        if self._on_host:
            # Page by page: the interpreter is never held for longer than one takes.
            for page, row in zip(page_ids.tolist(), kv, strict=True):
                row[0] = self._k[:, page]
                row[1] = self._v[:, page]
            return
        device = self._storage.device
        with self.stream.after(mark):
            for part, layers in enumerate(self._storage.read_pages(page_ids)):
                kv[:, part] = device.to_host(layers).swapaxes(0, 1)

    def write(self, page_ids: NDArray[np.int32], kv: NDArray[Any], mark: Any = None) -> None:
        """Copy pages in; arguments as of `read`, `mark` behind what still reads these pages."""
        if self._on_host:
            for page, row in zip(page_ids.tolist(), kv, strict=True):
                self._k[:, page] = row[0]
                self._v[:, page] = row[1]
            return
        device = self._storage.device
        with self.stream.after(mark):
            k, v = (
                device.to_device(np.ascontiguousarray(kv[:, part].swapaxes(0, 1)))
                for part in (0, 1)
            )
            self._storage.write_pages(page_ids, k, v)
