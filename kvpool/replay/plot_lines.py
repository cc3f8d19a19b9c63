"""The lines of a replay's picture: which cells make one, against what, and its name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from kvpool.numbers import counted
from kvpool.replay.cell import Cell
from kvpool.replay.fleet import Fleet
from kvpool.replay.results import CellResult, ReplayReport


@dataclass(frozen=True)
class Axis:
    """What a picture is drawn against.

    Attributes
    ----------
    label : str
        Below the axis.
    place_of : callable
        Where a cell stands; None: nowhere, and it is in no line.
    without : callable
        A cell's fleet without what the axis shows: cells that are equal then make one line.
    """

    label: str
    place_of: Callable[[Cell], int | None]
    without: Callable[[Fleet], Fleet]


@dataclass(frozen=True)
class Line:
    """Cells that differ in their place only.

    Attributes
    ----------
    page_size : int
        Of all of them.
    policy : str
        What their pools evict first.
    fleet : Fleet
        Their instances, and the tiers that are not on the axis.
    label : str
        Its name among the other lines.
    points : tuple of two lists
        Places on the axis, growing, and the hit rate of each.
    """

    page_size: int
    policy: str
    fleet: Fleet
    label: str
    points: tuple[list[int], list[float | None]]


_CAPACITY = Axis("capacity in tokens", lambda cell: cell.capacity, lambda fleet: fleet)
_POOLS = replace(_CAPACITY, label="capacity of each instance in tokens")
_TIERS = (
    Axis(
        "store of all instances in tokens",
        lambda cell: cell.fleet.remote_tier or None,
        lambda fleet: replace(fleet, remote_tier=None),
    ),
    Axis(
        "host tier of each instance in tokens",
        lambda cell: cell.fleet.host_tier or None,
        lambda fleet: replace(fleet, host_tier=None),
    ),
)


def axis_of(report: ReplayReport) -> Axis:
    """The capacity, unless all pools have one and a tier has several sizes."""
    cells = [result.cell for result in report.results if result.cell.capacity is not None]
    if len({cell.capacity for cell in cells}) < 2:
        for axis in _TIERS:
            if len({axis.place_of(cell) for cell in cells} - {None}) > 1:
                return axis
    return _POOLS if any(cell.fleet.instances > 1 for cell in cells) else _CAPACITY


def lines_of(report: ReplayReport, axis: Axis) -> list[Line]:
    """Every line, its points by their place; interrupted cells and empty ones are left out."""
    found: dict[tuple[int, str, Fleet], list[CellResult]] = {}
    for result in report.results:
        cell = result.cell
        is_known = result.hit_rate is not None and result.complete
        if cell.capacity is not None and axis.place_of(cell) is not None and is_known:
            key = cell.page_size, cell.policy, axis.without(cell.fleet)
            found.setdefault(key, []).append(result)
    keys = list(found)
    return [
        Line(*key, _label(key, keys, axis), _points(results, axis))
        for key, results in found.items()
    ]


def _points(results: Sequence[CellResult], axis: Axis) -> tuple[list[int], list[float | None]]:
    placed = sorted((axis.place_of(result.cell) or 0, i) for i, result in enumerate(results))
    return [place for place, _ in placed], [results[i].hit_rate for _, i in placed]


def _label(key: tuple[int, str, Fleet], keys: Sequence[tuple[int, str, Fleet]], axis: Axis) -> str:
    """What tells a line from the others; the page size also where nothing has to."""
    page_size, policy, fleet = key
    page_sizes, policies, fleets = (len(set(values)) for values in zip(*keys, strict=True))
    names = [f"page size {page_size}"] if page_sizes > 1 or policies == fleets == 1 else []
    names += [policy] if policies > 1 else []
    return ", ".join(names + ([_name(fleet, axis)] if fleets > 1 else []))


def _name(fleet: Fleet, axis: Axis) -> str:
    """A fleet in words, without the tier that the axis shows."""
    shown = {"host tier": fleet.host_tier, "shared store": fleet.remote_tier}
    if axis in _TIERS:
        del shown["host tier" if axis is _TIERS[1] else "shared store"]
    parts = [counted(fleet.instances, "instance")]
    parts += [fleet.route] if fleet.instances > 1 else []
    for name, tokens in shown.items():
        if tokens != 0:
            parts.append(f"{name} {'unbounded' if tokens is None else short(tokens)}")
    return ", ".join(parts + (["written on evict"] if fleet.write == "evict" else []))


def short(count: int) -> str:
    """Tokens in as few characters as they need: ``1.5M``."""
    for unit, size in (("G", 10**9), ("M", 10**6), ("k", 10**3)):
        if count >= size:
            return f"{count / size:.4g}{unit}"
    return str(count)
