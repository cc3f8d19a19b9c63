"""The picture of a replay: hit rate against capacity."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvpool.replay.results import CellResult, ReplayReport

_INCHES, _DPI = (9.0, 4.6), 100  # 900 pixels wide
_ALIKE = 0.005  # hit rates that are one line in the picture


def plot(report: ReplayReport, path: str | Path) -> None:
    """Write a picture, one line a page size and policy; what nothing can exceed is dashed.

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
    lines = _lines(report)
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
    page_sizes = list(dict.fromkeys(page_size for page_size, _ in lines))
    policies = list(dict.fromkeys(policy for _, policy in lines))
    for index, ((page_size, policy), results) in enumerate(lines.items()):
        names = [f"page size {page_size}"] if len(page_sizes) > 1 or len(policies) == 1 else []
        axes.plot(
            [result.cell.capacity for result in results],
            [result.hit_rate for result in results],
            color=f"C{index}",
            marker="osD^v"[policies.index(policy) % 5],
            # Rings within rings, for lines that lie on each other.
            markersize=3 + 2.5 * (len(lines) - 1 - index),
            fillstyle="none",
            linewidth=1.2,
            label=", ".join(names + ([policy] if len(policies) > 1 else [])),
        )
    _draw_bounds(axes, report, list(lines))
    axes.set_xscale("log")
    capacities = sorted({result.cell.capacity or 0 for line in lines.values() for result in line})
    axes.set_xticks(capacities, [_short(capacity) for capacity in capacities])
    axes.minorticks_off()
    axes.set_ylim(0, 1.08 * axes.get_ylim()[1])
    axes.set_xlabel("capacity in tokens")
    axes.set_ylabel("hit rate: prompt tokens found cached")
    axes.set_title(_title(report), fontsize="medium")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, fontsize="small")
    figure.savefig(path, metadata={"Software": None} if Path(path).suffix == ".png" else None)


def _draw_bounds(axes: Any, report: ReplayReport, lines: list[tuple[int, str]]) -> None:
    """One dashed line a page size; one for all where no eye tells them apart."""
    bounds = {
        page_size: rate
        for page_size, _ in lines
        if page_size in report.bounds and (rate := report.bounds[page_size].hit_rate) is not None
    }
    if bounds and max(bounds.values()) - min(bounds.values()) < _ALIKE:
        low, high = (f"{edge(bounds.values()):.4f}" for edge in (min, max))
        label = "unbounded: " + (high if low == high else f"{low} to {high}")
        axes.axhline(max(bounds.values()), color="0.4", linestyle="--", linewidth=1.2, label=label)
        return
    for page_size, rate in bounds.items():
        label = f"unbounded, page size {page_size}: {rate:.4f}"
        color = f"C{[line[0] for line in lines].index(page_size)}"
        axes.axhline(rate, color=color, linestyle="--", linewidth=1.2, label=label)


def _lines(report: ReplayReport) -> dict[tuple[int, str], list[CellResult]]:
    """The points of each line, by capacity."""
    lines: dict[tuple[int, str], list[CellResult]] = {}
    for result in report.results:
        if result.cell.capacity is not None and result.hit_rate is not None and result.complete:
            line = lines.setdefault((result.cell.page_size, result.cell.policy), [])
            line.append(result)
    for line in lines.values():
        line.sort(key=lambda result: result.cell.capacity or 0)
    return lines


def _title(report: ReplayReport) -> str:
    text = f"{report.trace}: {report.num_requests:,} requests"
    if (window := report.options["window"]) > 1:
        text += f", up to {window} in flight"
    return text + (", prompts only" if report.options["prompts_only"] else "")


def _short(count: int) -> str:
    for unit, size in (("M", 10**6), ("k", 10**3)):
        if count >= size:
            return f"{count / size:.4g}{unit}"
    return str(count)
