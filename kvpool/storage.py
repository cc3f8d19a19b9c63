"""KVStorage: the two buffers, by slot. It knows slots and layers, never requests.

The buffers hold one page more than the pool hands out. That scratch page takes the writes of
padded rows; it is finite, never handed out and not in the public views.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvpool.device import Device
from kvpool.dtypes import FLOAT_DTYPES, KVDType
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
    k_scale, v_scale : float or sequence of float
        FP8 scales, one number or one per layer; a stored code times its scale is the value.
    """

    def __init__(
        self,
        layout: KVCacheLayout,
        num_slots: int,
        page_size: int,
        dtype: KVDType,
        device: Device,
        k_scale: float | Sequence[float] | NDArray[np.float32] = 1.0,
        v_scale: float | Sequence[float] | NDArray[np.float32] = 1.0,
    ) -> None:
        self.num_layers = layout.num_layers
        self.num_slots = num_slots
        self.page_size = page_size
        self.dtype = dtype
        self._fp8_format = dtype.fp8_format
        self.device = device
        self.row_shape = (layout.num_kv_heads, layout.head_dim)
        shape = (layout.num_layers, num_slots + page_size, *self.row_shape)
        self._k = device.zeros(shape, dtype.storage)
        self._v = device.zeros(shape, dtype.storage)
        # Made once: slicing a layer out on every put would cost as much as a small scatter.
        self._layers = [(self._k[layer], self._v[layer]) for layer in range(layout.num_layers)]
        # To a kernel a page is one long slot, where nothing inside of it matters.
        num_heads, head_dim = self.row_shape
        paged = (layout.num_layers, -1, page_size * num_heads, head_dim)
        self._pages_as_slots = (self._k.reshape(paged), self._v.reshape(paged))
        self._kernels = for_device(device.kind)
        self._scales = [
            (float(k), float(v))
            for k, v in zip(
                np.broadcast_to(k_scale, layout.num_layers),
                np.broadcast_to(v_scale, layout.num_layers),
                strict=True,
            )
        ]
        # A launch has much to work out. What stays the same is worked out here, for each layer;
        # what can fail, by `prepare` of it, before a put changes anything.
        self.moves: list[Any] | None = None
        if hasattr(self._kernels, "Move"):
            self.moves = [
                self._kernels.Move(
                    "scatter", *layer, self._fp8_format, *scales, num_slots=num_slots
                )
                for layer, scales in zip(self._layers, self._scales, strict=True)
            ]
            self.run = self._kernels.run

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
        if type(layer) is int and 0 <= layer < self.num_layers:
            return layer
        if isinstance(layer, bool) or not isinstance(layer, (int, np.integer)):
            raise TypeError(f"layer must be an int, got {type(layer).__name__}")
        if not 0 <= layer < self.num_layers:
            raise ValueError(f"layer must be in 0 .. {self.num_layers - 1}, got {layer}")
        return int(layer)

    def check_foreign(self, *arrays: NDArray[Any], verb: str) -> None:
        """ValueError if one of `arrays` is a view of the buffers.

        A put zeroes pages before it reads its rows, and moves rows in any order.
        """
        for array in arrays:
            if array.base is self._k or array.base is self._v:
                raise ValueError(
                    f"{verb} an array that is a view of the pool's own buffers: give it a copy"
                )

    def layer(self, layer: int) -> tuple[NDArray[Any], NDArray[Any]]:
        """K and V of a layer, scratch page included, ``[num_slots + page_size, heads, dim]``."""
        return self._layers[layer]

    def scales(self, layer: int) -> tuple[float, float]:
        """FP8 scales of K and V of a layer; 1.0 for other dtypes."""
        return self._scales[layer]

    def write(self, layer: int, slots: NDArray[Any], k: NDArray[Any], v: NDArray[Any]) -> None:
        """Scatter rows ``[n, heads, head_dim]`` to `slots` ``[n]`` of a layer, K and V at once."""
        self._scatter(layer, slots, k, v, self.num_slots)

    def _scatter(
        self, layer: int, slots: NDArray[Any], k: NDArray[Any], v: NDArray[Any], limit: int
    ) -> None:
        k_cache, v_cache = self._layers[layer]
        fp8_format = self._fp8_format
        if fp8_format is None:
            self._kernels.scatter(k_cache, v_cache, k, v, slots, limit)
            return
        k_scale, v_scale = self._scales[layer]
        self._kernels.scatter_fp8(
            k_cache, v_cache, k, v, slots, fp8_format, k_scale, v_scale, limit
        )

    def write_with_scratch(
        self, layer: int, slots: NDArray[Any], k: NDArray[Any], v: NDArray[Any]
    ) -> None:
        """`write` that reaches the scratch page too: for slots of the pool's own making."""
        self._scatter(layer, slots, k, v, self.num_slots + self.page_size)

    def read(
        self, layer: int, slots: NDArray[Any], out: tuple[NDArray[Any], NDArray[Any]] | None = None
    ) -> tuple[NDArray[Any], NDArray[Any]]:
        """Gather rows of a layer in the compute dtype, new arrays or `out`; slots < 0 read zeros.

        `out`, if given, is ``[n, heads, head_dim]`` twice, in the compute dtype.
        """
        shape = (slots.shape[0], *self.row_shape)
        if out is None:
            k = self.device.empty(shape, self.dtype.compute_type)
            v = self.device.empty(shape, self.dtype.compute_type)
        else:
            k, v = out
        k_cache, v_cache = self._layers[layer]
        fp8_format = self._fp8_format
        if fp8_format is None:
            self._kernels.gather(k_cache, v_cache, slots, k, v)
        else:
            k_scale, v_scale = self._scales[layer]
            self._kernels.gather_fp8(k_cache, v_cache, slots, fp8_format, k_scale, v_scale, k, v)
        return k, v

    def zero(self, slots: NDArray[Any]) -> None:
        """Zero `slots` ``[n]`` on every layer."""
        self._kernels.zero(self._k, self._v, slots)

    def zero_pages(self, pages: NDArray[Any]) -> None:
        """Zero whole pages ``[n]``, int64 on the device, on every layer."""
        self._kernels.zero(*self._pages_as_slots, pages)

    def copy(self, source_slots: NDArray[Any], target_slots: NDArray[Any]) -> None:
        """Copy slots on every layer; no target is also a source."""
        self._kernels.copy_slots(self._k, self._v, source_slots, target_slots)

    def warm_up(self) -> None:
        """Compile every kernel that this storage can need; no slot is touched."""
        compile_all = getattr(self._kernels, "warm_up", None)
        if compile_all is not None:
            compile_all(self._k, self._v, self._fp8_format)
            return
        # Running a kernel is what compiles it; slot -1 is skipped, or read as zeros.
        nowhere = self.device.to_device(np.full(1, -1, np.int64))
        for dtype in FLOAT_DTYPES.values():
            rows = self.device.zeros((1, *self.row_shape), dtype)
            self.write(0, nowhere, rows, rows)
        self.read(0, nowhere)
        self.zero(nowhere)
        self.copy(nowhere, nowhere)

    def read_pages(self, pages: NDArray[np.int32]) -> tuple[NDArray[Any], NDArray[Any]]:
        """Stored bytes of whole pages, K and V ``[num_layers, n, page_size, heads, head_dim]``."""
        found = self.device.to_device(pages)
        return self._paged(self._k)[:, found], self._paged(self._v)[:, found]

    def write_pages(self, pages: NDArray[np.int32], k: NDArray[Any], v: NDArray[Any]) -> None:
        """Put back what `read_pages` of a storage of the same shape and dtype gave."""
        expected = (self.num_layers, len(pages), self.page_size, *self.row_shape)
        for name, array in (("k", k), ("v", v)):
            if array.shape != expected or array.dtype != self.dtype.storage:
                raise ValueError(
                    f"Invalid {name}: expected {expected} of {self.dtype.storage}, got "
                    f"{array.shape} of {array.dtype}"
                )
        found = self.device.to_device(pages)
        self._paged(self._k)[:, found] = k
        self._paged(self._v)[:, found] = v

    def _paged(self, buffer: NDArray[Any]) -> NDArray[Any]:
        return buffer.reshape(self.num_layers, -1, self.page_size, *self.row_shape)
