"""One picture a subject: a panel a page size, a line a contender, and a title that says it."""

import textwrap

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.ticker import FixedLocator, FuncFormatter, NullFormatter, NullLocator

from bench.curves import messages
from bench.curves.subjects import SUBJECTS

STYLES = {  # by how the name begins, the longest first: colour, line, marker
    "kvpool, from a list": ("#56b4e9", "-", "s"),
    "kvpool, graph": ("#7b4fa3", "-", "s"),
    "kvpool, its own": ("#7b4fa3", ":", "x"),
    "kvpool-parts": ("#56b4e9", "-", "s"),
    "kvpool-shuffled": ("#56b4e9", "-", "s"),
    "kvpool": ("#0055a4", "-", "o"),
    "sglang-py, alloc": ("#e8b339", "-", "v"),
    "sglang-py": ("#e69f00", "-", "^"),
    "sglang-rust": ("#c0392b", "-", "D"),
    "vllm": ("#2e8b57", "-", "P"),
    "floor": ("#777777", "--", ""),
    "random": ("#777777", "--", ""),
    "pages alike": ("#0055a4", "-", "o"),
    "one bucket": ("#e69f00", "-", "^"),
    "one hash": ("#c0392b", "-", "D"),
}
UNITS = {"us": "microseconds", "bytes/token": "bytes a cached token"}


def draw_all(curves, folder):
    """A PNG of each subject."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in dict.fromkeys(curve["subject"] for curve in curves):
        own = [curve for curve in curves if curve["subject"] == name]
        draw(SUBJECTS[name], own, folder / f"growth_{name.replace('-', '_')}.png")


def draw(subject, curves, path):
    """The curves of one subject."""
    panels = list(dict.fromkeys(curve["panel"] for curve in curves))
    columns = min(len(panels), 3 if len(panels) != 4 else 2)
    if len(panels) == 6:  # two capacities of three page sizes
        columns, panels = 3, [*panels[::2], *panels[1::2]]
    lines = -(-len(panels) // columns)
    width = max(7.5, 4.2 * columns)
    figure, axes = plt.subplots(
        lines,
        columns,
        figsize=(width, 2.1 + 3.3 * lines),
        sharey=True,
        squeeze=False,
        layout="constrained",
    )
    handles = {}
    for panel, axis in zip(panels, axes.flat, strict=False):
        for curve in curves:
            if curve["panel"] == panel and curve["points"]:
                handles[curve["contender"]] = line(axis, curve)
        dress(axis, [curve for curve in curves if curve["panel"] == panel], panel)
    if subject.unit != "us":  # a linear axis, which begins at nothing
        tops = (point["median"] for curve in curves for point in curve["points"])
        axes[0, 0].set_ylim(0, 1.05 * max(tops))
    for axis in axes[:, 0]:
        axis.set_ylabel(UNITS.get(subject.unit, subject.unit))
    for axis in axes[-1]:
        axis.set_xlabel(subject.x_label)
    names = [
        f"{subject.floor_is}: {subject.floor}" if name == "floor" else name for name in handles
    ]
    figure.legend(
        handles.values(),
        names,
        loc="outside lower center",
        ncols=2 if width < 8 else 3,
        frameon=False,
        fontsize=9,
    )
    title = textwrap.fill(messages.of(subject, curves), int(10.5 * width))
    figure.suptitle(title, fontsize=11, fontweight="bold")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def line(axis, curve):
    """One curve; answers what the legend shows."""
    style = next(style for start, style in STYLES.items() if curve["contender"].startswith(start))
    colour, kind, marker = style
    sizes = [point["size"] for point in curve["points"]]
    medians = [point["median"] for point in curve["points"]]
    (drawn,) = axis.plot(
        sizes,
        medians,
        color=colour,
        linestyle=kind,
        marker=marker,
        markersize=4.5,
        linewidth=2.2 if curve["contender"] == "kvpool" else 1.5,
    )
    return drawn


def dress(axis, curves, panel):
    """Log axes, a tick at each size that was measured."""
    axis.set_xscale("log")
    if curves[0]["unit"] == "us":
        axis.set_yscale("log")
        axis.yaxis.set_minor_formatter(NullFormatter())
    sizes = sorted({point["size"] for curve in curves for point in curve["points"]})
    axis.xaxis.set_major_locator(FixedLocator(sizes))
    axis.xaxis.set_minor_locator(NullLocator())
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: messages.short(value)))
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: messages.plain(value)))
    axis.grid(True, which="major", color="#dddddd", linewidth=0.6)
    axis.set_title(panel, fontsize=10)
    axis.spines[["top", "right"]].set_visible(False)
