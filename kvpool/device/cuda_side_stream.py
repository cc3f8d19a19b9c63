"""CudaSideStream: a non-blocking stream for copies in the background, on a CUDA device.

It has run against a stand-in for CuPy only, never on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from kvpool.device.side_stream import SideStream

if TYPE_CHECKING:
    from kvpool.device.cuda import CudaDevice


class CudaSideStream(SideStream):
    """As `SideStream`, with a stream.

    Parameters
    ----------
    device : CudaDevice
        Where the copies run.
    """

    needs_marks = True

    def __init__(self, device: CudaDevice) -> None:
        self._cupy: Any = device.array_namespace
        self._device, self._index = device, device.index
        with self._cupy.cuda.Device(self._index):
            self._stream = self._cupy.cuda.Stream(non_blocking=True)

    def mark(self) -> Any:
        """An event, recorded on the calling thread's current stream; None in a graph capture."""
        cuda = self._cupy.cuda
        if self._device.is_capturing():
            return None
        with cuda.Device(self._index):
            event = cuda.Event(disable_timing=True)
            event.record(cuda.get_current_stream(self._index))
        return event

    @contextmanager
    def after(self, mark: Any) -> Iterator[None]:
        """A block on the side stream, behind `mark`; the host waits for it at the end."""
        with self._cupy.cuda.Device(self._index), self._stream:
            if mark is not None:
                self._stream.wait_event(mark)
            try:
                yield
            finally:
                # Also if a copy failed: what was queued before it may still run.
                self._stream.synchronize()
