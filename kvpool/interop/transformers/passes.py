"""ForwardPass: what is the same for all layers of one forward of the model.

It writes K and V of the pass to the pool, and reads those of all columns so far: in place where
the slots of a single row follow each other, else into one buffer for all layers.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kvpool.dtypes import FLOAT_DTYPES, dtype_name
from kvpool.interop.torch import Tensor, import_torch, pool_tensors, tensor_of
from kvpool.interop.transformers.rows import BatchRows

if TYPE_CHECKING:
    from kvpool.pool import KVCachePool


class ReadBuffer:
    """Memory that K and V of one layer are read into, and the next layer's after it.

    A read into new memory costs several times the copy, and a model has done with K and V of a
    layer before it comes to the next.
    """

    def __init__(self, pool: KVCachePool) -> None:
        self._pool = pool
        self._dtype = FLOAT_DTYPES[pool.compute_dtype]
        self._k = self._v = pool.device.empty((0,), self._dtype)

    def views(self, num_rows: int, length: int) -> tuple[Any, Any]:
        """K and V, each ``[num_rows, length, num_kv_heads, head_dim]``, of no defined content."""
        pool = self._pool
        shape = (num_rows, length, pool.num_kv_heads, pool.head_dim)
        size = num_rows * length * pool.num_kv_heads * pool.head_dim
        if size > self._k.size:
            # A quarter more than now, so that a decode does not allocate at each step.
            room = (size + size // 4,)
            self._k = pool.device.empty(room, self._dtype)
            self._v = pool.device.empty(room, self._dtype)
        return self._k[:size].reshape(shape), self._v[:size].reshape(shape)


class ForwardPass:
    """Columns ``[past, end)`` of all rows.

    Tokens that a row has already, because another row of the batch had a shorter match, are
    computed with the rest, and not written: their pages are read-only, and others may read them.

    Parameters
    ----------
    rows : BatchRows
        With pages up to `end`.
    past, end : int
        Columns, half-open.
    buffer : ReadBuffer
        Where to read to.
    """

    def __init__(self, rows: BatchRows, past: int, end: int, buffer: ReadBuffer) -> None:
        self.past, self.end = past, end
        self._step = step = rows.step
        pads, num_columns = rows.pads, end - past
        starts = [
            max(past - pad, matched) for pad, matched in zip(pads, rows.matched, strict=True)
        ]
        counts = [max(end - pad - start, 0) for pad, start in zip(pads, starts, strict=True)]
        # A row that writes nothing may start anywhere.
        self._starts = [start * (count > 0) for start, count in zip(starts, counts, strict=True)]
        self._qo_indptr: list[int] | None = None
        # Rows of K and V, by their place in the pass, that are written: None for all of them.
        self._written: Tensor = None
        if min(counts) < num_columns:
            self._qo_indptr = [0, *np.cumsum(counts).tolist()]
            is_written = np.arange(num_columns) >= num_columns - np.array(counts)[:, None]
            written = import_torch().from_numpy(np.flatnonzero(is_written))
            self._written = written.to(str(rows.pool.device))
        self._writes = any(counts)
        if self._writes:
            self._write_slots = step.window_slot_indices(self._starts, counts)
        self._read_slots = self._columns(pads)
        # Of each layer, if K and V are read in place: made for all of them in one call of torch.
        self._in_place: list[tuple[Tensor, Tensor]] | None = None
        place = slots_in_a_row(rows.pool, self._read_slots) if len(pads) == 1 else None
        if place is None:
            self._out = buffer.views(len(pads), end)
            self._found = tuple(tensor_of(array).transpose(1, 2) for array in self._out)
        else:
            tensors = pool_tensors(rows.pool)
            k, v = (
                cache[:, None, place].transpose(2, 3).unbind()
                for cache in (tensors.key_cache, tensors.value_cache)
            )
            self._in_place = [*zip(k, v, strict=True)]

    def _columns(self, pads: list[int]) -> Any:
        """Slots of columns ``[0, end)`` of each row, int64 on the device; padding reads zeros."""
        end, least = self.end, min(pads)
        slots = self._step.slot_indices(end - least)
        if max(pads) == 0:
            return slots
        slots = slots.reshape(len(pads), end - least)
        found = slots[:, :1].repeat(end, axis=1)
        for row, pad in enumerate(pads):
            found[row, :pad] = -1
            found[row, pad:] = slots[row, : max(end - pad, 0)]
        return found.reshape(-1)

    def update(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Write K and V of the pass, ``[rows, heads, end - past, head_dim]``, and read all.

        Returns
        -------
        tuple of Tensor
            K and V of columns ``[0, end)``, ``[rows, heads, end, head_dim]`` in the dtype of `k`.
            They stay as they are until the next update of any layer.
        """
        if self._writes:
            self._write(layer, k.transpose(1, 2), v.transpose(1, 2))
        found_k, found_v = self.read(layer)
        if found_k.dtype != k.dtype:
            found_k, found_v = found_k.to(k.dtype), found_v.to(k.dtype)
        return found_k, found_v

    def read(self, layer: int) -> tuple[Tensor, Tensor]:
        """K and V of columns ``[0, end)`` of a layer, in the compute dtype of the pool."""
        if self._in_place is not None:
            return self._in_place[layer]
        # Padded: where columns are padding, a row has fewer positions than there are columns.
        self._step.get(layer, self.end, padded=True, slots=self._read_slots, out=self._out)
        k, v = self._found
        return k, v

    def _write(self, layer: int, k: Tensor, v: Tensor) -> None:
        if self._written is not None:
            k, v = (rows.flatten(0, 1).index_select(0, self._written) for rows in (k, v))
        if k.device.type == "cpu":
            k, v = array_of(k), array_of(v)
        self._step.put(
            layer, self._starts, k, v, qo_indptr=self._qo_indptr, slots=self._write_slots
        )


def slots_in_a_row(pool: KVCachePool, slots: Any) -> slice | None:
    """The slots ``[n]`` of one request as a slice, if K and V there can be read in place.

    One chat on a pool of its own has its pages in a row, and reading them is then free. Not where
    the pool is FP8, which is decoded, nor in poison mode, where a read is checked; on a GPU the
    host does not look at slots.
    """
    if pool.device.kind != "cpu" or pool.fp8_format is not None or pool.read_guard() is not None:
        return None
    if not slots.size or slots[0] < 0 or (np.diff(slots) != 1).any():
        return None
    return slice(int(slots[0]), int(slots[-1]) + 1)


def array_of(tensor: Tensor) -> NDArray[Any]:
    """A CPU tensor of floats as an array over its memory, in a tenth of what DLPack takes."""
    tensor = tensor.detach()
    if tensor.dtype == import_torch().bfloat16:
        found: NDArray[Any] = tensor.view(import_torch().int16).numpy()
        return found.view(FLOAT_DTYPES["bfloat16"])
    found = tensor.numpy()
    return found


@functools.cache
def _float_dtypes() -> frozenset[Any]:
    return frozenset(getattr(import_torch(), name) for name in FLOAT_DTYPES)


def check_kv(layer: int, k: Tensor, v: Tensor, expected: tuple[int, ...]) -> None:
    """ValueError for K and V that are not ``[rows, heads, tokens, head_dim]`` as `expected`."""
    if k.shape == v.shape == expected and {k.dtype, v.dtype} <= _float_dtypes():
        return
    for name, given in (("key_states", k), ("value_states", v)):
        if given.shape != expected or dtype_name(given.dtype) not in FLOAT_DTYPES:
            raise ValueError(
                f"Invalid {name} of layer {layer}: expected {list(expected)} of "
                f"{', '.join(FLOAT_DTYPES)}, got {list(given.shape)} of {dtype_name(given.dtype)}"
            )
