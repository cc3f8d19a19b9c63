"""Tensors over the arrays of a pool, without a copy: the one door to torch.

A tensor made here is a view. It keeps the memory that it shows alive, on its own, after the pool
was closed and collected; what is written through it is seen by `Step.get` and by kernels, and the
other way round. The pool does not own the tensors: it keeps one set of them (`pool_tensors`) until
it is closed, and its memory goes back when the last view of it is gone, a tensor of the caller's
included. Who writes K and V through a tensor declares it with `KVCachePool.mark_written`.

DLPack carries no FP8, and bfloat16 not from every library: such arrays cross as integers of the
same size, and the tensor is relabelled.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kvpool.dtypes import dtype_name
from kvpool.errors import KVCacheStateError
from kvpool.interop.streams import TorchStream, in_capture

if TYPE_CHECKING:
    from kvpool.pool import KVCachePool

Tensor = Any  # torch.Tensor, which type checkers see only where torch is installed

# What an array is viewed as before it crosses, for dtypes that DLPack or NumPy cannot name.
_CARRIERS: dict[str, np.dtype[Any]] = {
    "bfloat16": np.dtype(np.int16),
    "float8_e4m3fn": np.dtype(np.uint8),
    "float8_e5m2": np.dtype(np.uint8),
}


def import_torch() -> ModuleType:
    """Torch, or an ImportError that says how to get it."""
    try:
        import torch
    except ImportError as error:
        raise ImportError(
            f"tensors need torch, which cannot be imported ({error}): install it as "
            "https://pytorch.org says, or with kvpool[flashinfer]"
        ) from error
    found: ModuleType = torch
    return found


def tensor_of(array: Any, dtype: Any = None) -> Tensor:
    """`array` as a tensor over the same memory.

    Parameters
    ----------
    array : array
        NumPy or CuPy, of any shape and strides; it may be read-only (slots are): torch has no
        read-only tensors, so do not write to what comes out then.
    dtype : str or dtype, optional
        What the elements are, where the array cannot say it: uint8 may be ``"float8_e4m3fn"``.
        Default: the dtype of the array.

    Returns
    -------
    torch.Tensor
        On the device of the array; it keeps the array's memory alive.

    Raises
    ------
    ValueError
        `dtype` is neither that of the array nor one that its elements can carry.
    """
    torch = import_torch()
    found = dtype_name(array.dtype)
    name = found if dtype is None else dtype_name(dtype)
    carrier = _CARRIERS.get(name)
    if name != found and (carrier is None or array.dtype.itemsize != carrier.itemsize):
        raise ValueError(f"an array of {found} cannot be shown as {name}")
    if carrier is not None:
        array = array.view(carrier)
    if isinstance(array, np.ndarray) and not array.flags.writeable:
        array = np.asarray(_Writable(array))
    tensor = torch.from_dlpack(array)
    return tensor if carrier is None else tensor.view(getattr(torch, name))


class _Writable:
    """A read-only array that says it can be written, for NumPy's array protocol.

    torch warns of a read-only array, or refuses it, by version. Nothing is copied, and whoever
    holds the array made from this holds the original.
    """

    def __init__(self, array: NDArray[Any]) -> None:
        self._array = array
        interface = dict(array.__array_interface__)
        interface["data"] = (interface["data"][0], False)
        self.__array_interface__ = interface


class PoolTensors:
    """Every buffer of a pool as tensors, in the pool's storage dtype by its torch name.

    Made by `pool_tensors`, once: an export asks the driver about each pointer, and would be
    refused in a graph capture.

    Attributes
    ----------
    key_cache, value_cache : torch.Tensor
        ``[num_layers, num_slots, num_kv_heads, head_dim]``.
    """

    def __init__(self, pool: KVCachePool) -> None:
        dtype, num_slots, page_size = pool.dtype, pool.num_slots, pool.page_size
        self.key_cache: Tensor = tensor_of(pool.key_cache, dtype)
        self.value_cache: Tensor = tensor_of(pool.value_cache, dtype)
        self._layers: list[tuple[Tensor, Tensor]] = []
        self._paged: list[tuple[Tensor, Tensor]] = []
        paged_shape = (pool.num_pages + 1, page_size, pool.num_kv_heads, pool.head_dim)
        for layer in range(pool.num_layers):
            k, v = (tensor_of(array, dtype) for array in pool.layer_with_scratch(layer))
            self._layers.append((k[:num_slots], v[:num_slots]))
            self._paged.append((k.view(paged_shape), v.view(paged_shape)))

    def key_layer(self, layer: int) -> Tensor:
        """K of one layer, ``[num_slots, num_kv_heads, head_dim]``."""
        return self._layers[self._check(layer)][0]

    def value_layer(self, layer: int) -> Tensor:
        """V of one layer, ``[num_slots, num_kv_heads, head_dim]``."""
        return self._layers[self._check(layer)][1]

    def paged_layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """K and V of one layer by pages, with the scratch page as the last one.

        Each is ``[num_pages + 1, page_size, num_kv_heads, head_dim]``, with the same strides:
        FlashInfer's NHD layout.
        """
        return self._paged[self._check(layer)]

    def _check(self, layer: int) -> int:
        # A negative index would find a layer, and not the one that was meant.
        if not 0 <= layer < len(self._paged):
            raise ValueError(f"layer must be in 0 .. {len(self._paged) - 1}, got {layer}")
        return layer


def pool_tensors(pool: KVCachePool) -> PoolTensors:
    """The tensors of a pool, made at the first call and kept until it is closed.

    Parameters
    ----------
    pool : KVCachePool
        On a CPU or a CUDA device.

    Raises
    ------
    ImportError
        torch is not installed, or is a build without CUDA where the pool is on a GPU.
    KVCacheStateError
        The pool is closed, or the first call is in a graph capture.
    """
    if pool.closed:
        raise KVCacheStateError("the pool is closed")
    found: PoolTensors | None = pool._guests.get("tensors")
    if found is None:
        pool._gate.check()
        torch = import_torch()
        if pool.device.kind == "cuda" and not torch.cuda.is_available():
            raise ImportError(
                f"the pool is on {pool.device}, and torch {torch.__version__} sees no CUDA "
                "device: install a build of torch with CUDA"
            )
        if in_capture(torch, pool.device):
            raise KVCacheStateError(
                "the tensors of the pool would be made while the stream is in graph capture: "
                "call pool.warm_up() after importing torch, or pool_tensors(pool), before it"
            )
        # On two streams, an export would make torch's wait for CuPy's.
        with TorchStream(torch, pool.device).joined():
            found = pool._guests["tensors"] = PoolTensors(pool)
    return found


def warm_up(pool: KVCachePool) -> None:
    """Make the tensors of a pool ahead of a capture, if torch is loaded and can have them."""
    torch = sys.modules.get("torch")
    if torch is not None and (pool.device.kind == "cpu" or torch.cuda.is_available()):
        pool_tensors(pool)
