"""CudaDevice: where the arrays of a CUDA pool live. The one door to CuPy.

All work is on CuPy's current stream, read anew at every call: inside ``with stream:`` and under
graph capture that is the caller's. Arrays from elsewhere are taken by their address; no event is
recorded and no stream waits, for both would be forbidden in a graph capture. Whoever produced an
array on another stream orders the two.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvpool.device import Device, is_torch
from kvpool.device.context import current_stream, is_capturing
from kvpool.device.cuda_side_stream import CudaSideStream
from kvpool.device.side_stream import SideStream
from kvpool.dtypes import FLOAT_DTYPES, dtype_name
from kvpool.errors import KVCacheStateError

_INSTALL = "install CuPy and numba-cuda with kvpool[cuda12] or kvpool[cuda13], or use device='cpu'"

# Indexed by NumPy's number of a dtype, which is much quicker to get than its name.
_FLOAT_NUMBERS = {dtype.num for dtype in FLOAT_DTYPES.values()} | {np.dtype(np.float64).num}


class CudaDevice(Device):
    """A CUDA device.

    Parameters
    ----------
    index : int or None
        Ordinal; None is CuPy's current device.

    Raises
    ------
    ValueError
        CuPy or numba-cuda is not installed, no driver answers, or there is no such device.
    """

    __slots__ = ("_cupy", "_ndarray", "index", "plain_rows")

    kind = "cuda"
    # A view that is flat would cost half a microsecond.
    flattens_rows = False

    def __init__(self, index: int | None = None) -> None:
        wanted = "cuda" if index is None else f"cuda:{index}"
        cupy = _import_cupy(wanted)
        _check_numba_cuda(wanted)
        try:
            count = cupy.cuda.runtime.getDeviceCount()
        except cupy.cuda.runtime.CUDARuntimeError as error:
            reason = str(error).partition(":")[0]
            raise ValueError(
                f"device {wanted!r} is not available: no CUDA driver answers on this machine "
                f"({reason}); use device='cpu'"
            ) from None
        found = int(cupy.cuda.runtime.getDevice()) if index is None and count else index or 0
        if found >= count:
            raise ValueError(
                f"device {wanted!r} is not available: this machine has {count} CUDA devices; use "
                "one of 'cuda:0' .. or device='cpu'"
            )
        super().__init__(f"cuda:{found}")
        self.index = found
        self._cupy = cupy
        self._ndarray = self.plain_rows = cupy.ndarray

    @property
    def array_namespace(self) -> ModuleType:
        """CuPy."""
        return self._cupy

    # ---- memory

    def read_memory(self) -> tuple[int, int]:
        """``(total, free)`` bytes of the device, after emptying the caches of CuPy and torch."""
        with self._cupy.cuda.Device(self.index) as device:
            # What still runs may hold memory that is about to be free.
            device.synchronize()
            self.release_memory()
            free, total = self._cupy.cuda.runtime.memGetInfo()
        return int(total), int(free)

    def release_memory(self) -> None:
        """Hand the blocks that CuPy, and torch if it is loaded, only keep back to the device."""
        self._cupy.get_default_memory_pool().free_all_blocks()
        torch = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_initialized():
            torch.cuda.empty_cache()

    def side_stream(self) -> SideStream:
        """A stream of one's own for copies in the background; for one thread."""
        return CudaSideStream(self)

    def is_capturing(self) -> bool:
        """Whether CuPy's current stream on this device is in graph capture."""
        return is_capturing(current_stream(self.index))

    # ---- arrays

    def zeros(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
        """A zeroed array."""
        with self._cupy.cuda.Device(self.index):
            try:
                made: NDArray[Any] = self._cupy.zeros(shape, dtype)
            except (TypeError, ValueError) as error:
                raise ValueError(
                    f"CuPy {self._cupy.__version__} has no arrays of {dtype}: install CuPy 14 or "
                    "later, or choose another dtype"
                ) from error
        return made

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
        """An array of no defined content, for kernels to fill."""
        with self._cupy.cuda.Device(self.index):
            if self.is_capturing():
                raise KVCacheStateError(
                    "an array would be allocated while the stream is in graph capture: capture "
                    "only calls that write into arrays made before"
                )
            made: NDArray[Any] = self._cupy.empty(shape, dtype)
            return made

    def to_device(self, host: NDArray[Any]) -> NDArray[Any]:
        """A host array on this device, copied there on the current stream."""
        with self._cupy.cuda.Device(self.index):
            self.check_upload()
            made: NDArray[Any] = self._cupy.asarray(host)
            return made

    def to_host(self, array: NDArray[Any]) -> NDArray[Any]:
        """A host copy, for which the host waits."""
        with self._cupy.cuda.Device(self.index):
            made: NDArray[Any] = array.get()  # type: ignore[attr-defined]
        return made

    def refresh(self, array: NDArray[Any], host: NDArray[Any]) -> None:
        """Make `array`, from `to_device`, equal to `host` again, in place."""
        with self._cupy.cuda.Device(self.index):
            self.check_upload()
            array.set(host)  # type: ignore[attr-defined]

    def check_upload(self) -> None:
        """KVCacheStateError in a graph capture, where nothing can be uploaded."""
        if self.is_capturing():
            raise KVCacheStateError(
                "slots or a page table would be uploaded while the stream is in graph capture: "
                "make them before it (window_slot_indices, page_table), and put to every new page "
                "once outside of it"
            )

    def known_max(self, array: NDArray[Any]) -> int | None:
        """None: the host does not wait for the device; kernels skip what is out of range."""
        return None

    def asarray(self, array: Any, name: str) -> NDArray[Any]:
        """`array` as a CuPy array on this device, never copied.

        Parameters
        ----------
        array : array-like object
            A CuPy array, a torch tensor, or anything on this device that speaks the CUDA array
            interface or DLPack.
        name : str
            What to call it in an error.

        Raises
        ------
        TypeError
            Not an array, or one that lives on the host or on another device.
        """
        found = array if type(array) is self._ndarray else self._adopt(array, name)
        _check_place(found, name, self.index)
        return found  # type: ignore[no-any-return]

    def rows(self, array: Any, name: str) -> NDArray[Any]:
        """`array` as a CuPy array; `check_rows` is left to the plan of its launch, made once."""
        found: NDArray[Any] = array if type(array) is self._ndarray else self._adopt(array, name)
        return found

    def float_array(self, array: Any, name: str) -> NDArray[Any]:
        """`asarray` that accepts floating point only, with elements side by side in a row.

        Raises
        ------
        TypeError
            Another dtype.
        ValueError
            A last dimension that is not contiguous.
        """
        found = self.rows(array, name)
        check_rows(found, name, self.index)
        return found

    def _adopt(self, array: Any, name: str) -> Any:
        if is_torch(array):
            return self._from_torch(array, name)
        if isinstance(array, self._ndarray):
            return array
        if isinstance(array, np.ndarray):
            raise TypeError(
                f"{name} is a host array, the pool is on {self}: upload it with "
                f"cupy.asarray({name})"
            )
        cupy = self._cupy
        for protocol, read in (
            ("__cuda_array_interface__", cupy.asarray),
            ("__dlpack__", cupy.from_dlpack),
        ):
            if hasattr(array, protocol):
                try:
                    with cupy.cuda.Device(self.index):
                        return read(array)
                except (BufferError, RuntimeError, TypeError, ValueError) as error:
                    raise TypeError(f"{name} cannot be read on device {self}: {error}") from None
        raise TypeError(f"{name} must be an array on device {self}, got {type(array).__name__}")

    def _from_torch(self, tensor: Any, name: str) -> Any:
        if tensor.device.type != "cuda":
            raise TypeError(
                f"{name} is a tensor on device {tensor.device}, the pool is on {self}: move it "
                f"with {name}.to({self.name!r})"
            )
        tensor = tensor.detach()
        dtype = FLOAT_DTYPES["bfloat16"]
        if str(tensor.dtype) != "torch.bfloat16":
            dtype = np.dtype(dtype_name(tensor.dtype))
        itemsize = dtype.itemsize
        # By address, not by DLPack: that would make streams wait for each other.
        memory = self._cupy.cuda.memory.UnownedMemory(
            tensor.data_ptr(), tensor.numel() * itemsize, tensor, tensor.device.index
        )
        strides = tuple(stride * itemsize for stride in tensor.stride())
        return self._ndarray(
            tuple(tensor.shape), dtype, self._cupy.cuda.MemoryPointer(memory, 0), strides
        )


def _import_cupy(wanted: str) -> ModuleType:
    try:
        import cupy
    except ImportError as error:
        raise ValueError(
            f"device {wanted!r} needs CuPy, which cannot be imported ({error}): {_INSTALL}"
        ) from None
    found: ModuleType = cupy
    return found


def _check_numba_cuda(wanted: str) -> None:
    # numba has a CUDA target of its own too, which is not the one that kernels are written for.
    try:
        found = find_spec("numba_cuda") is not None and find_spec("cuda.core") is not None
    except (ModuleNotFoundError, ValueError):
        found = False
    if not found:
        raise ValueError(f"device {wanted!r} needs numba-cuda, which is not installed: {_INSTALL}")


def check_rows(array: Any, name: str, index: int) -> None:
    """TypeError or ValueError unless an array is on this device, float, and contiguous at last."""
    _check_place(array, name, index)
    dtype = array.dtype
    if dtype.num not in _FLOAT_NUMBERS:
        raise TypeError(
            f"Invalid dtype of {name}: expected {', '.join(FLOAT_DTYPES)} or float64, got "
            f"{dtype_name(dtype)}"
        )
    if array.ndim and array.strides[-1] != dtype.itemsize and array.shape[-1] > 1:
        raise ValueError(
            f"the last dimension of {name} must be contiguous, got strides "
            f"{tuple(array.strides)} bytes for {dtype_name(dtype)}: pass a contiguous copy"
        )


def _check_place(array: Any, name: str, index: int) -> None:
    if array.data.device_id != index:
        raise TypeError(
            f"{name} is on device cuda:{array.data.device_id}, the pool on cuda:{index}: copy it "
            "there first"
        )
