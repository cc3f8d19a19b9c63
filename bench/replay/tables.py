"""The printed form of a cell: one row a contender, ratios, and what the figures leave out."""

from bench.replay.worker import PHASES

OURS, FLOOR = "kvpool", "floor"


def cell_text(result):
    """Title, table, verdict and notes of one cell, as lines of text (and of Markdown)."""
    rows = result["rows"]
    means = {row["name"]: row["us"]["total"]["mean"] for row in rows}
    header = ["contender", "hit %"]
    shown = [phase for phase in PHASES if any(row["us"][phase]["p50"] > 0.3 for row in rows)]
    header += [f"{phase} p50 / p99 / mean" for phase in (*shown, "total")]
    header += ["requests/s", "x kvpool", "x floor", "B/token", "hits"]
    cells = [header, ["---"] * len(header)]
    for row in rows:
        mean, name = means[row["name"]], row["name"]
        cells.append(
            [
                name,
                f"{row['hit_rate'] * 100:.2f}",
                *(
                    " / ".join(_us(value) for value in row["us"][phase].values())
                    for phase in shown
                ),
                " / ".join(_us(value) for value in row["us"]["total"].values()),
                f"{row['requests_per_s']:,.0f}",
                _ratio(mean, means.get(OURS)),
                _ratio(mean, means.get(FLOOR)),
                "" if name == FLOOR else f"{row['bytes_per_cached_token']:.1f}",
                _verdict_on_hits(row),
            ]
        )
    return "\n".join([_title(result), "", *_aligned(cells), "", *_ratios(rows), *_notes(result)])


def faults(result):
    """One line for each contender whose hits are not what they must be."""
    return [
        f"{row['name']}: {count} requests hit {what}"
        for row in result["rows"]
        for what, count in row["faults"].items()
        if count
    ]


def _title(result):
    text = (
        f"{result['trace']} trace, {result['requests']:,} requests, capacity "
        f"{result['capacity']:,} tokens, page {result['page_size']}, window {result['window']}; "
        f"microseconds a request, medians of {result['runs']} runs; hit rate by exact LRU "
        f"{result['exact_lru_hit_rate'] * 100:.2f} %, of a cache without end "
        f"{result['unlimited_hit_rate'] * 100:.2f} %"
    )
    if result["left_out"]:
        text += f"; {result['left_out']} requests larger than the cache are left out"
    return text


def _ratios(rows):
    """How far kvpool is from its peers and from the floor, in words."""
    by_name = {row["name"]: row for row in rows}
    if OURS not in by_name:
        return []
    ours = by_name[OURS]
    peers = [row for row in rows if not row["name"].startswith((OURS, FLOOR))]
    lines = []
    if FLOOR in by_name:
        times = ours["us"]["total"]["mean"] / by_name[FLOOR]["us"]["total"]["mean"]
        lines.append(f"kvpool: {times:.2f} times the floor (mean)")
    if "kvpool-shuffled" in by_name:
        times = by_name["kvpool-shuffled"]["us"]["total"]["mean"] / ours["us"]["total"]["mean"]
        lines.append(f"kvpool with a shuffled free list: {times:.2f} times the fresh pool (mean)")
    for row in sorted(peers, key=lambda row: row["us"]["total"]["mean"]):
        mean, p99 = (row["us"]["total"][x] / ours["us"]["total"][x] for x in ("mean", "p99"))
        gap = (ours["hit_rate"] - row["hit_rate"]) * 100
        line = (
            f"{row['name']}: {mean:.1f} times kvpool's mean, {p99:.1f} times its p99; "
            f"kvpool hits {gap:+.2f} points more"
        )
        if sharing := by_name.get("kvpool-checkpoint"):
            line += f", with checkpoints {(sharing['hit_rate'] - row['hit_rate']) * 100:+.2f}"
        lines.append(line)
    return [*(f"- {line}" for line in lines), ""]


def _notes(result):
    versions = {}
    for row in result["rows"]:
        versions.update(row["versions"])
    notes = list(dict.fromkeys(note for row in result["rows"] for note in row["notes"]))
    preempted = ", ".join(f"{row['name']} {row['preempted']:.0f}" for row in result["rows"])
    return [
        *(f"- {note}" for note in notes),
        "- all: one process each, in turns on one core; the prompt is cut at n - 1 for the match; "
        "joining prompt and output, and turning them into the contender's form, is not timed",
        f"- hits: 'exact' equal brute force at every request; 'bounded' equal it in the first "
        f"{result['checked_before_eviction']:,} requests, before any eviction, and never exceed "
        "what was ever cached",
        "- requests of a run in whose middle another process ran (its time is taken off): "
        + preempted,
        f"- {', '.join(f'{name} {version}' for name, version in sorted(versions.items()))}",
    ]


def _verdict_on_hits(row):
    if any(row["faults"].values()):
        return "WRONG"
    return "exact" if "not exact LRU" in row["faults"] else "bounded"


def _ratio(value, base):
    return "" if base is None else f"{value / base:.2f}"


def _us(value):
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 1 else f"{value:.2f}"


def _aligned(cells):
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    for row in cells:
        fill = "-" if row[0] == "---" else " "
        yield (
            "| "
            + " | ".join(text.ljust(width, fill) for text, width in zip(row, widths, strict=True))
            + " |"
        )
