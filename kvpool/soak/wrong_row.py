"""What a wrong row is: whose page it lies on, and whose row it is instead."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kvpool.soak.bound import KEYS, Bound
from kvpool.soak.finding import Finding
from kvpool.soak.lineage import Lineage

if TYPE_CHECKING:
    from kvpool.soak.stage import Stage

_SIDES = ("K", "V")


def wrong_row(
    stage: Stage,
    bound: Bound,
    layer: int,
    side: int,
    position: int,
    row: NDArray[Any],
    values: NDArray[Any],
) -> Finding:
    """The finding of a row that is not what was written.

    Parameters
    ----------
    stage : Stage
        Where it was read.
    bound : Bound
        Whose it should be.
    layer, side, position : int
        Which: `side` is 0 for K, 1 for V.
    row : ndarray
        What was read, ``[heads * head_dim]``.
    values : ndarray
        Row elements by their code, in the dtype of `row`.
    """
    expected = values[bound.lineage.codes(layer, position, position + 1)[side, 0]].tolist()
    details = (
        f"{_where(stage, bound, layer, position)}: expected {expected}, got {row.tolist()}, "
        f"{whose(stage, row, values)}"
    )
    return Finding(f"a wrong row of {_SIDES[side]}", details)


def stale_row(
    stage: Stage,
    bound: Bound,
    layer: int,
    side: int,
    position: int,
    row: NDArray[Any],
    values: NDArray[Any],
) -> Finding:
    """The finding of a row that must be zeros, as nobody wrote it; arguments as `wrong_row`."""
    details = (
        f"{_where(stage, bound, layer, position)}: written by nobody since the page was entered, "
        f"expected zeros, got {row.tolist()}, {whose(stage, row, values)}"
    )
    return Finding(f"stale bits of {_SIDES[side]}", details)


def _where(stage: Stage, bound: Bound, layer: int, position: int) -> str:
    pages = stage.pool.request(bound.request_id).page_ids
    page = int(pages[position // stage.page_size])
    key = KEYS[bound.lineage.key]
    return (
        f"request {bound.request_id} (#{bound.handle}"
        f"{'' if key is None else f', extra_key {key!r}'}), position {position}, layer {layer}, "
        f"page {page} ({stage.pool.page_owner(page)})"
    )


def whose(stage: Stage, row: NDArray[Any], values: NDArray[Any]) -> str:
    """Words for where a row belongs."""
    as_float = row.astype(np.float32) if row.dtype != np.uint8 else row
    if not as_float.any():
        return "zeros: never written, or taken back"
    if np.isnan(as_float).any():
        return "NaN: poison, or never written"
    wanted = row.view(f"u{row.itemsize}")
    for handle, lineage in candidates(stage):
        for layer in range(stage.shape.num_layers):
            rows = values[lineage.codes(layer, 0, lineage.made)].view(wanted.dtype)
            sides, positions = np.nonzero((rows == wanted).all(axis=2))
            if sides.size:
                state = "bound" if handle in stage.bound else "ended"
                return (
                    f"which is {_SIDES[sides[0]]} of #{handle} ({state}), position "
                    f"{positions[0]}, layer {layer}"
                )
    return "which is no row of any request that is remembered"


def candidates(stage: Stage) -> list[tuple[int, Lineage]]:
    """Requests whose rows are known, the bound ones first."""
    bound = [(handle, found.lineage) for handle, found in stage.bound.items()]
    return [*bound, *reversed(stage.past)]
