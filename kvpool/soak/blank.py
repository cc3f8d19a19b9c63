"""Blank positions: where nobody wrote, entered pages are zeros, as a kernel reads whole pages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kvpool.soak.wrong_row import stale_row

if TYPE_CHECKING:
    from kvpool.soak.bound import Bound
    from kvpool.soak.stage import Stage


def look_at_blank(stage: Stage, bound: Bound, pages: NDArray[np.int32]) -> None:
    """Look into the buffers, at the pages that a request entered since the last look.

    Parameters
    ----------
    stage : Stage
        Whose pool.
    bound : Bound
        The request.
    pages : ndarray
        int32 ``[n]``, all its pages.

    Raises
    ------
    Finding
        A position that nobody wrote is not zeros.
    """
    end, size = stage.rounded(bound.entered), stage.page_size
    # The first of them may be a page that was entered before, and was partly written.
    first = stage.whole(bound.looked_at)
    for layer in range(stage.shape.num_layers):
        start = max(first, bound.ends[layer])
        if start >= end:
            continue
        positions = np.arange(start, end)
        slots = pages[positions // size].astype(np.int64) * size + positions % size
        where = stage.pool.device.to_device(slots)
        for side, name in enumerate(("key", "value")):
            cache = getattr(stage.pool, f"{name}_layer")(layer)
            text = f"held(pool.{name}_layer({layer}), {bound.request_id}, {start}, {end})"
            rows = stage.to_host(cache[where])
            expect_blank(stage, bound, (layer, side, start), rows, text, stage.code.stored)


def expect_blank(
    stage: Stage,
    bound: Bound,
    place: tuple[int, int, int],
    rows: NDArray[Any],
    text: str,
    values: NDArray[Any],
) -> None:
    """Finding unless all bits of `rows` are zero.

    Parameters
    ----------
    stage : Stage
        Whose pool.
    bound : Bound
        The request.
    place : tuple of int
        Layer, side (0 for K, 1 for V) and the position of the first row.
    rows : ndarray
        ``[n, heads, head_dim]``.
    text : str
        How a script spells `rows`.
    values : ndarray
        Row elements by their code, in the dtype of `rows`.
    """
    stage.rows_read += len(rows)
    bits = rows.view(np.dtype(f"u{values.itemsize}"))
    if not bits.any():
        return
    i = int(np.argmax(bits.reshape(len(rows), -1).any(axis=1)))
    stage.calls.say(f"blank({text})")
    layer, side, start = place
    raise stale_row(stage, bound, layer, side, start + i, rows[i].ravel(), values)
