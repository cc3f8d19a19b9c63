"""The stream of a pool and the stream of torch: one and the same, or torch is told.

A pool works on CuPy's current stream. What torch or FlashInfer launches for it must be ordered
with that, so it goes to the same stream; no event is recorded, for a capture would forbid it.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from kvpool.device import Device
from kvpool.device.context import current_stream, is_capturing
from kvpool.errors import KVCacheStateError

_NOTHING: AbstractContextManager[Any] = nullcontext()


def in_capture(torch: Any, device: Device) -> bool:
    """Whether the pool's stream or torch's, which may be another, is in graph capture."""
    if device.kind != "cuda":
        return False
    index = device.index  # type: ignore[attr-defined]
    return is_capturing(current_stream(index)) or bool(torch.cuda.is_current_stream_capturing())


class TorchStream:
    """Brings torch to the device and the stream that a pool works on.

    Parameters
    ----------
    torch : module
        torch.
    device : Device
        The pool's. On a CPU there are no streams.
    """

    def __init__(self, torch: Any, device: Device) -> None:
        self._cuda = torch.cuda
        self._index: int | None = getattr(device, "index", None)
        self._known: dict[int, Any] = {}

    def joined(self) -> AbstractContextManager[Any]:
        """A context in which torch is where the pool is; it does nothing if it is there already.

        Raises
        ------
        KVCacheStateError
            torch's stream is in graph capture and the pool's is another, which is not: the work
            would be missing in the graph.
        """
        if self._index is None:
            return _NOTHING
        cuda, pointer = self._cuda, current_stream(self._index)
        if cuda.current_device() == self._index:
            theirs = cuda.current_stream().cuda_stream
            if theirs == pointer:
                return _NOTHING
            if cuda.is_current_stream_capturing() and not is_capturing(pointer):
                raise KVCacheStateError(
                    f"torch captures stream {theirs:#x}, but the pool works on CuPy's stream "
                    f"{pointer:#x}, which is not captured: enter cupy.cuda.ExternalStream("
                    "torch.cuda.current_stream().cuda_stream) inside of the capture"
                )
        return cuda.stream(self._stream(pointer))  # type: ignore[no-any-return]

    def _stream(self, pointer: int) -> Any:
        stream = self._known.get(pointer)
        if stream is None:
            if len(self._known) >= 64:  # streams come and go, and their handles with them
                self._known.clear()
            # The default stream has no handle to speak of: torch makes an object for it itself.
            stream = self._known[pointer] = (
                self._cuda.ExternalStream(pointer, device=self._index)
                if pointer
                else self._cuda.default_stream(self._index)
            )
        return stream
