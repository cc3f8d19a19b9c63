"""StepReading: K and V of a step as arrays, and the slots that they are read from."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvpool.numbers import INT32_MAX, whole_number
from kvpool.step.rows import StepBase


class StepReading(StepBase):
    """Calls of a step that read positions from 0 on."""

    def get(
        self,
        layer: int,
        length: int,
        *,
        padded: bool = False,
        slots: Any = None,
        out: tuple[Any, Any] | None = None,
    ) -> tuple[NDArray[Any], NDArray[Any]]:
        """Read K and V of positions ``[0, length)`` of every row.

        Parameters
        ----------
        layer : int
            Layer index.
        length : int
            Positions of each row.
        padded : bool
            Let rows shorter than `length` repeat their last slot; mask those positions.
        slots : array, optional
            int64 or int32 ``[batch * length]`` on the device, from `slot_indices`.
        out : tuple of array, optional
            ``(k, v)`` to read into, contiguous, of the shape and dtype that is returned. A large
            read into new memory costs several times the copy.

        Returns
        -------
        tuple of array
            ``(k, v)``, each ``[batch, length, num_kv_heads, head_dim]`` in the compute dtype, new
            arrays or `out`. What this layer has not written reads as zeros.

        Raises
        ------
        KVCacheExhaustedError
            `length` past a row's capacity, without `padded`.
        ValueError, TypeError
            `out` of another shape, dtype or device, not contiguous, read-only, twice the same
            array, or a view of the pool.
        """
        try:
            self._enter()
            storage = self._storage
            layer = storage.check_layer(layer)
            length = whole_number(length, "length", 0, INT32_MAX)
            if padded:
                self._check_padded(length)
            else:
                self._check_lengths(self._rows.positions(length, "length"))
            if slots is None:
                found = self._rows.slot_indices(length, True)
                slots = storage.device.to_device(found)
            else:
                slots = self._check_slots(slots, self.batch_size * length)
            shape = (self.batch_size, length, *storage.row_shape)
            if out is None:
                k, v = storage.read(layer, slots)
                return k.reshape(shape), v.reshape(shape)
            flat = (self.batch_size * length, *storage.row_shape)
            k, v = (self._checked_out(array, shape) for array in out)
            if k is v:
                raise ValueError("out must be two arrays, for K and for V, got one twice")
            storage.check_foreign(k, v, verb="get fills")
            storage.read(layer, slots, (k.reshape(flat), v.reshape(flat)))
            return out
        finally:
            self._gate.leave()

    def slot_indices(self, length: int) -> NDArray[np.int64]:
        """Slots of positions ``[0, length)`` of every row, int64 ``[batch * length]``.

        They are on the device, for side caches that share allocation, reuse and eviction with K
        and V. Positions past a row's capacity repeat its last slot: mask them. For a `put` take
        `window_slot_indices`.
        """
        try:
            self._enter()
            length = whole_number(length, "length", 0, INT32_MAX)
            self._check_padded(length)
            return self._storage.device.to_device(self._rows.slot_indices(length, False))
        finally:
            self._gate.leave()

    def _check_padded(self, length: int) -> None:
        """ValueError where a length is none that any row could have: it sizes what is made."""
        if length > self._storage.num_slots:
            raise ValueError(
                f"length must be at most {self._storage.num_slots}, all slots of the pool, "
                f"got {length}"
            )

    def _checked_out(self, array: Any, shape: tuple[int, ...]) -> NDArray[Any]:
        found = self._storage.device.asarray(array, "out")
        dtype = self._storage.dtype.compute_type
        if found.shape != shape or found.dtype != dtype or not found.flags.c_contiguous:
            raise ValueError(
                f"Invalid out: expected contiguous {list(shape)} of {dtype}, got "
                f"{list(found.shape)} of {found.dtype} with strides {list(found.strides)}"
            )
        if not getattr(found.flags, "writeable", True):
            raise ValueError("out is read-only")
        return found
