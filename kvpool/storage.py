"""KVStorage: the two buffers, by slot. It knows slots and layers, never requests.

The buffers hold one page more than the pool hands out. That scratch page takes the writes of
padded rows; it is finite, never handed out and not in the public views.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvpool.device import Device
from kvpool.dtypes import KVDType
from kvpool.kernels import for_device
from kvpool.layout import KVCacheLayout


class KVStorage:
    """K and V, zeroed, ``[num_layers, num_slots + page_size, num_kv_heads, head_dim]`` each.

    Parameters
    ----------
    layout : KVCacheLayout
        Layers, heads and head_dim.
    num_slots : int
        Slots that the pool hands out.
    page_size : int
        Slots per page.
    dtype : KVDType
        Storage and compute dtype.
    device : Device
        Where the buffers live.
    """

    def __init__(
        self, layout: KVCacheLayout, num_slots: int, page_size: int, dtype: KVDType, device: Device
    ) -> None:
        self.num_layers = layout.num_layers
        self.num_slots = num_slots
        self.page_size = page_size
        self.dtype = dtype
        self.device = device
        self.row_shape = (layout.num_kv_heads, layout.head_dim)
        shape = (layout.num_layers, num_slots + page_size, *self.row_shape)
        self._k = device.zeros(shape, dtype.storage)
        self._v = device.zeros(shape, dtype.storage)
        # Made once: slicing a layer out on every put would cost as much as a small scatter.
        self._layers = [(self._k[layer], self._v[layer]) for layer in range(layout.num_layers)]
        self._kernels = for_device(device.kind)

    @property
    def key_cache(self) -> NDArray[Any]:
        """K without the scratch page, a view."""
        return self._k[:, : self.num_slots]

    @property
    def value_cache(self) -> NDArray[Any]:
        """V without the scratch page, a view."""
        return self._v[:, : self.num_slots]

    def check_layer(self, layer: int) -> int:
        """`layer` if there is such a layer, else ValueError; negative ones are not there."""
        if isinstance(layer, bool) or not isinstance(layer, (int, np.integer)):
            raise TypeError(f"layer must be an int, got {type(layer).__name__}")
        if not 0 <= layer < self.num_layers:
            raise ValueError(f"layer must be in 0 .. {self.num_layers - 1}, got {layer}")
        return int(layer)

    def layer(self, layer: int) -> tuple[NDArray[Any], NDArray[Any]]:
        """K and V of a layer, scratch page included, ``[num_slots + page_size, heads, dim]``."""
        return self._layers[layer]

    def write(self, layer: int, slots: NDArray[Any], k: NDArray[Any], v: NDArray[Any]) -> None:
        """Scatter rows ``[n, heads, head_dim]`` to `slots` ``[n]`` of a layer, K and V at once."""
        k_cache, v_cache = self._layers[layer]
        self._kernels.scatter(k_cache, v_cache, k, v, slots)

    def read(self, layer: int, slots: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
        """Gather rows of one layer in the compute dtype, as new arrays; slots < 0 read zeros."""
        shape = (slots.shape[0], *self.row_shape)
        k = self.device.empty(shape, self.dtype.compute_type)
        v = self.device.empty(shape, self.dtype.compute_type)
        k_cache, v_cache = self._layers[layer]
        self._kernels.gather(k_cache, v_cache, slots, k, v)
        return k, v

    def zero(self, slots: NDArray[Any]) -> None:
        """Zero `slots` ``[n]`` on every layer."""
        self._kernels.zero(self._k, self._v, slots)

    def copy(self, source_slots: NDArray[Any], target_slots: NDArray[Any]) -> None:
        """Copy slots on every layer; no target is also a source."""
        self._kernels.copy_slots(self._k, self._v, source_slots, target_slots)

    def read_pages(self, pages: NDArray[np.int32]) -> tuple[NDArray[Any], NDArray[Any]]:
        """Stored bytes of whole pages, K and V ``[num_layers, n, page_size, heads, head_dim]``."""
        paged = (self.num_layers, -1, self.page_size, *self.row_shape)
        return self._k.reshape(paged)[:, pages], self._v.reshape(paged)[:, pages]

    def write_pages(self, pages: NDArray[np.int32], k: NDArray[Any], v: NDArray[Any]) -> None:
        """Put back what `read_pages` of a storage of the same shape and dtype gave."""
        expected = (self.num_layers, len(pages), self.page_size, *self.row_shape)
        for name, array in (("k", k), ("v", v)):
            if array.shape != expected or array.dtype != self.dtype.storage:
                raise ValueError(
                    f"Invalid {name}: expected {expected} of {self.dtype.storage}, got "
                    f"{array.shape} of {array.dtype}"
                )
        paged = (self.num_layers, -1, self.page_size, *self.row_shape)
        self._k.reshape(paged)[:, pages] = k
        self._v.reshape(paged)[:, pages] = v
