"""A stand-in for torch and its CUDA side, over the arrays of `tests.fakes.cupy_like`.

`install()` puts it where ``import torch`` finds it. Tensors are views of host memory; they say on
which device they are, and refuse to mix. Streams are handles: which one torch is on, and which it
captures, is in `State`, beside CuPy's own in `cupy_like.State`. What a capture forbids fails here
as there.
"""

from __future__ import annotations

import sys
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace

import ml_dtypes
import numpy as np

from tests.fakes import cupy_like
from tests.fakes.cupy_like import forbid_in_capture


class State:
    """torch's side of the calling thread."""

    device = 0
    stream = 0
    # The handle that torch captures on, where that is not simply CuPy's current one.
    captures = None
    syncs: list = []  # noqa: RUF012  events waited for, by the number of their records
    exports = 0


def reset():
    """As at the start of a process."""
    State.device = State.stream = State.exports = 0
    State.captures, State.syncs = None, []


def current_stream_is_capturing():
    """Whether torch's current stream is in graph capture."""
    if State.captures is not None:
        return State.stream == State.captures
    return cupy_like.State.capturing and State.stream == cupy_like.State.stream


class dtype:
    """``torch.dtype``: one object each."""

    def __init__(self, name, numpy):
        self.name, self.numpy = name, np.dtype(numpy)

    def __repr__(self):
        return f"torch.{self.name}"


PLAIN = ("float32", "float16", "float64", "int16", "int32", "int64", "uint8")
DTYPES = {
    made.name: made
    for made in (
        *map(dtype, PLAIN, PLAIN),
        dtype("bfloat16", ml_dtypes.bfloat16),
        dtype("float8_e4m3fn", ml_dtypes.float8_e4m3fn),
        dtype("float8_e5m2", ml_dtypes.float8_e5m2),
    )
}


class Tensor:
    """A tensor: a host array in the dtype that its bytes have, and where it says that it is."""

    __hash__ = object.__hash__

    def __init__(self, host, kind, device, owner=None):
        self.host, self.dtype, self._owner = host, kind, owner
        name, _, index = str(device).partition(":")
        self.device = Device(name, int(index or 0))

    def _like(self, host):
        return Tensor(host, self.dtype, self.device, self._owner)

    @property
    def shape(self):
        return Size(self.host.shape)

    @property
    def ndim(self):
        return self.host.ndim

    @property
    def is_cuda(self):
        return self.device.type == "cuda"

    def get_device(self):
        return self.device.index if self.is_cuda else -1

    def stride(self, dim=None):
        strides = tuple(stride // self.host.itemsize for stride in self.host.strides)
        return strides if dim is None else strides[dim]

    def is_contiguous(self):
        return self.host.flags.c_contiguous

    def data_ptr(self):
        return self.host.ctypes.data

    def numel(self):
        return self.host.size

    def element_size(self):
        return self.host.itemsize

    def detach(self):
        return self

    def __len__(self):
        return len(self.host)

    def __getitem__(self, index):
        return self._like(self.host[index])

    def view(self, *how):
        if isinstance(how[0], dtype):
            assert how[0].numpy.itemsize == self.host.itemsize
            return Tensor(self.host.view(how[0].numpy), how[0], self.device, self._owner)
        assert self.is_contiguous(), "view() needs contiguous memory"
        shape = how[0] if isinstance(how[0], tuple) else how
        return self._like(self.host.reshape(shape))

    def copy_(self, source, non_blocking=False):
        """Copies between devices too, which a capture forbids from pageable host memory."""
        if source.device.type != self.device.type:
            forbid_in_capture("upload")
        assert source.shape == self.shape
        self.host[...] = source.host
        return self

    def to(self, device, non_blocking=False):
        if str(device) == str(self.device):
            return self
        forbid_in_capture("upload" if str(device) != "cpu" else "download")
        assert str(device) != "cpu", "a download: the host would wait for the device"
        return Tensor(self.host.copy(), self.dtype, device)

    def new_empty(self, shape):
        return empty(shape, dtype=self.dtype, device=self.device)

    def numpy_float(self):
        """The values as float64, for the arithmetic of fakes and of tests."""
        return self.host.astype(np.float64)

    def __repr__(self):
        return f"tensor({self.host!r}, device={self.device}, dtype={self.dtype})"


class Size(tuple):
    """``torch.Size``."""

    __slots__ = ()


class Device:
    """``torch.device``."""

    def __init__(self, kind, index=0):
        self.type, self.index = kind, index

    def __str__(self):
        return self.type if self.type == "cpu" else f"{self.type}:{self.index}"

    def __eq__(self, other):
        return str(self) == str(other)

    __hash__ = None


def from_dlpack(array):
    """A view; the arrays of the stand-in for CuPy are on a CUDA device."""
    State.exports += 1
    if isinstance(array, np.ndarray):
        assert array.flags.writeable, "NumPy refuses to export a read-only array"
        host, device, owner = array, "cpu", array
    else:
        host, device, owner = array.host, f"cuda:{array.data.device_id}", array
        assert State.stream == cupy_like.State.stream, "an export would make streams wait"
    kinds = [kind for kind in DTYPES.values() if kind.numpy == host.dtype]
    carried = [kind for kind in kinds if kind.numpy.kind in "iuf"]  # no dtype of ml_dtypes
    if not carried or host.dtype.name.startswith("float8"):
        raise BufferError(f"DLPack has no {host.dtype}")
    return Tensor(host, carried[0], device, owner)


def _made(function):
    def make(shape, *, dtype, device="cpu", pin_memory=False):
        if str(device) != "cpu" or pin_memory:
            forbid_in_capture("allocation")
        shape = shape if isinstance(shape, tuple) else (shape,)
        # Aligned as torch's allocators do.
        raw = np.zeros(int(np.prod(shape)) * dtype.numpy.itemsize + 64, np.uint8)
        start = -raw.ctypes.data % 64
        host = raw[start : start + raw.size - 64].view(dtype.numpy).reshape(shape)
        function(host)
        return Tensor(host, dtype, device)

    return make


def _garbage(host):
    host.view(np.uint8)[...] = 0xA5  # memory that nobody wrote


zeros = _made(lambda host: None)
empty = _made(_garbage)


def empty_like(tensor):
    return empty(tuple(tensor.shape), dtype=tensor.dtype, device=tensor.device)


class Event:
    """``torch.cuda.Event``: remembers what it was recorded behind."""

    def __init__(self):
        self.records = 0

    def record(self):
        assert not current_stream_is_capturing(), "an event recorded in a capture"
        self.records += 1

    def synchronize(self):
        forbid_in_capture("synchronise")
        State.syncs.append(self.records)


@contextmanager
def _stream(stream):
    before = State.stream, State.device
    State.stream, State.device = stream.cuda_stream, stream.index
    try:
        yield
    finally:
        State.stream, State.device = before


def _handle(pointer, index):
    return SimpleNamespace(cuda_stream=pointer, index=index)


def module(capability=(9, 0)):
    """A module that can stand for ``torch``."""
    made = ModuleType("torch")
    made.__version__ = "2.11.0 (fake)"
    made.Tensor, made.dtype, made.Size = Tensor, dtype, Size
    made.is_tensor = lambda found: isinstance(found, Tensor)
    made.from_dlpack, made.zeros, made.empty = from_dlpack, zeros, empty
    made.empty_like = empty_like
    for name, kind in DTYPES.items():
        setattr(made, name, kind)
    made.cuda = SimpleNamespace(
        Event=Event,
        ExternalStream=lambda pointer, device: _handle(pointer, device),
        current_device=lambda: State.device,
        current_stream=lambda: _handle(State.stream, State.device),
        default_stream=lambda index: _handle(0, index),
        empty_cache=lambda: None,
        get_device_properties=lambda index: SimpleNamespace(
            major=capability[0], minor=capability[1], multi_processor_count=132
        ),
        is_available=lambda: True,
        is_current_stream_capturing=current_stream_is_capturing,
        is_initialized=lambda: True,
        stream=_stream,
    )
    return made


def install(monkeypatch, **options):
    """Put it in torch's place for one test, and return it."""
    reset()
    made = module(**options)
    monkeypatch.setitem(sys.modules, "torch", made)
    return made
