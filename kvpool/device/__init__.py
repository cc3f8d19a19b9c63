"""Device: where a pool's arrays live, and how foreign arrays get there without a copy."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvpool.device.side_stream import SideStream
from kvpool.dtypes import FLOAT_DTYPES, dtype_name

# What a put takes as it is, decided in one look-up.
_NATIVE_FLOATS = frozenset([*FLOAT_DTYPES.values(), np.dtype(np.float64)])


class Device:
    """A place for arrays; compares equal to its string. This one is the CPU.

    Parameters
    ----------
    name : str
        ``"cpu"``; use `device_of` for anything that a caller may name.
    """

    __slots__ = ("name",)

    kind = "cpu"
    """The kind of device without an ordinal."""

    plain_rows: type | None = None
    """Arrays of exactly this type are what `rows` would give back."""

    flattens_rows = True
    """Whether kernels want rows ``[n, heads, dim]``, or take ``[batch, seqlen, ...]`` as well."""

    def __init__(self, name: str = "cpu") -> None:
        self.name = name

    @property
    def array_namespace(self) -> ModuleType:
        """The module whose arrays live here: model code written against it runs on any pool."""
        return np

    def __eq__(self, other: object) -> bool:
        return self.name == str(other) if isinstance(other, (str, Device)) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.name)

    def __str__(self) -> str:
        return self.name

    def __repr__(self) -> str:
        return f"Device({self.name!r})"

    # ---- memory

    def read_memory(self) -> tuple[int, int] | None:
        """``(total, free)`` bytes after emptying caches; None where nobody would ask: on a CPU."""
        return None

    def release_memory(self) -> None:
        """Hand memory that nobody holds any more back to the device."""

    def zeros(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
        """A zeroed array."""
        return np.zeros(shape, dtype)

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
        """An array of no defined content, for kernels to fill."""
        return np.empty(shape, dtype)

    def to_device(self, host: NDArray[Any]) -> NDArray[Any]:
        """A host array on this device; on a CPU the same array."""
        return host

    def to_host(self, array: NDArray[Any]) -> NDArray[Any]:
        """An array of this device on the host; on a CPU the same array, elsewhere a copy."""
        return array

    def refresh(self, array: NDArray[Any], host: NDArray[Any]) -> None:
        """Make `array`, from `to_device`, equal to `host` again, in place."""
        if array is not host:
            array[...] = host

    def known_max(self, array: NDArray[Any]) -> int | None:
        """The largest element, None where that would make the host wait or there is none."""
        return int(array.max()) if array.size else None

    def check_upload(self) -> None:
        """KVCacheStateError if nothing can be uploaded now: in a graph capture."""

    def side_stream(self) -> SideStream:
        """A stream of one's own for copies in the background; for one thread."""
        return SideStream()

    # ---- arrays of the caller

    def asarray(self, array: Any, name: str) -> NDArray[Any]:
        """`array` as an array of this device, never copied.

        Parameters
        ----------
        array : array-like object
            A NumPy array, or anything on the CPU that speaks DLPack or the array protocol. torch
            tensors may be bfloat16, which NumPy's own DLPack import refuses.
        name : str
            What to call it in an error.

        Raises
        ------
        TypeError
            Not an array, or one that lives on another device.
        """
        if type(array) is np.ndarray:
            return array
        if is_torch(array):
            return _from_torch(array, name)
        if isinstance(array, np.ndarray):
            return np.asarray(array)
        for read in (np.from_dlpack, np.asarray):
            if read is np.from_dlpack and not hasattr(array, "__dlpack__"):
                continue
            if read is np.asarray and not hasattr(array, "__array_interface__"):
                continue
            try:
                return read(array)
            except (BufferError, RuntimeError, TypeError) as error:
                raise TypeError(f"{name} cannot be read on device {self}: {error}") from None
        raise TypeError(f"{name} must be an array on device {self}, got {type(array).__name__}")

    def float_array(self, array: Any, name: str) -> NDArray[Any]:
        """`asarray` that accepts floating point only.

        Raises
        ------
        TypeError
            Another dtype.
        """
        if type(array) is np.ndarray and array.dtype in _NATIVE_FLOATS:
            return array
        found = self.asarray(array, name)
        if found.dtype != np.float64 and dtype_name(found.dtype) not in FLOAT_DTYPES:
            raise TypeError(
                f"Invalid dtype of {name}: expected {', '.join(FLOAT_DTYPES)} or float64, got "
                f"{found.dtype}"
            )
        if not found.dtype.isnative:
            # Kernels read bytes: what another byte order means is known only here.
            found = found.astype(found.dtype.newbyteorder("="))
        return found

    rows = float_array
    """`float_array` for a put. On a CUDA device a part of the checks is left to its launch."""


def device_of(name: Any) -> Device:
    """The device with this name.

    Parameters
    ----------
    name : str or Device
        ``"cpu"``, ``"cuda"`` (the current device) or ``"cuda:1"``; objects that print like that
        (``torch.device("cpu")``) are fine.

    Raises
    ------
    ValueError
        No such device here; says what is missing.
    """
    if isinstance(name, Device):
        return name
    text = str(name)
    if text == "cpu":
        return Device(text)
    kind, colon, ordinal = text.partition(":")
    if kind != "cuda" or (colon and not (ordinal.isascii() and ordinal.isdigit())):
        raise ValueError(f"device must be 'cpu', 'cuda' or 'cuda:N', got {text!r}")
    # Here and not above: a CPU pool must not need CuPy.
    from kvpool.device.cuda import CudaDevice

    return CudaDevice(int(ordinal) if colon else None)


def is_torch(array: Any) -> bool:
    """Whether `array` is a torch tensor."""
    # Whoever holds a tensor has torch loaded: nothing is imported here.
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(array, torch.Tensor)


def _from_torch(tensor: Any, name: str) -> NDArray[Any]:
    torch = sys.modules["torch"]
    if tensor.device.type != "cpu":
        raise TypeError(f"{name} is on device {tensor.device}, expected a CPU tensor")
    tensor = tensor.detach()
    if tensor.dtype == torch.bfloat16:
        return np.asarray(tensor.view(torch.int16)).view(FLOAT_DTYPES["bfloat16"])
    return np.asarray(tensor)
