"""UploadRing: small uploads to a CUDA device that neither wait nor overwrite what is in flight.

A copy from pinned memory returns before the device has read it. So each upload has a buffer of its
own, and an event that says when that is free again::

    host()      buffer 0      buffer 1      buffer 2      buffer 3      buffer 0 ...
                                                                        waits for the first event

By then the device is long done, as whoever uses a ring makes few uploads a step. On the device
there is one copy, which the next upload overwrites: work that reads it goes to the same stream,
between `send` and `release`. Where CuPy's current stream changes, the new one waits for the old.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kvpool.errors import KVCacheStateError

if TYPE_CHECKING:
    from kvpool.device.cuda import CudaDevice

NUM_BUFFERS = 4
LEAST_INTS = 1024


class UploadRing:
    """Uploads of int32 to one device, one after the other.

    The calls of one upload are `host`, `send` and `release`, in this order, with the device
    current. After a failure the next upload starts at `host` again.

    Parameters
    ----------
    device : CudaDevice
        Where the copies go.
    num_buffers : int
        Uploads that may be in flight.
    """

    __slots__ = (
        "_buffers",
        "_copy",
        "_cupy",
        "_device",
        "_events",
        "_last",
        "_next",
        "_num_ints",
        "_stream",
        "_to_device",
    )

    def __init__(self, device: CudaDevice, num_buffers: int = NUM_BUFFERS) -> None:
        cupy: Any = device.array_namespace
        self._device = device
        self._cupy = cupy
        self._to_device: int = cupy.cuda.runtime.memcpyHostToDevice
        self._buffers: list[NDArray[np.int32]] = [np.empty(0, np.int32)] * num_buffers
        with cupy.cuda.Device(device.index):
            self._events = [cupy.cuda.Event(disable_timing=True) for _ in range(num_buffers)]
        # Of the upload that was released last; recorded or not, a stream may wait for it.
        self._last: Any = self._events[0]
        self._copy: Any = None
        self._stream: Any = None
        self._next = 0
        self._num_ints = 0

    def __del__(self) -> None:
        # A buffer goes back to CuPy's pool, and to who asks next: not while the device reads it.
        # At the end of a process the driver may be gone first.
        with suppress(Exception):
            self.wait()

    def check(self) -> None:
        """KVCacheStateError in a graph capture, where nothing can be uploaded."""
        if self._device.is_capturing():
            raise KVCacheStateError(
                "a page table would be uploaded while the stream is in graph capture: prepare it "
                "before the capture, which reads its buffers, and before each replay"
            )

    def host(self, num_ints: int) -> NDArray[np.int32]:
        """A host buffer int32 ``[num_ints]`` of no defined content, to be filled and sent.

        Raises
        ------
        KVCacheStateError
            As `check`.
        """
        self.check()
        # Nothing to wait for, unless the host is a whole round ahead.
        self._events[self._next].synchronize()
        buffer = self._buffers[self._next]
        if buffer.shape[0] < num_ints:
            size = _room_for(num_ints)
            memory = self._cupy.cuda.alloc_pinned_memory(4 * size)
            buffer = self._buffers[self._next] = np.frombuffer(memory, np.int32, size)
        self._num_ints = num_ints
        return buffer[:num_ints]

    def send(self) -> int:
        """Copy what `host` gave, on CuPy's current stream; the address of the copy.

        It is there until the next upload, for work on this stream that is queued before `release`.
        """
        if self._copy is None or self._copy.shape[0] < self._num_ints:
            made = self._device.empty((_room_for(self._num_ints),), np.dtype(np.int32))
            self.wait()
            self._copy = made
        cuda = self._cupy.cuda
        stream = self._stream = cuda.get_current_stream(self._device.index)
        # Costs nothing on the stream of the last upload.
        stream.wait_event(self._last)
        address: int = self._copy.data.ptr
        source = self._buffers[self._next].ctypes.data
        num_bytes = 4 * self._num_ints
        cuda.runtime.memcpyAsync(address, source, num_bytes, self._to_device, stream.ptr)
        return address

    def release(self) -> None:
        """Say that all is queued that reads the copy; always, once `send` was called."""
        self._last = self._events[self._next]
        self._last.record(self._stream)
        self._next = (self._next + 1) % len(self._events)

    def wait(self) -> None:
        """Let the host wait until nothing reads a copy any more."""
        self._last.synchronize()


def _room_for(num_ints: int) -> int:
    """A size for a buffer that seldom has to grow."""
    return max(LEAST_INTS, 1 << (num_ints - 1).bit_length())
