"""CPU kernels over NumPy arrays. The contract is in `kvpool.kernels`.

K and V are moved one after the other, within one call: in turns, four streams of equal alignment
collide. Kernels are serial, for numba's thread pool costs more than most calls (a put of one row
takes about a microsecond); a move of megabytes is shared by threads of our own, each with rows of
its own. Rows are copied element by element, which LLVM turns into vector moves; slice assignment
inside a kernel is several times slower. A few rows of the cache's own dtype, as a decode step has
them, need no kernel at all: `kvpool_ext.few_rows`.
"""

from typing import Any

import numpy as np

from kvpool.kernels.cpu_fp8 import gather_fp8, scatter_fp8
from kvpool.kernels.floats import bits_view, convert
from kvpool.kernels.jit import kernel
from kvpool.kernels.llvm import flat_row, prefetch
from kvpool.kernels.rows import ROWS_AHEAD, has_flat_rows, zero_row
from kvpool.kernels.streams import can_stream, finish_streams, stream_zeros
from kvpool.kernels.threads import MIN_BYTES_TO_SHARE, share_rows
from kvpool_ext.few_rows import scatter_few

__all__ = ["copy_slots", "gather", "gather_fp8", "scatter", "scatter_fp8", "zero"]

Array = np.ndarray[Any, Any]

# A kernel costs a microsecond before it starts, and prefetches: it pays off from twice as many
# bytes on.
FEW_BYTES = 1 << 17


# As a call with two arrays it would take 25 ns, a tenth of what moving a row of 2 KB takes.
@kernel(forceinline=True)
def _copy_row(target: Any, target_index: Any, source: Any, source_index: Any) -> Any:
    if has_flat_rows(target) and has_flat_rows(source):
        target_row = flat_row(target, target_index)
        source_row = flat_row(source, source_index)
        for j in range(target_row.size):
            target_row[j] = convert(source_row[j], target_row[j])
    else:
        for h in range(target.shape[1]):
            for j in range(target.shape[2]):
                value = source[source_index, h, j]
                target[target_index, h, j] = convert(value, target[target_index, h, j])


@kernel()
def _scatter_plane(cache: Any, rows: Any, slots: Any, num_slots: Any) -> Any:
    for i in range(slots.size):
        ahead = slots[min(i + ROWS_AHEAD, slots.size - 1)]
        prefetch(cache, ahead, 0, cache.shape[1])
        slot = slots[i]
        if 0 <= slot < num_slots:
            _copy_row(cache, slot, rows, i)


@kernel()
def _gather_plane(cache: Any, slots: Any, out: Any) -> Any:
    for i in range(slots.size):
        ahead = slots[min(i + ROWS_AHEAD, slots.size - 1)]
        prefetch(cache, ahead, 0, cache.shape[1])
        slot = slots[i]
        if 0 <= slot < cache.shape[0]:
            _copy_row(out, i, cache, slot)
        else:
            zero_row(out, i)


@kernel()
def _scatter(
    k_cache: Any, v_cache: Any, k_rows: Any, v_rows: Any, slots: Any, num_slots: Any
) -> Any:
    _scatter_plane(k_cache, k_rows, slots, num_slots)
    _scatter_plane(v_cache, v_rows, slots, num_slots)


@kernel()
def _gather(k_cache: Any, v_cache: Any, slots: Any, k_out: Any, v_out: Any) -> Any:
    _gather_plane(k_cache, slots, k_out)
    _gather_plane(v_cache, slots, v_out)


@kernel()
def _zero_plane(cache: Any, slots: Any, is_large: Any) -> Any:
    for layer in range(cache.shape[0]):
        cache_layer = cache[layer]
        is_streamed = is_large and can_stream(cache_layer)
        for i in range(slots.size):
            slot = slots[i]
            if 0 <= slot < cache.shape[1]:
                row = flat_row(cache_layer, slot)
                if is_streamed:
                    stream_zeros(row)
                else:
                    for j in range(row.size):
                        row[j] = 0
    if is_large:
        finish_streams()


@kernel()
def _zero(k_cache: Any, v_cache: Any, slots: Any, is_large: Any) -> Any:
    _zero_plane(k_cache, slots, is_large)
    _zero_plane(v_cache, slots, is_large)


@kernel()
def _copy_slots(cache: Any, source_slots: Any, target_slots: Any) -> Any:
    total_slots = cache.shape[1]
    for layer in range(cache.shape[0]):
        cache_layer = cache[layer]
        for i in range(source_slots.size):
            source, target = source_slots[i], target_slots[i]
            if 0 <= source < total_slots and 0 <= target < total_slots:
                source_row = flat_row(cache_layer, source)
                target_row = flat_row(cache_layer, target)
                for j in range(target_row.size):
                    target_row[j] = source_row[j]


def scatter(
    k_cache: Array,
    v_cache: Array,
    k_rows: Array,
    v_rows: Array,
    slots: Array,
    num_slots: int | None = None,
) -> None:
    """Write rows ``[n, heads, dim]`` to slots of cache layers ``[total_slots, heads, dim]``.

    Parameters
    ----------
    k_cache, v_cache : ndarray, float32, float16 or bfloat16
        Cache layers, C-contiguous, written in place.
    k_rows, v_rows : ndarray, float32, float16, bfloat16 or float64
        Rows with any strides.
    slots : ndarray ``[n]``, int64 or int32
        Slot of each row; negative ones are skipped.
    num_slots : int, optional
        Slots from here on are never written. Default: `total_slots`; larger values mean the same.
    """
    n = len(slots)
    if n == 0:
        return
    assert len(k_rows) == len(v_rows) == n
    total_slots = len(k_cache)
    limit = total_slots if num_slots is None or num_slots > total_slots else num_slots
    num_bytes = k_rows.nbytes + v_rows.nbytes
    # Where it copies nothing, the kernel looks again: so a warm-up, to slot -1, compiles it.
    if num_bytes < FEW_BYTES and scatter_few(k_cache, v_cache, k_rows, v_rows, slots, limit):
        return
    k_cache, v_cache = bits_view(k_cache), bits_view(v_cache)
    k_rows, v_rows = bits_view(k_rows), bits_view(v_rows)
    if num_bytes < MIN_BYTES_TO_SHARE:
        _scatter(k_cache, v_cache, k_rows, v_rows, slots, limit)
        return
    share_rows(_scatter, (k_cache, v_cache), (k_rows, v_rows, slots), (limit,), num_bytes)


def gather(k_cache: Array, v_cache: Array, slots: Array, k_out: Array, v_out: Array) -> None:
    """Read slots of cache layers ``[total_slots, heads, dim]`` into rows ``[n, heads, dim]``.

    Parameters
    ----------
    k_cache, v_cache : ndarray, float32, float16 or bfloat16
        Cache layers, C-contiguous.
    slots : ndarray ``[n]``, int64 or int32
        Slot of each row; negative ones, and those past the end, give zeros.
    k_out, v_out : ndarray, float32, float16 or bfloat16
        Rows with any strides, written in place.
    """
    n = len(slots)
    if n == 0:
        return
    assert len(k_out) == len(v_out) == n
    k_cache, v_cache = bits_view(k_cache), bits_view(v_cache)
    k_out, v_out = bits_view(k_out), bits_view(v_out)
    num_bytes = k_out.nbytes + v_out.nbytes
    if num_bytes < MIN_BYTES_TO_SHARE:
        _gather(k_cache, v_cache, slots, k_out, v_out)
        return
    share_rows(_gather, (k_cache, v_cache), (slots, k_out, v_out), (), num_bytes)


def zero(k_cache: Array, v_cache: Array, slots: Array) -> None:
    """Zero ``slots [n]`` on every layer of both caches ``[layers, total_slots, heads, dim]``.

    Parameters
    ----------
    k_cache, v_cache : ndarray, float32, float16, bfloat16 or uint8
        Caches, C-contiguous, written in place.
    slots : ndarray ``[n]``, int64 or int32
        Slots; those outside of the caches are skipped.
    """
    n = len(slots)
    if n == 0:
        return
    k_cache, v_cache = bits_view(k_cache), bits_view(v_cache)
    num_bytes = (k_cache.nbytes + v_cache.nbytes) // k_cache.shape[1] * n
    if num_bytes < MIN_BYTES_TO_SHARE:
        _zero(k_cache, v_cache, slots, False)
        return
    if len(k_cache) > n:  # there are more layers to share than slots
        share_rows(_zero, (), (k_cache, v_cache), (slots, True), num_bytes)
        return
    share_rows(_zero, (k_cache, v_cache), (slots,), (True,), num_bytes)


def copy_slots(k_cache: Array, v_cache: Array, source_slots: Array, target_slots: Array) -> None:
    """Copy slots on every layer of both caches ``[layers, total_slots, heads, dim]``.

    Parameters
    ----------
    k_cache, v_cache : ndarray, float32, float16, bfloat16 or uint8
        Caches, C-contiguous, changed in place.
    source_slots, target_slots : ndarray, int64 or int32
        ``[n]`` each; a pair with a slot outside of the caches is skipped.
    """
    assert len(source_slots) == len(target_slots)
    if len(source_slots) == 0:
        return
    _copy_slots(bits_view(k_cache), source_slots, target_slots)
    _copy_slots(bits_view(v_cache), source_slots, target_slots)
