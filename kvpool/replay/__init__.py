"""What prefix reuse gives on a trace: requests through the production bookkeeping, no tensors.

>>> from kvpool.replay import grid, replay
>>> report = replay("trace.jsonl", grid([1_000_000, None], [16, 64]))  # doctest: +SKIP
>>> [(str(found.cell), found.hit_rate) for found in report.results]  # doctest: +SKIP

A replay drives `RequestTable`, `RadixCache` and `PageAllocator` themselves; nothing of them is
modelled. Of tiers it asks the index that `HostTier` has. The file is read once for each cell and
once before, and never held as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from kvpool.replay.cell import Cell, grid
from kvpool.replay.fleet import Fleet, fleets
from kvpool.replay.losses import Loss
from kvpool.replay.options import Progress, ReplayOptions
from kvpool.replay.reader import TraceError
from kvpool.replay.results import CellResult, ReplayReport
from kvpool.replay.session import Replay

__all__ = [
    "Cell",
    "CellResult",
    "Fleet",
    "Loss",
    "Progress",
    "Replay",
    "ReplayOptions",
    "ReplayReport",
    "TraceError",
    "fleets",
    "grid",
    "replay",
]


def replay(
    trace: str | Path,
    cells: Iterable[Cell],
    *,
    on_progress: Callable[[Progress], None] | None = None,
    **options: Any,
) -> ReplayReport:
    """Replay a trace through every cell.

    Parameters
    ----------
    trace : str or Path
        A file of JSON lines, also through gzip; `kvpool.replay.lines` has the two formats.
    cells : iterable of Cell
        What to replay it through; `grid` makes every combination of sizes and policies.
    on_progress : callable, optional
        Called with a `Progress` about twenty times a second.
    **options
        Those of `ReplayOptions`: ``window=32, checkpoint=True, prompts_only=False,
        block_size=512, limit=None, strict=False, bound=True, explain=0, keep_matches=False``.

    Returns
    -------
    ReplayReport
        One result a cell, in order, and the unbounded ones beside them. `Replay` is the same for
        those who want what there is after an interrupt.

    Raises
    ------
    TraceError
        The file is missing, is no trace, or changed meanwhile; (strict) a line is malformed; or a
        pool needs more memory than there is.
    ValueError
        An option or a cell out of range.
    """
    return Replay(trace, cells, ReplayOptions(**options)).run(on_progress)
