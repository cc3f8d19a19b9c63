"""Pictures of the replayed traces: one cell by contender, and all cells beside their best peer."""

from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from bench.curves.messages import plain
from bench.curves.pictures import STYLES
from bench.report.cell import OURS, all_facts, headline
from bench.report.markdown import number
from bench.report.pictures.paper import GREY, LARGE, save, sheet

PAGE_COLOURS = {1: "#e69f00", 16: "#0055a4", 64: "#2e8b57"}
TARGETS = {4: "target, page 1", 10: "target, page 16 and 64"}


def colour(contender):
    """As in the pictures of the curves."""
    return next(style[0] for start, style in STYLES.items() if contender.startswith(start))


def logarithmic(axis, steps=(1,)):
    """A horizontal axis with whole numbers, at these multiples of the powers of ten."""
    axis.set_xscale("log")
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: plain(value)))
    axis.xaxis.set_major_locator(LogLocator(subs=steps))
    axis.xaxis.set_minor_formatter(NullFormatter())
    axis.grid(axis="x")


def draw_headline(results, path):
    """A bar a contender: mean; a tick: p99. The size of the file, 0 if there is nothing."""
    facts = headline(results)
    if facts is None:
        return 0
    names = sorted(facts.rows, key=facts.us, reverse=True)
    figure, axis = sheet(0.9 + 0.27 * len(names))
    for place, name in enumerate(names):
        mean, p99 = facts.us(name), facts.us(name, "p99")
        axis.barh(place, mean, height=0.62, color=colour(name))
        axis.plot([p99], [place], marker="|", color="black", markersize=8, markeredgewidth=1.4)
        axis.annotate(
            f"{number(mean)} us, p99 {number(p99)}" + relation(facts, name),
            (p99, place),
            xytext=(6, 0),
            textcoords="offset points",
            va="center",
        )
    logarithmic(axis)
    axis.set_yticks(range(len(names)), names)
    axis.tick_params(axis="y", length=0)
    axis.set_xlim(1, 20 * max(facts.us(name, "p99") for name in names))
    axis.set_xlabel("microseconds a request: the bar is the mean, the tick the 99th percentile")
    cell = facts.cell
    figure.suptitle(
        f"Bookkeeping of a request, {cell['trace']} trace, {cell['capacity'] / 1e6:.0f}M tokens, "
        f"page {cell['page_size']}",
        fontsize=LARGE,
        fontweight="bold",
    )
    return save(figure, path)


def relation(facts, name):
    """How many times kvpool's mean it is."""
    value = facts.times(name)
    return "" if value is None or name == OURS else f"  ({number(value)} x kvpool)"


def draw_cells(results, path):
    """A line a cell: what the best peer takes, as a multiple of what kvpool takes."""
    cells = [facts for facts in all_facts(results) if facts.best_peer() and OURS in facts.rows]
    if not cells:
        return 0
    figure, axis = sheet(1.3 + 0.19 * len(cells))
    kinds = {}
    for place, facts in enumerate(reversed(cells)):
        best, page = facts.best_peer(), facts.cell["page_size"]
        ends = facts.times(best), facts.times(best, figure="p99")
        axis.plot(ends, (place, place), color=PAGE_COLOURS[page], linewidth=1.2)
        (mean,) = axis.plot(ends[0], place, "o", color=PAGE_COLOURS[page], markersize=5.5)
        (p99,) = axis.plot(ends[1], place, "|", color=PAGE_COLOURS[page], markersize=8)
        kinds |= {f"page {page}: mean": mean, "99th percentile": p99}
        axis.annotate(
            f"{number(ends[0])}, {best}",
            (max(ends), place),
            xytext=(7, 0),
            textcoords="offset points",
            va="center",
            fontsize=6.5,
        )
    for value, words in TARGETS.items():
        axis.axvline(value, color=GREY, linestyle="--", linewidth=0.9)
        axis.annotate(words, (value, len(cells)), fontsize=6.5, color=GREY, ha="center")
    logarithmic(axis, (1, 2, 5))
    labels = [facts.name.replace(":", ", ").replace(" p", " page ") for facts in reversed(cells)]
    labels = [label.replace(" w", " window ") for label in labels]
    axis.set_yticks(range(len(cells)), labels, fontsize=6.5)
    axis.tick_params(axis="y", length=0)
    right = max(max(f.times(f.best_peer()), f.times(f.best_peer(), figure="p99")) for f in cells)
    axis.set_xlim(1, 4 * right)
    axis.set_xlabel("times kvpool's microseconds a request: mean, and 99th percentile")
    order = sorted(kinds, key=lambda kind: (kind[0] != "p", len(kind), kind))
    figure.legend([kinds[kind] for kind in order], order, loc="outside lower center", ncols=4)
    figure.suptitle("The best peer beside kvpool, in each cell", fontsize=LARGE, fontweight="bold")
    return save(figure, path)
