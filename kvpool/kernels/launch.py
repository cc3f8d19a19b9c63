"""Compile a numba.cuda kernel once, keep it, launch it cheaply.

The kernels are Python functions whose parameters are all 8-byte integers: addresses, strides,
counts, bits of a scale. numba compiles them to PTX, and there its part ends. Its dispatcher would
inspect every argument of every launch and costs the host some 77 us for five arrays; handing plain
integers to the driver through ``cuda.core`` costs about one. Nor does it touch the stream: numba's
way of importing a CuPy array makes streams wait for each other, which a graph capture forbids.

Machine code is kept per device in the process, and per compute capability on disk, in
``KVPOOL_CACHE_DIR``, else in the user's cache folder. A cache that cannot be written costs a
second at the first use of each kernel, nothing else.

Under ``NUMBA_ENABLE_CUDASIM=1`` the same class runs the same function in numba's simulator.
"""

from __future__ import annotations

import re
import threading
import warnings
from collections.abc import Callable
from typing import Any

import numba
import numpy as np

from kvpool.kernels import code_cache

_ALL_BITS = 2**64 - 1

MAX_GRID_X = 2**31 - 1
MAX_GRID_YZ = 65_535
MAX_BLOCK = 1024

Shape = tuple[int, int, int]

_lock = threading.Lock()
_streams: dict[int, Any] = {}
# Only a program that makes streams without end fills this.
_MAX_STREAMS = 1024


class Kernel:
    """One kernel, for every device of the process.

    Parameters
    ----------
    function : callable
        The kernel as a Python function.
    num_params : int
        How many parameters it has; each is passed as 8 bytes, from a Python int.
    name : str
        Distinguishes it from all other kernels, those made by the same factory included.
    """

    def __init__(self, function: Callable[..., None], num_params: int, name: str) -> None:
        self.function = function
        self.num_params = num_params
        self.name = name
        self._loaded: dict[int, Any] = {}

    def __repr__(self) -> str:
        return f"Kernel({self.name!r}, {self.num_params} parameters)"

    def is_ready(self, device: int) -> bool:
        """Whether `bind` compiles and loads nothing for this device."""
        return device in self._loaded or simulating()

    def prepare(self, device: int) -> None:
        """Compile and load for a device, which is the current one, unless that was done."""
        if not self.is_ready(device):
            with _lock:
                if device not in self._loaded:
                    self._loaded[device] = self._load(device)

    def bind(self, device: int, grid: Shape, block: Shape) -> BoundKernel:
        """The kernel for a device and a shape, to be launched again and again.

        Parameters
        ----------
        device : int
            Ordinal of the device, which is the current one.
        grid, block : tuple of int
            Three sizes each.

        Raises
        ------
        ValueError
            A grid or block that no device takes.
        """
        check_shape(grid, block)
        if simulating():
            return SimulatedKernel(self, grid, block)
        self.prepare(device)
        return BoundKernel(self, device, grid, block)

    def _load(self, device: int) -> Any:
        core = _core()
        found = core.Device(device).compute_capability
        capability = (int(found.major), int(found.minor))
        code = code_cache.find(self.name, self.num_params, capability)
        if code is None:
            code = compile_code(self.function, self.num_params, capability)
            code_cache.keep(self.name, self.num_params, capability, code)
        make = core.ObjectCode.from_cubin if code.kind == "cubin" else core.ObjectCode.from_ptx
        return make(code.data).get_kernel(code.entry)


class BoundKernel:
    """A kernel with its grid and block, on one device."""

    __slots__ = ("_config", "_loaded", "block", "grid", "kernel")

    def __init__(self, kernel: Kernel, device: int, grid: Shape, block: Shape) -> None:
        self.kernel, self.grid, self.block = kernel, grid, block
        self._loaded = kernel._loaded[device]
        self._config = _core().LaunchConfig(grid=grid, block=block)

    def launch(self, stream: int, arguments: tuple[int, ...]) -> None:
        """Launch; returns before the kernel has run.

        Parameters
        ----------
        stream : int
            Handle of a stream of the device, 0 for the default one.
        arguments : tuple of int
            One for each parameter, in order.
        """
        try:
            core_stream = _streams[stream]
        except KeyError:
            core_stream = _wrap_stream(stream)
        _launch(core_stream, self._config, self._loaded, *arguments)


class SimulatedKernel(BoundKernel):
    """A kernel with its grid and block in numba's simulator."""

    __slots__ = ("_function",)

    def __init__(self, kernel: Kernel, grid: Shape, block: Shape) -> None:
        cuda = _numba_cuda()
        self.kernel, self.grid, self.block = kernel, grid, block
        self._function = cuda.jit(kernel.function)[grid, block]

    def launch(self, stream: int, arguments: tuple[int, ...]) -> None:
        """Run; there is one stream, and it is done when this returns."""
        with warnings.catch_warnings():
            # NumPy warns of addresses that wrap around, such as that of slot -1. It is not read.
            warnings.simplefilter("ignore", RuntimeWarning)
            self._function(*[np.uint64(argument & _ALL_BITS) for argument in arguments])


def compile_code(
    function: Callable[..., None], num_params: int, capability: tuple[int, int]
) -> code_cache.Code:
    """Compile a kernel for a compute capability; no device is needed.

    Parameters
    ----------
    function : callable
        The kernel.
    num_params : int
        Parameters, uint64 each.
    capability : tuple of int
        Major and minor, ``(9, 0)`` say.
    """
    entry, text = compile_ptx(function, num_params, capability)
    core = _core()
    try:
        options = core.ProgramOptions(arch=f"sm_{capability[0]}{capability[1]}")
        cubin = core.Program(text, "ptx", options).compile("cubin")
        return code_cache.Code("cubin", entry, bytes(cubin.code))
    except Exception:
        # A linker that is older than numba's compiler refuses its PTX. The driver translates it
        # too, and says what it does not like.
        return code_cache.Code("ptx", entry, text.encode())


def compile_ptx(
    function: Callable[..., None], num_params: int, capability: tuple[int, int]
) -> tuple[str, str]:
    """The first half of `compile_code`: the name of the entry point, and the PTX."""
    from numba import types

    ptx, _ = _numba_cuda().compile_ptx(function, (types.uint64,) * num_params, cc=capability)
    text = ptx.decode() if isinstance(ptx, bytes) else ptx
    found = re.search(r"\.visible \.entry (\w+)\(", text)
    if found is None:
        raise RuntimeError(f"the PTX of {function.__name__} has no entry point")
    return found.group(1), text


def check_shape(grid: Shape, block: Shape) -> None:
    """ValueError for a launch that no device takes: the driver would not say what is wrong."""
    limits = (MAX_GRID_X, MAX_GRID_YZ, MAX_GRID_YZ)
    if any(not 1 <= size <= limit for size, limit in zip(grid, limits, strict=True)):
        raise ValueError(f"grid {grid} is outside of 1 .. {limits}")
    threads = block[0] * block[1] * block[2]
    if min(block) < 1 or threads > MAX_BLOCK:
        raise ValueError(f"block {block} is outside of 1 .. {MAX_BLOCK} threads")


def simulating() -> bool:
    """Whether numba.cuda is the simulator, which runs kernels on NumPy arrays."""
    global _simulating
    if _simulating is None:
        _simulating = bool(getattr(numba.config, "ENABLE_CUDASIM", False))
    return _simulating


_simulating: bool | None = None


def _core() -> Any:
    import cuda.core

    return cuda.core


def _numba_cuda() -> Any:
    from numba import cuda

    return cuda


def _wrap_stream(stream: int) -> Any:
    if len(_streams) >= _MAX_STREAMS:
        _streams.clear()
    made = _streams[stream] = _core().Stream.from_handle(stream)
    return made


def _launch(stream: Any, config: Any, kernel: Any, *arguments: int) -> None:
    """Replace this function by the real one; ``cuda.core`` is loaded when something launches."""
    global _launch
    from cuda.core import launch

    _launch = launch
    launch(stream, config, kernel, *arguments)
