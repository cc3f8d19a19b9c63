"""The settings of replayed cells: which of them differ, and so need a column."""

from __future__ import annotations

from collections.abc import Sequence

from kvpool.cli.output import Cell
from kvpool.replay import CellResult, ReplayReport

_UNITS = (("G", 10**9), ("M", 10**6), ("k", 10**3))
_COLUMNS = {"page size": "page", "host tier": "host", "remote tier": "remote"}


def settings(report: ReplayReport) -> dict[str, set[Cell]]:
    """Values of each setting; what has one value only needs no column.

    Where a setting has no meaning, like a policy of a pool that never evicts, it has no value.
    """
    cells = [result.cell for result in report.results]
    fleets = [cell.fleet for cell in cells]
    found: dict[str, set[Cell]] = {
        "page size": {cell.page_size for cell in cells},
        "policy": {cell.policy for cell in cells if cell.capacity is not None},
    }
    if has_fleets(report):
        found |= {
            "capacity": {_capacity(cell.capacity) for cell in cells},
            "instances": {fleet.instances for fleet in fleets},
            "route": {fleet.route for fleet in fleets if fleet.instances > 1},
            "host tier": {_tier(fleet.host_tier) for fleet in fleets},
            "remote tier": {_tier(fleet.remote_tier) for fleet in fleets},
            "write": {fleet.write for fleet in fleets if fleet.has_tiers},
        }
    return found


def has_fleets(report: ReplayReport) -> bool:
    """Whether there is more than one pool, or a tier, in some cell."""
    return not all(result.cell.fleet.is_plain for result in report.results)


def varying(report: ReplayReport) -> list[str]:
    """Names of the settings that need a column, the capacity first: pools have one always."""
    names = [name for name, values in settings(report).items() if len(values) > 1]
    if "capacity" in names or not has_fleets(report):
        names = ["capacity", *(name for name in names if name != "capacity")]
    return names


def column_names(names: Sequence[str]) -> list[str]:
    """Titles of the columns that `settings_of` fills."""
    return [_COLUMNS.get(name, name) for name in names]


def settings_of(result: CellResult, names: Sequence[str]) -> list[Cell]:
    """What a cell has of the settings `names`."""
    cell, fleet = result.cell, result.cell.fleet
    values = {
        "capacity": _capacity(cell.capacity),
        "page size": str(cell.page_size),
        "policy": "-" if cell.capacity is None else cell.policy,
        "instances": str(fleet.instances),
        "route": fleet.route if fleet.instances > 1 else "-",
        "host tier": _tier(fleet.host_tier),
        "remote tier": _tier(fleet.remote_tier),
        "write": fleet.write if fleet.has_tiers else "-",
    }
    return [values[name] for name in names]


def short(count: int) -> str:
    """A count in about three digits: ``250k``, ``7.87M``; small ones as they are."""
    if count < 10_000:
        return f"{count:,}"
    unit, size = next(unit for unit in _UNITS if count >= unit[1])
    return f"{count / size:.3g}{unit}" if count < 999.5 * size else f"{count / size:,.0f}{unit}"


def _tier(tokens: int | None) -> str:
    if tokens is None:
        return "unbounded"
    return short(tokens) if tokens else "none"


def _capacity(tokens: int | None) -> str:
    return "unbounded" if tokens is None else short(tokens)
