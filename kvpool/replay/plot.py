"""The picture of a replay: hit rate against capacity, or against the size of a tier."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Any

from kvpool.numbers import counted
from kvpool.replay.plot_lines import Axis, Line, axis_of, lines_of, short
from kvpool.replay.results import ReplayReport

_INCHES, _DPI = (9.0, 4.6), 100  # 900 pixels wide
_RING, _MOST_RINGS = 1.5, 6  # points from one ring to the next, and lines that have them
_MOST_INSIDE = 4  # lines whose names fit between them
_DASHES = ("-", (0, (1, 1.5)), (0, (4, 1, 1, 1)), (0, (6, 1)))  # by what lies below the pools
_ALIKE = 0.005  # hit rates that are one line in the picture


def plot(report: ReplayReport, path: str | Path) -> None:
    """Write a picture, one line a page size, policy and fleet; what nothing can exceed is dashed.

    The axis is the capacity of a pool; where all have one capacity and a tier has several, it is
    the size of that tier.

    Parameters
    ----------
    report : ReplayReport
        Of at least one cell with a capacity.
    path : str or Path
        Its suffix is the format: ``.png``, ``.svg`` or ``.pdf``.

    Raises
    ------
    ImportError
        matplotlib is not installed.
    ValueError
        No cell with a capacity was replayed to its end, or matplotlib knows no such format.
    OSError
        The file cannot be written.
    """
    axis = axis_of(report)
    lines = lines_of(report, axis)
    if not lines:
        raise ValueError(
            "nothing to plot: no pool with a capacity has served a request to its end"
        )
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # Without pyplot: no global state, no window, whatever backend the process has chosen.
    figure = Figure(figsize=_INCHES, dpi=_DPI, layout="constrained")
    FigureCanvasAgg(figure)
    axes: Any = figure.add_subplot()
    markers = _places([(line.policy, line.fleet) for line in lines])
    # What has the same instances and route has one colour, whatever lies below it.
    colors = _places([_pools(line) for line in lines])
    dashes = _places([_tiers(line) for line in lines])
    for index, line in enumerate(lines):
        axes.plot(
            *line.points,
            color=f"C{colors[index]}",
            marker="osD^vPX<>"[markers[index] % 9],
            # Rings within rings, for lines that lie on each other.
            markersize=4 + _RING * (len(lines) - 1 - index) if len(lines) <= _MOST_RINGS else 5,
            fillstyle="none",
            linestyle=_DASHES[dashes[index] % len(_DASHES)],
            linewidth=1.2,
            label=line.label,
        )
    _draw_bounds(axes, report, lines)
    _draw_axis(axes, axis, lines)
    axes.set_ylim(0, 1.08 * axes.get_ylim()[1])
    axes.set_ylabel("hit rate: prompt tokens found cached")
    axes.set_title(_title(report), fontsize="medium")
    axes.grid(alpha=0.3)
    if len(lines) > _MOST_INSIDE:
        figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize="small")
    else:
        axes.legend(frameon=False, fontsize="small")
    figure.savefig(path, metadata={"Software": None} if Path(path).suffix == ".png" else None)


def _pools(line: Line) -> tuple[int, str, int, str]:
    return line.page_size, line.policy, line.fleet.instances, line.fleet.route


def _tiers(line: Line) -> tuple[int | None, int | None, str]:
    return line.fleet.host_tier, line.fleet.remote_tier, line.fleet.write


def _places(values: Sequence[Hashable]) -> list[int]:
    """The number of each value among those that differ."""
    distinct = list(dict.fromkeys(values))
    return [distinct.index(value) for value in values]


def _draw_axis(axes: Any, axis: Axis, lines: list[Line]) -> None:
    places = sorted({place for line in lines for place in line.points[0]})
    axes.set_xscale("log")
    axes.set_xticks(places, [short(place) for place in places])
    axes.minorticks_off()
    axes.set_xlabel(axis.label)


def _draw_bounds(axes: Any, report: ReplayReport, lines: list[Line]) -> None:
    """One dashed line a page size; one for all where no eye tells them apart."""
    bounds = {
        line.page_size: rate
        for line in lines
        if line.page_size in report.bounds
        and (rate := report.bounds[line.page_size].hit_rate) is not None
    }
    if bounds and max(bounds.values()) - min(bounds.values()) < _ALIKE:
        low, high = (f"{edge(bounds.values()):.4f}" for edge in (min, max))
        label = "unbounded: " + (high if low == high else f"{low} to {high}")
        axes.axhline(max(bounds.values()), color="0.4", linestyle="--", linewidth=1.2, label=label)
        return
    for page_size, rate in bounds.items():
        label = f"unbounded, page size {page_size}: {rate:.4f}"
        color = f"C{[line.page_size for line in lines].index(page_size)}"
        axes.axhline(rate, color=color, linestyle="--", linewidth=1.2, label=label)


def _title(report: ReplayReport) -> str:
    text = f"{report.trace}: {counted(report.num_requests, 'request')}"
    if (window := report.options["window"]) > 1:
        text += f", up to {window:,} in flight"
        if any(result.cell.fleet.instances > 1 for result in report.results):
            text += " an instance"
    return text + (", prompts only" if report.options["prompts_only"] else "")
