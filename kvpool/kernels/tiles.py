"""The steps of attention over one tile of keys; `kvpool.kernels.attention` puts them together."""

from typing import Any

import numpy as np

from kvpool.kernels.codes import stored_value
from kvpool.kernels.jit import kernel
from kvpool.kernels.llvm import prefetch
from kvpool.kernels.products import LANES, ROWS, block_product

# Sums may be reordered and fused; infinities and NaN keep their meaning.
REASSOCIATE = {"reassoc", "contract", "nsz"}


@kernel()
def round_up(number: Any, multiple: Any) -> Any:
    """Return the smallest multiple that is not less than `number`."""
    return (number + multiple - 1) // multiple * multiple


@kernel()
def product(c: Any, rows: Any, a: Any, transposed: Any, b: Any, length: Any, add: Any) -> Any:
    """Set the first `rows` rows of `c` to those of ``a @ b``, or add them; see `block_product`."""
    for lane in range(0, c.shape[1], LANES):
        for row in range(0, rows, ROWS):
            a_row, a_column = (0, row) if transposed else (row, 0)
            block_product(c, row, lane, a, a_row, a_column, transposed, b, length, add)


@kernel()
def exp2(x: Any) -> Any:
    """Return 2**x (float32) for x <= 0, within 2 ulp; 0 below -126, NaN for NaN."""
    # No fastmath here: adding and taking away this number rounds to an integer, and must not be
    # simplified.
    shifter = np.float32(12582912.0)
    bounded = np.float32(-127.0) if x < np.float32(-127.0) else x
    shifted = np.float32(bounded + shifter)
    whole = np.float32(shifted - shifter)
    f = np.float32(bounded - whole)
    p = np.float32(1.5403530e-4)
    p = np.float32(p * f + np.float32(1.3333558e-3))
    p = np.float32(p * f + np.float32(9.6181291e-3))
    p = np.float32(p * f + np.float32(5.5504109e-2))
    p = np.float32(p * f + np.float32(2.4022651e-1))
    p = np.float32(p * f + np.float32(6.9314718e-1))
    p = np.float32(p * f + np.float32(1.0))
    exponent = np.uint32(np.uint32(shifted.view(np.uint32) + np.uint32(127)) << np.uint32(23))
    scaled = np.float32(p * exponent.view(np.float32))
    return np.float32(0.0) if x < np.float32(-126.0) else scaled


@kernel()
def load_tile(
    tile: Any, cache: Any, head: Any, pages: Any, page_size: Any, start: Any, end: Any, scale: Any
) -> Any:
    """Widen one head of positions [start, end) of the row on these `pages` to `tile`.

    FP8 codes are multiplied by `scale`.
    """
    position = start
    while position < end:
        page = position // page_size
        page_start = page * page_size
        page_end = min(end, page_start + page_size)
        first_slot = np.int64(pages[page]) * page_size - page_start
        for p in range(position, page_end):
            for d in range(cache.shape[2]):
                tile[p - start, d] = stored_value(cache[first_slot + p, head, d], scale)
        position = page_end


@kernel()
def prefetch_ahead(
    cache: Any, head: Any, pages: Any, page_size: Any, start: Any, end: Any, ahead: Any
) -> Any:
    """Prefetch one head of positions [start + ahead, end + ahead), as far as there are pages.

    The processor follows a stream of lines, but not from page to page, and hardly over the gaps
    between the rows of one head.
    """
    for position in range(start + ahead, min(end + ahead, pages.size * page_size)):
        page = position // page_size
        prefetch(cache, np.int64(pages[page]) * page_size + position - page * page_size, head, 1)


@kernel(fastmath=REASSOCIATE)
def is_finite(tile: Any, num_keys: Any) -> Any:
    """Return whether the first `num_keys` rows hold neither infinities nor NaN."""
    check = np.float32(0.0)
    for j in range(num_keys):
        for d in range(tile.shape[1]):
            # Finite values add 0 and others NaN, without a branch.
            check += tile[j, d] * np.float32(0.0)
    return check == np.float32(0.0)


@kernel()
def mask(scores: Any, num_keys: Any, start: Any, visible: Any) -> Any:
    """Hide from lane m the keys at positions ``visible[m]`` and up; the tile begins at `start`."""
    for j in range(num_keys):
        # What a lane sees never shrinks from lane to lane, so the masked ones come first.
        for m in range(np.searchsorted(visible, start + j, "right")):
            scores[j, m] = np.float32(-np.inf)


@kernel(fastmath=REASSOCIATE)
def weigh(scores: Any, num_keys: Any, peaks: Any, sums: Any, decay: Any, shift: Any) -> Any:
    """Turn scores ``[keys, lanes]`` into weights, and update each lane's peak, sum and decay."""
    # The inner loops run over a width that LLVM does not know: it would unroll a constant one into
    # scalars instead of vectorising it.
    width = scores.shape[1]
    lowest = np.float32(-np.inf)
    for m in range(width):
        decay[m] = peaks[m]
    for j in range(num_keys):
        for m in range(width):
            peaks[m] = max(peaks[m], scores[j, m])
    for m in range(width):
        # A lane that has seen nothing yet must not subtract infinity from infinity.
        shift[m] = peaks[m] if peaks[m] > lowest else np.float32(0.0)
        decay[m] = exp2(decay[m] - shift[m])
        sums[m] *= decay[m]
    for j in range(num_keys):
        for m in range(width):
            weight = exp2(scores[j, m] - shift[m])
            scores[j, m] = weight
            sums[m] += weight
