"""A stand-in for CuPy: arrays in host memory that only mix with their own kind.

`install()` puts it where ``import cupy`` finds it. Like CuPy, its arrays refuse to become NumPy
arrays unless asked with ``get()``, and its functions refuse NumPy arrays, so code that confuses
host and device fails here as it would on a GPU. Addresses are those of host memory, which is what
kernels under numba's simulator read and write. There are two devices, which share it.
Streams and uploads are those of `tests.fakes.cupy_streams`.
"""

from __future__ import annotations

import ctypes
import sys
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace

import numpy as np

from tests.fakes import cupy_streams as streams
from tests.fakes.cupy_streams import CUDARuntimeError, State, forbid_in_capture

NUM_DEVICES = 2


class Memory:
    """Memory that an array is in, kept alive by its owner."""

    def __init__(self, owner, device_id, ptr=0, size=0):
        self.owner, self.device_id, self.ptr, self.size = owner, device_id, ptr, size


class MemoryPointer:
    """``ndarray.data``."""

    def __init__(self, memory, ptr):
        self.mem, self.ptr, self.device_id = memory, ptr, memory.device_id


def unwrap(value):
    """The host array inside a device array; NumPy arrays are refused, as CuPy does."""
    if isinstance(value, ndarray):
        return value.host
    if isinstance(value, np.ndarray) and value.ndim:
        raise TypeError(f"Unsupported type {type(value)}")
    if isinstance(value, (tuple, list)):
        return type(value)(unwrap(each) for each in value)
    if isinstance(value, slice):
        return slice(*map(unwrap, (value.start, value.stop, value.step)))
    return value


def wrap(value):
    """A device array around a host array, scalars included: CuPy's are arrays of no dimension."""
    if isinstance(value, (np.ndarray, np.generic)):
        return ndarray._of(np.asarray(value))
    if isinstance(value, tuple):
        return tuple(map(wrap, value))
    return value


class ndarray:
    """A device array."""

    __array_priority__ = 100
    __hash__ = None

    def __init__(self, shape, dtype=float, memptr=None, strides=None):
        assert memptr is not None, "made by the functions of the module, or over foreign memory"
        memory = (ctypes.c_uint8 * memptr.mem.size).from_address(memptr.ptr)
        self.host = np.ndarray(shape, np.dtype(dtype), memory, 0, strides)
        self.data = memptr

    @classmethod
    def _of(cls, host, device_id=None):
        made = object.__new__(cls)
        made.host = host
        index = State.device if device_id is None else device_id
        made.data = MemoryPointer(Memory(host, index), host.ctypes.data)
        return made

    def __array__(self, *_, **__):
        raise TypeError("Implicit conversion to a NumPy array is not allowed")

    def __array_ufunc__(self, ufunc, method, *inputs, **options):
        if "out" in options:
            options["out"] = unwrap(options["out"])
        result = getattr(ufunc, method)(*map(unwrap, inputs), **options)
        return wrap(result)

    def __getattr__(self, name):
        if name.startswith("__") or name == "host":
            raise AttributeError(name)
        found = getattr(self.host, name)
        if callable(found):
            return lambda *args, **kw: self._like(
                found(*map(unwrap, args), **{k: unwrap(v) for k, v in kw.items()})
            )
        return self._like(found)

    def _like(self, value):
        if isinstance(value, (np.ndarray, np.generic)):
            return ndarray._of(np.asarray(value), self.data.device_id)
        return value

    def __getitem__(self, index):
        return self._like(self.host[unwrap(index)])

    def __setitem__(self, index, value):
        self.host[unwrap(index)] = unwrap(value)

    def __len__(self):
        return len(self.host)

    def __bool__(self):
        return bool(self.host)

    def __int__(self):
        return int(self.host)

    def __float__(self):
        return float(self.host)

    def __iter__(self):
        return (self[i] for i in range(len(self)))

    def __repr__(self):
        return f"cupy_like.{self.host!r}"

    @property
    def device(self):
        return SimpleNamespace(id=self.data.device_id)

    @property
    def __cuda_array_interface__(self):
        return {**self.host.__array_interface__, "version": 3}

    def get(self):
        assert not State.capturing, "a download during capture"
        return self.host.copy()

    def set(self, host):
        forbid_in_capture("upload")
        assert type(host) is np.ndarray, "set() takes a host array"
        self.host[...] = host


def _operator(name):
    def apply(self, *others):
        found = getattr(self.host, name)(*map(unwrap, others))
        if found is self.host:  # in place
            return self
        return found if found is NotImplemented else self._like(found)

    return apply


_OPERATORS = """
add sub mul truediv floordiv mod pow matmul and or xor lshift rshift
radd rsub rmul rtruediv rmatmul rpow rand ror
iadd isub imul itruediv iand ior ilshift irshift
eq ne lt le gt ge neg abs invert
"""
for _name in _OPERATORS.split():
    setattr(ndarray, f"__{_name}__", _operator(f"__{_name}__"))


class Device:
    """``cupy.cuda.Device``: a context that makes a device the current one."""

    compute_capability = "90"

    def __init__(self, index=None):
        self.id = State.device if index is None else index

    def __enter__(self):
        self.before, State.device = State.device, self.id
        return self

    def __exit__(self, *_):
        State.device = self.before

    def synchronize(self):
        forbid_in_capture("synchronise")


def _empty_pool():
    State.emptied += 1


def _set_device(index):
    State.device = index


@contextmanager
def capture():
    """What ``stream.begin_capture()`` .. ``end_capture()`` makes of the current stream."""
    State.capturing, State.events = True, []
    try:
        yield
    finally:
        State.capturing = False


def _asarray(value, dtype=None):
    if isinstance(value, ndarray):
        return value if dtype is None else value.astype(dtype)
    forbid_in_capture("upload")
    return ndarray._of(np.array(value, dtype))


def _maker(function):
    def make(*args, **options):
        forbid_in_capture("allocation")
        return ndarray._of(function(*args, **options))

    return make


def _delegate(name):
    function = getattr(np, name)
    if not callable(function) or isinstance(function, type):
        return function
    return lambda *args, **options: wrap(
        function(*map(unwrap, args), **{key: unwrap(value) for key, value in options.items()})
    )


def module():
    """A module that can stand for ``cupy``."""
    streams.forget_uploads()
    made = ModuleType("cupy")
    made.__version__ = "14.0.0 (fake)"
    made.ndarray = ndarray
    made.asarray = made.array = _asarray
    for name in ("zeros", "empty", "ones", "full", "arange"):
        setattr(made, name, _maker(getattr(np, name)))
    made.get_default_memory_pool = lambda: SimpleNamespace(free_all_blocks=_empty_pool)
    made.cuda = SimpleNamespace(
        Device=Device,
        MemoryPointer=lambda memory, offset: MemoryPointer(memory, memory.ptr + offset),
        memory=SimpleNamespace(
            UnownedMemory=lambda ptr, size, owner, device_id: Memory(owner, device_id, ptr, size)
        ),
        get_current_stream=lambda index=None: streams.Stream(State.stream),
        Event=streams.Event,
        alloc_pinned_memory=streams.alloc_pinned_memory,
        runtime=SimpleNamespace(
            CUDARuntimeError=CUDARuntimeError,
            getDevice=lambda: State.device,
            setDevice=_set_device,
            getDeviceCount=lambda: NUM_DEVICES,
            memGetInfo=lambda: (State.free, State.total),
            streamIsCapturing=lambda stream: State.capturing,
            memcpyAsync=streams.memcpy_async,
            memcpyHostToDevice=1,
        ),
    )
    made.__getattr__ = _delegate
    return made


# `kvpool.kernels.dense_attention` finds the namespace of an array by the module of its class.
ndarray.__module__ = "cupy"


def install():
    """Make ``import cupy`` give this module, and return it."""
    sys.modules["cupy"] = made = module()
    return made
