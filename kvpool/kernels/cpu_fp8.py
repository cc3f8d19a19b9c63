"""CPU kernels that quantise rows to FP8 and back. The contract is in `kvpool.kernels`."""

from typing import Any

import numpy as np

from kvpool.kernels.codes import codes_view, quantise, stored_value
from kvpool.kernels.floats import bits_view, convert
from kvpool.kernels.jit import kernel
from kvpool.kernels.llvm import flat_row, prefetch
from kvpool.kernels.rows import ROWS_AHEAD, has_flat_rows, zero_row
from kvpool.kernels.threads import MIN_BYTES_TO_SHARE, share_rows

Array = np.ndarray[Any, Any]


# Called for each row, it would take as long as quantising some 60 elements.
@kernel(forceinline=True)
def _quantise_row(cache: Any, slot: Any, rows: Any, i: Any, scale: Any) -> Any:
    if has_flat_rows(rows):
        target, source = flat_row(cache, slot), flat_row(rows, i)
        for j in range(target.size):
            target[j] = quantise(source[j], scale, target[j])
    else:
        for h in range(cache.shape[1]):
            for j in range(cache.shape[2]):
                cache[slot, h, j] = quantise(rows[i, h, j], scale, cache[slot, h, j])


@kernel(forceinline=True)
def _dequantise_row(out: Any, i: Any, cache: Any, slot: Any, scale: Any) -> Any:
    if has_flat_rows(out):
        target, source = flat_row(out, i), flat_row(cache, slot)
        for j in range(target.size):
            target[j] = convert(stored_value(source[j], scale), target[j])
    else:
        for h in range(cache.shape[1]):
            for j in range(cache.shape[2]):
                value = stored_value(cache[slot, h, j], scale)
                out[i, h, j] = convert(value, out[i, h, j])


@kernel()
def _scatter_plane(cache: Any, rows: Any, slots: Any, num_slots: Any, scale: Any) -> Any:
    for i in range(slots.size):
        ahead = slots[min(i + ROWS_AHEAD, slots.size - 1)]
        prefetch(cache, ahead, 0, cache.shape[1])
        slot = slots[i]
        if 0 <= slot < num_slots:
            _quantise_row(cache, slot, rows, i, scale)


@kernel()
def _gather_plane(cache: Any, slots: Any, out: Any, scale: Any) -> Any:
    for i in range(slots.size):
        ahead = slots[min(i + ROWS_AHEAD, slots.size - 1)]
        prefetch(cache, ahead, 0, cache.shape[1])
        slot = slots[i]
        if 0 <= slot < cache.shape[0]:
            _dequantise_row(out, i, cache, slot, scale)
        else:
            zero_row(out, i)


@kernel()
def _scatter_fp8(
    k_cache: Any,
    v_cache: Any,
    k_rows: Any,
    v_rows: Any,
    slots: Any,
    num_slots: Any,
    k_scale: Any,
    v_scale: Any,
) -> Any:
    _scatter_plane(k_cache, k_rows, slots, num_slots, np.float32(k_scale))
    _scatter_plane(v_cache, v_rows, slots, num_slots, np.float32(v_scale))


@kernel()
def _gather_fp8(
    k_cache: Any, v_cache: Any, slots: Any, k_out: Any, v_out: Any, k_scale: Any, v_scale: Any
) -> Any:
    _gather_plane(k_cache, slots, k_out, np.float32(k_scale))
    _gather_plane(v_cache, slots, v_out, np.float32(v_scale))


def scatter_fp8(
    k_cache: Array,
    v_cache: Array,
    k_rows: Array,
    v_rows: Array,
    slots: Array,
    fp8_format: str,
    k_scale: float,
    v_scale: float,
    num_slots: int | None = None,
) -> None:
    """Quantise rows ``[n, heads, dim]`` to slots of FP8 cache layers.

    Parameters
    ----------
    k_cache, v_cache : ndarray ``[total_slots, heads, dim]``, uint8
        Cache layers, C-contiguous, written in place.
    k_rows, v_rows : ndarray, float32, float16, bfloat16 or float64
        Rows with any strides.
    slots : ndarray ``[n]``, int64 or int32
        Slot of each row; negative ones are skipped.
    fp8_format : str
        ``"float8_e4m3fn"`` or ``"float8_e5m2"``.
    k_scale, v_scale : float
        What rows are divided by, in float32.
    num_slots : int, optional
        Slots from here on are never written. Default: `total_slots`; larger values mean the same.
    """
    n = len(slots)
    if n == 0:
        return
    assert len(k_rows) == len(v_rows) == n
    total_slots = len(k_cache)
    limit = total_slots if num_slots is None or num_slots > total_slots else num_slots
    k_cache, v_cache = codes_view(k_cache, fp8_format), codes_view(v_cache, fp8_format)
    k_rows, v_rows = bits_view(k_rows), bits_view(v_rows)
    k_scale, v_scale = float(k_scale), float(v_scale)
    num_bytes = k_rows.nbytes + v_rows.nbytes
    if num_bytes < MIN_BYTES_TO_SHARE:
        _scatter_fp8(k_cache, v_cache, k_rows, v_rows, slots, limit, k_scale, v_scale)
        return
    by_row, settings = (k_rows, v_rows, slots), (limit, k_scale, v_scale)
    share_rows(_scatter_fp8, (k_cache, v_cache), by_row, settings, num_bytes)


def gather_fp8(
    k_cache: Array,
    v_cache: Array,
    slots: Array,
    fp8_format: str,
    k_scale: float,
    v_scale: float,
    k_out: Array,
    v_out: Array,
) -> None:
    """Read slots of FP8 cache layers into rows ``[n, heads, dim]``.

    Parameters
    ----------
    k_cache, v_cache : ndarray ``[total_slots, heads, dim]``, uint8
        Cache layers, C-contiguous.
    slots : ndarray ``[n]``, int64 or int32
        Slot of each row; negative ones, and those past the end, give zeros.
    fp8_format : str
        ``"float8_e4m3fn"`` or ``"float8_e5m2"``.
    k_scale, v_scale : float
        What decoded values are multiplied by, in float32.
    k_out, v_out : ndarray, float32, float16 or bfloat16
        Rows with any strides, written in place.
    """
    n = len(slots)
    if n == 0:
        return
    assert len(k_out) == len(v_out) == n
    k_cache, v_cache = codes_view(k_cache, fp8_format), codes_view(v_cache, fp8_format)
    k_out, v_out = bits_view(k_out), bits_view(v_out)
    k_scale, v_scale = float(k_scale), float(v_scale)
    num_bytes = k_out.nbytes + v_out.nbytes
    if num_bytes < MIN_BYTES_TO_SHARE:
        _gather_fp8(k_cache, v_cache, slots, k_out, v_out, k_scale, v_scale)
        return
    by_row, settings = (slots, k_out, v_out), (k_scale, v_scale)
    share_rows(_gather_fp8, (k_cache, v_cache), by_row, settings, num_bytes)
