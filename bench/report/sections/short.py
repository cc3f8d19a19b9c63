"""The few rows of the README: what a visitor wants to know."""

from bench.curves.footprint import OWN
from bench.curves.steps import SGLANG as SGLANG_STEP
from bench.curves.steps import WAYS
from bench.curves.subject import FLOOR, LONG, PARTS, PEERS, POOL
from bench.curves.targets import Found
from bench.report.cell import OURS, RUST, all_facts, headline
from bench.report.markdown import NOT_MEASURED, number, picture, seconds, table, times
from bench.report.targets import ratio

PAGE = "page 16"
STEPS = f"{PAGE}, no row enters a page", f"{PAGE}, every row enters a page"
LEAVES, PROMPT, BATCH = 1_000_000, 8_192, 256


def section(results):
    """One table and one picture; what was not measured has no row."""
    found, first = Found(results.curves), headline(results)
    parts = (
        request(first),
        cells(all_facts(results)),
        match(found),
        eviction(found),
        memory(found),
        step(found),
        put(results.rows("data_path")),
        attention(results.rows("data_path")),
    )
    rows = [row for row in parts if row]
    if not rows:
        return NOT_MEASURED
    text = table(["what", "kvpool", "against"], rows, words=3)
    if first is None:
        return text
    words = "Mean and 99th percentile of a request, by contender"
    return "\n\n".join([text, picture("replay_headline", words, "docs/pictures")])


def request(facts):
    """The headline cell."""
    if facts is None or OURS not in facts.rows:
        return None
    against = []
    if (above := facts.times(OURS, "floor")) is not None:
        against.append(f"{number(above)} x the memory floor")
    if (slower := facts.times(RUST)) is not None:
        p99 = facts.times(RUST, figure="p99")
        against.append(f"SGLang's Rust tree takes {times(slower)}, its p99 is {times(p99)}")
    mean, p99 = number(facts.us(OURS)), number(facts.us(OURS, "p99"))
    return (
        f"a request of a {facts.cell['trace']} trace: bind, mark_written, finish; 10M tokens, "
        "page 16",
        f"mean {mean} us, p99 {p99} us",
        "; ".join(against),
    )


def cells(cells):
    """All cells in one line."""
    known = [value for facts in cells if (value := facts.times(facts.best_peer()))]
    if len(known) < 2:
        return None
    ours = [facts.us(OURS) for facts in cells]
    return (
        f"the same in {len(known)} cells: traces, capacities, pages of 1, 16, 64 tokens, requests "
        "in flight",
        f"mean {number(min(ours))} to {number(max(ours))} us",
        f"the best peer takes {times(min(known))} to {times(max(known))}",
    )


def match(found):
    """A long prompt, in one node and in many."""
    ends = ("match", LONG), ("match-nodes", 256)
    ours = [found.value(name, PAGE, POOL, size) for name, size in ends]
    floors = [found.ratio(name, PAGE, POOL, FLOOR, size) for name, size in ends]
    peers = [found.best_peer(name, PAGE, size) for name, size in ends]
    if None in (*ours, *floors, *peers):
        return None
    slower = [peer / own for peer, own in zip(peers, ours, strict=True)]
    return (
        "look up 131,072 cached tokens, page 16, in 1 node / in 256",
        f"{number(ours[0])} / {number(ours[1])} us",
        f"{number(floors[0])} / {number(floors[1])} x memcmp and copy of the page ids; the best "
        f"peer takes {times(slower[0])} / {times(slower[1])}",
    )


def eviction(found):
    """One page of many."""
    ours = found.value("evict-one", PAGE, PARTS, LEAVES)
    same = found.ratio("evict-one", PAGE, RUST, PARTS, LEAVES // 10)
    if ours is None or same is None:
        return None
    return (
        f"evict one page of {LEAVES:,} leaves",
        f"{number(ours)} us",
        f"of {LEAVES // 10:,} leaves, SGLang's Rust tree takes {times(same)}",
    )


def memory(found):
    """Own books, a cached token."""
    ours = found.value("memory", PAGE, OWN, PROMPT)
    peers = [found.value("memory", PAGE, peer, PROMPT) for peer in PEERS]
    peers = [value for value in peers if value is not None]
    if ours is None or not peers:
        return None
    return (
        "memory beside K and V, full pool of 10M tokens, page 16",
        f"{number(ours)} bytes a token",
        f"peers {number(min(peers))} to {number(max(peers))}",
    )


def step(found):
    """Host side of a decode step, both ways; without new pages, and with one for each row."""
    ours = [[found.value("step", panel, way, BATCH) for way in WAYS] for panel in STEPS]
    slower = [
        [found.ratio("step", panel, SGLANG_STEP, way, BATCH) for way in WAYS] for panel in STEPS
    ]
    if any(None in values for values in (*ours, *slower)):
        return None
    calm, busy = (" / ".join(map(number, values)) for values in ours)
    slower_calm, slower_busy = (" / ".join(map(times, values)) for values in slower)
    return (
        f"host side of a decode step, {BATCH} rows of 8,192 tokens, eager / for a graph",
        f"{calm} us; {busy} us if every row enters a page",
        f"SGLang's slots and page table, on a CPU, take {slower_calm}; {slower_busy}",
    )


def put(rows):
    """K and V into scattered pages."""
    return raced(rows, "put, 4,096 rows", "put of 4,096 rows of 2 KB, K and V, {}, one core")


def attention(rows):
    """One decode step of a small batch."""
    what = "decode attention, 8 rows of 2,048 tokens, {}, one core"
    return raced(rows, "decode, batch 8, 2,048 tokens", what)


def raced(rows, what, words, dtype="bfloat16"):
    """One race of the data path."""
    wanted = what, dtype, 1
    row = next((r for r in rows if (r["what"], r["dtype"], r["threads"]) == wanted), None)
    if row is None:
        return None
    others = ("NumPy", "NumPy"), ("torch", "torch"), ("copy", "a copy of the same bytes")
    return (
        words.format(dtype),
        seconds(row["seconds"]["kvpool"]["best"]),
        ", ".join(
            f"{name} takes {number(value)} x"
            for other, name in others
            if (value := ratio(row, other)) is not None
        ),
    )
