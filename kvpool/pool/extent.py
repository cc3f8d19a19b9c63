"""How large a pool may be, said before memory is asked for, and its buffers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvpool.device import Device
from kvpool.dtypes import KVDType
from kvpool.layout import KVCacheLayout
from kvpool.numbers import INT32_MAX, INT64_MAX, shown
from kvpool.storage import KVStorage

MAX_PAGE_SIZE = 1 << 20  # the tree's


def check_addressable(
    layout: KVCacheLayout, num_slots: int, page_size: int, dtype: KVDType
) -> None:
    """ValueError for more pages than have ids, or more bytes than have addresses."""
    num_pages = num_slots // page_size
    if num_pages > INT32_MAX:
        raise ValueError(
            f"num_slots {shown(num_slots)} are {shown(num_pages)} pages of {page_size}, expected "
            f"at most {INT32_MAX}: take fewer slots or a larger page_size"
        )
    num_bytes = _buffer_bytes(layout, num_slots, page_size, dtype)
    if num_bytes > INT64_MAX:
        raise ValueError(
            f"K of {layout.num_layers} layers x {num_slots} slots x {layout.num_kv_heads} heads x "
            f"{layout.head_dim} elements of {dtype.name} takes {shown(num_bytes)} bytes, more "
            f"than have addresses ({INT64_MAX})"
        )


def make_storage(
    layout: KVCacheLayout,
    num_slots: int,
    page_size: int,
    dtype: KVDType,
    device: Device,
    k_scale: float | Sequence[float] | NDArray[np.float32],
    v_scale: float | Sequence[float] | NDArray[np.float32],
) -> KVStorage:
    """The buffers of a pool; a MemoryError says how large they would have been."""
    args: tuple[Any, ...] = (layout, num_slots, page_size, dtype, device, k_scale, v_scale)
    try:
        return KVStorage(*args)
    except MemoryError as error:
        num_bytes = 2 * _buffer_bytes(layout, num_slots, page_size, dtype)
        raise MemoryError(
            f"{device} has no {num_bytes} bytes ({num_bytes / 2**30:.2f} GiB) for K and V of "
            f"{num_slots} slots and a scratch page of {page_size}, {layout.num_layers} layers x "
            f"{layout.num_kv_heads} heads x {layout.head_dim} elements of {dtype.name} each: take "
            "fewer slots"
        ) from error


def _buffer_bytes(layout: KVCacheLayout, num_slots: int, page_size: int, dtype: KVDType) -> int:
    """Bytes of K, or of V, with the scratch page."""
    per_slot = layout.num_layers * layout.num_kv_heads * layout.head_dim * dtype.itemsize
    return (num_slots + page_size) * per_slot
