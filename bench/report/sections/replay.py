"""Tables of the replayed traces."""

from bench.replay.worker import PHASES
from bench.report.cell import FLOOR, OURS, SHARING, SHUFFLED, all_facts, headline
from bench.report.markdown import NOT_MEASURED, bullets, number, picture, table, times


def headline_section(results):
    """The cell that is spoken of first: a row a contender."""
    facts = headline(results)
    if facts is None:
        return NOT_MEASURED
    cell = facts.cell
    header = ["contender", "mean us", "p50", "p99", "requests/s", "mean, x kvpool"]
    header += ["p99, x kvpool", "x floor", "hit %", "B/token", "hits are"]
    rows = [
        [
            name,
            *(number(facts.us(name, figure)) for figure in ("mean", "p50", "p99")),
            f"{row['requests_per_s']:,.0f}",
            number(facts.times(name)),
            number(facts.times(name, figure="p99")),
            number(facts.times(name, FLOOR)),
            f"{facts.hit(name):.2f}",
            "" if name == FLOOR else number(row["bytes_per_cached_token"]),
            checked(row),
        ]
        for name, row in facts.rows.items()
    ]
    shown = picture("replay_headline", "Mean and 99th percentile of each contender")
    return "\n\n".join([title(cell), table(header, rows), shown])


def title(cell):
    """What the cell is, in words."""
    text = (
        f"{cell['trace'].capitalize()} trace, {cell['requests']:,} requests, "
        f"{cell['prompt_tokens'] / 1e6:.1f}M prompt tokens; capacity {cell['capacity']:,} tokens, "
        f"page {cell['page_size']}, window {cell['window']}; medians of {cell['runs']} runs. By "
        f"the exact LRU rule {cell['exact_lru_hit_rate'] * 100:.2f} % of the prompt tokens are "
        f"hits, in a cache without end {cell['unlimited_hit_rate'] * 100:.2f} %."
    )
    if cell["left_out"]:
        text += f" {cell['left_out']} requests larger than the cache are left out."
    return text


def checked(row):
    """How the hits compare with brute force."""
    if any(row["faults"].values()):
        return "WRONG"
    return "exact" if "not exact LRU" in row["faults"] else "bounded"


def phases_section(results):
    """Where the time of that cell goes: mean of each phase."""
    facts = headline(results)
    if facts is None:
        return NOT_MEASURED
    shown = [
        phase for phase in PHASES if any(r["us"][phase]["mean"] > 0.5 for r in facts.rows.values())
    ]
    rows = [
        [name, *(number(row["us"][phase]["mean"]) for phase in (*shown, "total"))]
        for name, row in facts.rows.items()
    ]
    return table(["contender, mean us", *shown, "total"], rows)


def cells_section(results):
    """Every cell: a row each."""
    cells = all_facts(results)
    if not cells:
        return NOT_MEASURED
    header = ["trace", "tokens", "page", "window", "kvpool us: mean / p99", "x floor"]
    header += ["best peer", "its mean / p99", "shuffled", "checkpoint"]
    header += ["hit %: kvpool / checkpoint / best of the peers", "B/token"]
    shown = picture("replay_cells", "What the best peer takes, as a multiple of what kvpool takes")
    return "\n\n".join([table(header, [cell_row(facts) for facts in cells]), shown])


def cell_row(facts):
    """One cell."""
    cell, best = facts.cell, facts.best_peer()
    hits = facts.hit(OURS), facts.hit(SHARING) if cell["window"] > 1 else None
    best_hit = max((facts.hit(peer) for peer in facts.peers), default=None)
    return [
        cell["trace"],
        f"{cell['capacity'] / 1e6:.0f}M",
        cell["page_size"],
        cell["window"],
        beside(number(facts.us(OURS)), number(facts.us(OURS, "p99"))),
        number(facts.times(OURS, FLOOR)),
        best or "",
        beside(times(facts.times(best)), times(facts.times(best, figure="p99"))),
        times(facts.times(SHUFFLED), 2),
        times(facts.times(SHARING), 2) if cell["window"] > 1 else "",
        beside(*map(percent, (*hits, best_hit))),
        number(facts.rows[OURS]["bytes_per_cached_token"]) if OURS in facts.rows else "",
    ]


def beside(*texts):
    """In one column, what is there."""
    return " / ".join(text for text in texts if text)


def percent(value):
    """A hit rate."""
    return "" if value is None else f"{value:.2f}"


def contenders_section(results):
    """What each contender does in which column, and what of it is stubbed: in its own words."""
    cells = results.cells.values()
    notes = dict.fromkeys(note for cell in cells for row in cell["rows"] for note in row["notes"])
    return bullets(notes) if notes else NOT_MEASURED
