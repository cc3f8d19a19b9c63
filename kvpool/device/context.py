"""Device, thread and stream of a launch, which knows its device by the ordinal.

CuPy is asked, and asked anew at every call. It is not imported here: whoever has an array to
launch on has loaded it, through `kvpool.device.cuda`.
"""

from __future__ import annotations

import sys
from threading import get_ident
from typing import Any

_threads: dict[int, int] = {}


def stream_if_current(index: int) -> int:
    """`current_stream` if the device is the calling thread's already, else -1. Quick."""
    cuda = sys.modules["cupy"].cuda
    if cuda.runtime.getDevice() != index or _threads.get(index) != get_ident():
        return -1
    return cuda.get_current_stream(index).ptr  # type: ignore[no-any-return]


def enter_device(index: int) -> int:
    """Make a device the calling thread's; the ordinal of the one that was, -1 if it was already.

    Its result is what `leave_device` wants.
    """
    runtime = _cuda().runtime
    current: int = runtime.getDevice()
    # Even if it is current: a context is bound to a thread by this call, and a launch needs one.
    runtime.setDevice(index)
    _threads[index] = get_ident()
    return -1 if current == index else current


def leave_device(entered_from: int) -> None:
    """Go back to the device that was current before `enter_device`."""
    if entered_from >= 0:
        _cuda().runtime.setDevice(entered_from)


def current_stream(index: int) -> int:
    """The handle of CuPy's current stream on a device."""
    return _cuda().get_current_stream(index).ptr  # type: ignore[no-any-return]


def is_capturing(stream: int) -> bool:
    """Whether a stream is in graph capture."""
    return bool(_cuda().runtime.streamIsCapturing(stream))


def compute_capability(index: int) -> tuple[int, int]:
    """Compute capability of a device, major and minor."""
    digits = str(_cuda().Device(index).compute_capability)
    return int(digits[:-1]), int(digits[-1])


def _cuda() -> Any:
    # Whoever has arrays to launch on has CuPy loaded.
    return sys.modules["cupy"].cuda
