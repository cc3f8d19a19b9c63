"""The tables of the smaller programs: decode steps, and the machine's floor."""

from bench.report.markdown import NOT_MEASURED, number, table
from bench.step import WAYS


def steps_section(results):
    """A row a shape and crossing; the stages of both ways."""
    shapes = {}
    for row in results.rows("step"):
        key = row["batch"], row["length"], row["crossing"]
        shapes.setdefault(key, {})[row["way"]] = row
    if not shapes:
        return NOT_MEASURED
    header = ["rows", "tokens", "pages"]
    for way, stages in WAYS.items():
        header += [*(f"{way}: {stage}" for stage in stages), f"{way}: us", "x copy of ids"]
    rows = [
        [f"{batch:,}", f"{length:,}", crossing, *stages_of(ways)]
        for (batch, length, crossing), ways in shapes.items()
    ]
    return table(header, rows, words=3)


def stages_of(ways):
    """Microseconds of the stages, their sum, and its ratio to the floor."""
    for way, stages in WAYS.items():
        row = ways.get(way)
        if row is None:
            yield from [""] * (len(stages) + 2)
        else:
            yield from (number(row["stages"][stage]) for stage in stages)
            yield number(row["value"])
            yield number(row["ratio"])


def limits_section(results):
    """As they were printed."""
    rows = results.rows("limits")
    if not rows:
        return NOT_MEASURED
    return table(
        ["what", "us", "x copy of the same bytes"],
        [[row["name"], number(row["value"]), number(row["ratio"])] for row in rows],
    )
