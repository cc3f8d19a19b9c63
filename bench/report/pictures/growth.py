"""One picture of many curves: how costs grow with size, a panel a subject."""

from bench.curves import pictures
from bench.curves.subjects import SUBJECTS
from bench.report.pictures.paper import LARGE, save, sheet

COLUMNS = 2
SHOWN = {  # subject -> the panel of it that says most, and a title that fits
    "match": ("page 16", "look up a cached prompt, one node"),
    "match-nodes": ("page 16", "look up 131,072 cached tokens"),
    "insert": ("page 16", "cache a fresh prompt, pool full"),
    "reinsert": ("page 16", "serve a chat that is cached"),
    "evict-one": ("page 16", "evict one page"),
    "take": ("page 16, 10M tokens", "take pages"),
    "step": ("page 16, every row enters a page", "decode step, rows enter a page"),
    "memory": ("page 16", "memory of a full pool beside K and V"),
}


def draw(results, path):
    """The size of the file, 0 if there is nothing to show."""
    own = {name: curves_of(results, name) for name in SHOWN}
    own = {name: curves for name, curves in own.items() if curves}
    if not own:
        return 0
    lines = -(-len(own) // COLUMNS)
    figure, axes = sheet(0.9 + 2.05 * lines, nrows=lines, ncols=COLUMNS, squeeze=False)
    shown = {}  # what a line looks like -> it, and who is drawn so
    for axis in axes.flat[len(own) :]:
        axis.set_axis_off()
    for (name, curves), axis in zip(own.items(), axes.flat, strict=False):
        for curve in curves:
            drawn = pictures.line(axis, curve)
            look = drawn.get_color(), drawn.get_linestyle(), drawn.get_marker()
            shown.setdefault(look, (drawn, {}))[1][curve["contender"]] = None
        pictures.dress(axis, curves, SHOWN[name][1])
        subject = SUBJECTS[name]
        if subject.unit != "us":
            axis.set_ylim(0, 1.05 * max(p["median"] for c in curves for p in c["points"]))
        axis.set_ylabel(pictures.UNITS.get(subject.unit, subject.unit), fontsize=7)
        axis.set_xlabel(subject.x_label, fontsize=7)
        axis.tick_params(labelsize=7)
        axis.set_title(SHOWN[name][1], fontsize=8.5)
    handles, names = zip(*shown.values(), strict=True)
    names = [" or ".join(each) for each in names]
    figure.legend(handles, names, loc="outside lower center", ncols=3, fontsize=7)
    figure.suptitle(
        "How costs grow with size: page 16, medians", fontsize=LARGE, fontweight="bold"
    )
    return save(figure, path)


def curves_of(results, name):
    """Those of the panel that is shown, or of the first there is."""
    found = [curve for curve in results.curves if curve["subject"] == name and curve["points"]]
    panels = [curve["panel"] for curve in found]
    panel = SHOWN[name][0] if SHOWN[name][0] in panels else next(iter(panels), None)
    return [curve for curve in found if curve["panel"] == panel]
