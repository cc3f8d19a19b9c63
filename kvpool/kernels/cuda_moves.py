"""How rows go to and from the layers of a CUDA cache: which kernel, with which parameters.

That follows from shapes, strides, dtypes and alignment. It is a *plan*, worked out once and found
again by these: layers of a pool share their plans, and so do the steps of a batch size. What a
call still does is read the addresses of its arrays.

Arrays are anything with CuPy's ``data.ptr``, ``data.device_id``, ``shape``, ``strides`` in bytes
and ``dtype``.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

from kvpool.device.context import (
    compute_capability,
    current_stream,
    enter_device,
    is_capturing,
    leave_device,
    stream_if_current,
)
from kvpool.device.cuda import check_rows
from kvpool.dtypes import dtype_name
from kvpool.errors import KVCacheStateError
from kvpool.kernels import cuda_kernels as kernels
from kvpool.kernels.cuda_geometry import launch_shape
from kvpool.kernels.cuda_scales import divisor_words, scale_bits
from kvpool.kernels.cuda_units import FP8_DTYPES, unit_for
from kvpool.kernels.launch import BoundKernel, Kernel, simulating

Array = Any
# Ordinal of the device, kernel, arguments, and what must live until it is launched.
Launch = tuple[int, BoundKernel, tuple[int, ...], Any]

# A program that never repeats a shape fills this, and starts anew.
MAX_PLANS = 4096


class Plan(NamedTuple):
    """What launches of the same shapes have in common.

    Attributes
    ----------
    kernel : BoundKernel
        The variant, loaded, with its grid and block.
    strides : tuple of int
        Parameters between the addresses of the rows and those of the caches.
    counts : tuple of int
        Rows, slots and units: the parameters after the address of the slots.
    """

    kernel: BoundKernel
    strides: tuple[int, ...]
    counts: tuple[int, int, int]


_plans: dict[Any, Plan | None] = {}
_forms: dict[Any, int] = {}


class Move:
    """Scatters to, or gathers from, one pair of cache layers ``[total_slots, heads, dim]``.

    It holds what does not change from call to call: make one per layer and keep it.

    Parameters
    ----------
    verb : str
        ``"scatter"`` or ``"gather"``.
    k_cache, v_cache : array
        The layers.
    fp8_format : str, optional
        What their bytes are, if they are uint8.
    k_scale, v_scale : float
        FP8 scales.
    num_slots : int, optional
        Slots from here on are left alone. Default: all are there.
    """

    __slots__ = ("_caches", "_fp8_format", "_num_slots", "_scales", "_verb", "form", "index", "to")

    def __init__(
        self,
        verb: str,
        k_cache: Array,
        v_cache: Array,
        fp8_format: str | None = None,
        k_scale: float = 1.0,
        v_scale: float = 1.0,
        num_slots: int | None = None,
    ) -> None:
        total_slots, heads, dim = k_cache.shape
        head_bytes = dim * k_cache.dtype.itemsize
        self.index = k_cache.data.device_id
        k_to, v_to = k_cache.data.ptr, v_cache.data.ptr
        self.to = (k_to, v_to, heads * head_bytes, head_bytes)
        self._verb, self._fp8_format = verb, fp8_format
        self._caches = ((k_cache, k_scale), (v_cache, v_scale))
        limit = total_slots if num_slots is None else num_slots
        self._num_slots = min(total_slots, limit)
        self._scales: tuple[int, ...] = ()
        if fp8_format is not None and verb == "scatter":
            self._scales = divisor_words(k_scale) + divisor_words(v_scale)
        elif fp8_format is not None:
            self._scales = (scale_bits(k_scale), scale_bits(v_scale))
        # A number for all that plans depend on: layers of a pool share it, and it hashes quickly.
        form: tuple[Any, ...] = (verb, fp8_format, self.index, self._num_slots)
        form += ((k_to | v_to) & 15, k_cache.shape, v_cache.shape, k_cache.dtype, v_cache.dtype)
        self.form = _forms.setdefault(form, len(_forms))

    def prepare(self, slots: Array, k_rows: Array, v_rows: Array) -> tuple[Launch, ...]:
        """The launches for these rows, of one shape; nothing runs yet.

        Parameters
        ----------
        slots : array ``[n]``, int64 or int32
            Slots of the rows.
        k_rows, v_rows : array ``[n, heads, dim]`` or ``[batch, seqlen, heads, dim]``
            Rows, whose last dimension is contiguous.

        Raises
        ------
        TypeError, ValueError
            Rows on another device, of another dtype, or not contiguous in the last dimension.
        KVCacheStateError
            A kernel must be compiled, and the stream is in graph capture.
        """
        k_memory, v_memory = k_rows.data, v_rows.data
        k_from, v_from = k_memory.ptr, v_memory.ptr
        key = (
            self.form,
            k_memory.device_id,
            v_memory.device_id,
            k_rows.shape,
            k_rows.strides,
            v_rows.strides,
            k_rows.dtype.num,
            v_rows.dtype.num,
            slots.dtype.num,
            # Two addresses or-ed are aligned as the worse of them.
            (k_from | v_from) & 15,
        )
        try:
            plan = _plans[key]
        except KeyError:
            plan = _remember(key, self._plan(slots, k_rows, v_rows))
        if plan is None:
            return self._one_by_one(slots, k_rows, v_rows)
        kernel, strides, counts = plan
        arguments = (
            k_from,
            v_from,
            *strides,
            *self.to,
            slots.data.ptr,
            *counts,
            *self._scales,
        )
        return ((self.index, kernel, arguments, None),)

    def _plan(self, slots: Array, k_rows: Array, v_rows: Array) -> Plan | None:
        """The plan, None for no rows, or where one launch cannot take K and V as they are."""
        (k_cache, _), (v_cache, _) = self._caches
        check_rows(k_rows, "k", self.index)
        check_rows(v_rows, "v", self.index)
        n = len(slots)
        same = k_cache.dtype == v_cache.dtype and k_rows.dtype == v_rows.dtype
        k_strides, v_strides = row_strides(k_rows), row_strides(v_rows)
        if not (n and same and k_cache.shape == v_cache.shape and k_strides and v_strides):
            return None
        _, heads, dim = k_cache.shape
        assert k_rows.shape[-2:] == (heads, dim)
        strides = (k_strides[0], v_strides[0], k_strides[1], v_strides[1])
        row_bits = k_rows.data.ptr | v_rows.data.ptr | strides[0] | strides[1]
        k_to, v_to, slot_bytes, head_bytes = self.to
        stored_bits = k_to | v_to | slot_bytes
        if heads == 1 or strides[2:] == (dim * k_rows.dtype.itemsize,) * 2:
            # Heads without gaps are one long head.
            outer, elements = 1, heads * dim
        else:
            outer, elements = heads, dim
            row_bits |= strides[2] | strides[3]
            stored_bits |= head_bytes
        rows = dtype_name(k_rows.dtype)
        stored = self._fp8_format or dtype_name(k_cache.dtype)
        unit = unit_for(rows, stored, row_bits, stored_bits, elements)
        hardware = has_fp8_hardware(self.index)
        spec = spec_of_move(self._verb, rows, stored, slots.dtype.itemsize, unit, hardware)
        units = elements // unit
        grid, block = launch_shape(n, units, outer, spec.rows_per_thread)
        counts = (n, self._num_slots, units)
        kernel = ready(spec, self.index).bind(self.index, grid, block)
        return Plan(kernel, strides, counts)

    def _one_by_one(self, slots: Array, k_rows: Array, v_rows: Array) -> tuple[Launch, ...]:
        """A launch for K and one for V, each of them in both places; copies what has no rows."""
        launches: tuple[Launch, ...] = ()
        if len(slots) == 0:
            return launches
        for (layer, scale), rows in zip(self._caches, (k_rows, v_rows), strict=True):
            if row_strides(rows) is None:
                if is_capturing(current_stream(self.index)):
                    raise KVCacheStateError(
                        f"rows with strides {rows.strides} would be copied while the stream is in "
                        "graph capture: pass rows that are evenly spaced"
                    )
                rows = rows.reshape(-1, *rows.shape[-2:])
            move = Move(self._verb, layer, layer, self._fp8_format, scale, scale, self._num_slots)
            # A copy must not be freed, and its memory given to the next one, before the launch.
            launches += tuple((*launch[:3], rows) for launch in move.prepare(slots, rows, rows))
        return launches


def row_strides(rows: Array) -> tuple[int, int] | None:
    """Bytes from row to row and from head to head; None where rows are not evenly spaced."""
    shape, strides = rows.shape, rows.strides
    if len(shape) == 3 or shape[1] == 1:
        return strides[0], strides[-2]
    if shape[0] == 1 or strides[0] == shape[1] * strides[1]:
        return strides[1], strides[2]
    return None


def run(launches: tuple[Launch, ...]) -> None:
    """Launch on CuPy's current stream of the device."""
    for index, kernel, arguments, _ in launches:
        stream = stream_if_current(index)
        if stream >= 0:
            kernel.launch(stream, arguments)
            continue
        before = enter_device(index)
        try:
            kernel.launch(current_stream(index), arguments)
        finally:
            leave_device(before)


def ready(spec: kernels.KernelSpec, index: int) -> Kernel:
    """The kernel of a variant, compiled and loaded for a device.

    Raises
    ------
    KVCacheStateError
        That must be done yet, and the current stream is in graph capture.
    """
    kernel = _kernel(spec)
    if not kernel.is_ready(index):
        before = enter_device(index)
        try:
            if is_capturing(current_stream(index)):
                raise KVCacheStateError(
                    f"kernel {spec.name} is not compiled yet, and the stream is in graph capture, "
                    "where nothing can be: call pool.warm_up() before the capture"
                )
            kernel.prepare(index)
        finally:
            leave_device(before)
    return kernel


def spec_of_move(
    verb: str, rows: str, stored: str, slot_bytes: int, unit: int, hardware: bool
) -> kernels.KernelSpec:
    """The variant that moves rows of a dtype to or from caches of a storage dtype."""
    if stored in FP8_DTYPES:
        if verb == "scatter":
            return kernels.scatter_fp8(rows, stored, slot_bytes, unit, hardware)
        return kernels.gather_fp8(stored, rows, slot_bytes, unit, hardware)
    if verb == "scatter":
        return kernels.scatter(rows, stored, slot_bytes, unit)
    return kernels.gather(stored, rows, slot_bytes, unit)


@cache
def has_fp8_hardware(index: int) -> bool:
    """Whether a device converts to FP8 and back by itself."""
    # The simulator has twins of both ways; the integer one is what a CPU does too.
    return not simulating() and compute_capability(index) >= kernels.FP8_HARDWARE


@cache
def _kernel(spec: kernels.KernelSpec) -> Kernel:
    return Kernel(spec.function, len(spec.parameters), spec.name)


def _remember(key: Any, plan: Plan | None) -> Plan | None:
    if len(_plans) >= MAX_PLANS:
        _plans.clear()
    _plans[key] = plan
    return plan
