"""Every target that was set, and whether it is reached: of the replay, the curves, the data path.

A line is judged by the worst of its rows; a row is one way in which it was measured.
"""

from bench.curves.targets import MET, MISSED, UNKNOWN, judged
from bench.curves.targets import verdicts as of_curves
from bench.report.cell import FLOOR, OURS, RUST, SHARING, SHUFFLED, all_facts, headline

GAP = 0.05  # points of a hit rate
ROWS, PLAIN = "4,096 rows", ("float32", "bfloat16")
FASTER = "times faster than the better of NumPy and torch"
FEWEST = 8  # rows of a decode step that the target speaks of


def verdicts(results):
    """All rows."""
    return [
        *of_headline(headline(results)),
        *of_cells(all_facts(results)),
        *of_curves(results.curves),
        *of_hits(all_facts(results)),
        *of_rows(results.rows("data_path")),
        *of_attention(results.rows("data_path")),
    ]


def of_headline(facts):
    """The cell that is spoken of first."""
    name = facts.name if facts else "conversation:10M:p16:w1"
    for line, arguments, limit, at_least in (
        ("mean, times faster than SGLang's Rust core", (RUST, OURS), 15, True),
        ("mean, times the prefaulted floor", (OURS, FLOOR), 2.5, False),
        ("p99, times better than SGLang's Rust core", (RUST, OURS, "p99"), 12, True),
    ):
        value = facts.times(*arguments) if facts else None
        form = "{:.1f}" if at_least else "{:.2f}"
        yield judged(f"{name}: {line}", f"{name}: {line}", value, limit, form, at_least)


def of_cells(cells):
    """Every cell beside its best peer, and beside itself with a shuffled free list."""
    for ours, words in ((OURS, ""), (SHARING, ", with checkpoints at window 32")):
        for sizes, pages, limit in (((1,), "page 1", 4), ((16, 64), "page 16 and 64", 10)):
            line = f"every cell of {pages}{words}: mean, times faster than the best peer"
            for facts in of_sizes(cells, sizes):
                if ours == OURS or facts.cell["window"] > 1:
                    best = facts.best_peer()
                    what = f"{facts.name}: mean of {best}, times that of {ours}"
                    yield judged(
                        line, what, facts.times(best, ours), limit, "{:.1f}", at_least=True
                    )
    for facts in of_sizes(cells, (1, 16)):
        line = "every cell of page 1 and 16, free list shuffled: times the fresh pool"
        what = f"{facts.name}: shuffled, times the fresh pool"
        yield judged(line, what, facts.times(SHUFFLED), 1.5)


def of_sizes(cells, sizes):
    """Cells of some page sizes."""
    return [facts for facts in cells if facts.cell["page_size"] in sizes]


def of_hits(cells):
    """What a peer hits more than we do: in every cell, of every peer."""
    for facts in cells:
        ours, window = facts.ours_sharing, facts.cell["window"]
        with_ = " with a checkpoint after prefill" if ours == SHARING else ""
        line = f"hit rate at window {window}{with_}: points that a peer has more"
        for peer in facts.peers:
            mine = facts.hit(ours)
            value = None if mine is None else facts.hit(peer) - mine
            what = f"{facts.name}: points that {peer} hits more than {ours}"
            yield judged(line, what, value, GAP, "{:+.2f}")


def of_rows(rows):
    """Put and get beside the better of NumPy and torch, and beside a copy of the same bytes."""
    # A get answers new arrays: what it must at least do is a copy to new memory.
    for verb, copy, words in (
        ("put", "copy", "times memcpy"),
        ("get", "copy, fresh", "times memcpy to new memory, as a get needs"),
    ):
        for plain, dtypes in ((True, ", ".join(PLAIN)), (False, "FP8")):
            found = [
                row
                for row in rows
                if row["what"] == f"{verb}, {ROWS}" and (row["dtype"] in PLAIN) == plain
            ]
            line = f"{verb} of 4,096 rows of 2 KB on the CPU, {dtypes}"
            faster = {race(row): ratio(row, "NumPy", "torch") for row in found}
            slower = {race(row): inverse(ratio(row, copy)) for row in found}
            yield from each(line, FASTER, faster, 1, at_least=True)
            yield from each(line, words, slower, 2)


def of_attention(rows):
    """Decode attention beside torch's gather and SDPA, for batches that are worth it."""
    found = {race(row): ratio(row, "torch") for row in rows if is_large_decode(row["what"])}
    line = f"paged decode attention on the CPU, batch {FEWEST} on"
    words = "times faster than torch's gather and SDPA"
    yield from each(line, words, found, 1, at_least=True)


def each(line, words, values, limit, at_least=False):
    """A verdict a value, or one that says that there is none."""
    line = f"{line}: {words}"
    for name, value in values.items():
        yield judged(line, f"{name}: {words}", value, limit, at_least=at_least)
    if not values:
        yield judged(line, line, None, limit, at_least=at_least)


def is_large_decode(what):
    """Whether it is a decode of many rows."""
    kind, batch, *_ = (*what.split(", "), "")
    return kind == "decode" and int(batch.removeprefix("batch ")) >= FEWEST


def race(row):
    """A row of the data path in words."""
    cores = "one core" if row["threads"] == 1 else f"{row['threads']} cores"
    return f"{row['what']}, {row['dtype']}, {cores}"


def ratio(row, *others):
    """The fastest of the others as a multiple of kvpool's time; None where none was there."""
    seconds = row["seconds"]
    found = [seconds[other]["best"] for other in others if other in seconds]
    return min(found) / seconds["kvpool"]["best"] if found else None


def inverse(value):
    """Of what is there."""
    return None if value is None else 1 / value


def summary(rows):
    """One row a line: the worst, how many there are, and a verdict."""
    lines = {}
    for row in rows:
        lines.setdefault(row["line"], []).append(row)
    return [summary_of(line, found) for line, found in lines.items()]


def summary_of(line, rows):
    """The worst row of a line."""
    known = [row for row in rows if row["verdict"] != UNKNOWN]
    missed = [row for row in known if row["verdict"] == MISSED]
    worst = max(known, key=badness, default=rows[0])
    verdict = UNKNOWN
    if known:
        verdict = f"{MISSED} in {len(missed)} of {len(known)}" if missed else MET
        if len(known) < len(rows):
            verdict += f"; {len(rows) - len(known)} not measured"
    return worst | {"verdict": verdict, "count": len(known)}


def badness(row):
    """How far a row is from its limit, above one if it misses it."""
    if row["target"].startswith(">="):
        return row["limit"] / max(row["value"], 1e-9)
    return row["value"] / row["limit"]
