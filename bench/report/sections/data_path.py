"""Tables of the CPU data path: rows in and out, and attention over pages."""

from bench.report.markdown import NOT_MEASURED, number, seconds, table

MOVES = "put", "get", "zero"
SHOWN_AS = {"fill": "copy"}  # what a zero must at least do


def rows_section(results):
    """Put, get and zero."""
    return raced(row for row in results.rows("data_path") if row["what"].startswith(MOVES))


def attention_section(results):
    """Decode steps and prefills."""
    return raced(row for row in results.rows("data_path") if not row["what"].startswith(MOVES))


def raced(rows):
    """A row a race: kvpool's time, the others as multiples of it; serially and on all cores."""
    races, others = {}, {}
    for row in rows:
        races.setdefault((row["what"], row["dtype"]), {})[row["threads"]] = multiples(row)
        others |= dict.fromkeys(name for name in multiples(row) if not name.startswith("kvpool"))
    if not races:
        return NOT_MEASURED
    counts = sorted({count for found in races.values() for count in found})
    header = ["what", "dtype"]
    for count in counts:
        words = "one core" if count == 1 else f"{count} cores"
        header += [f"kvpool, {words}", *others]
    return table(
        header, [[*key, *cells(found, counts, others)] for key, found in races.items()], 2
    )


def multiples(row):
    """Contender -> how many times kvpool's time it takes; for kvpool, time and bandwidth."""
    ours = row["seconds"]["kvpool"]["best"]
    found = {
        SHOWN_AS.get(name, name): number(each["best"] / ours)
        for name, each in row["seconds"].items()
    }
    return found | {"kvpool": f"{seconds(ours)}, {number(row['bytes'] / ours / 1e9)} GB/s"}


def cells(found, counts, others):
    """What stands beside each other, for one race."""
    for count in counts:
        there = found.get(count, {})
        yield from (there.get(name, "") for name in ("kvpool", *others))
