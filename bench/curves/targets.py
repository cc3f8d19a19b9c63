"""What the curves should reach, and whether they do.

A target is often measured in several ways: each is a row, and rows of one target share its `line`.
"""

from bench.curves.allocators import SHUFFLED
from bench.curves.footprint import OWN
from bench.curves.prompts import FROM_A_LIST
from bench.curves.steps import SGLANG as SGLANG_STEP
from bench.curves.steps import WAYS
from bench.curves.subject import FLOOR, LONG, PARTS, PEERS, POOL

MET, MISSED, UNKNOWN = "met", "MISSED", "not measured"
OURS = {POOL: "pool, bind + unbind", PARTS: "RadixCache"}


class Found:
    """The medians of all curves."""

    def __init__(self, curves):
        self.medians = {
            (curve["subject"], curve["panel"], curve["contender"], point["size"]): point["median"]
            for curve in curves
            for point in curve["points"]
        }

    def value(self, subject, panel, contender, size):
        """The median of one point, or None."""
        return self.medians.get((subject, panel, contender, size))

    def ratio(self, subject, panel, above, below, size):
        """How many times the one contender is the other, or None."""
        values = (self.value(subject, panel, name, size) for name in (above, below))
        return _divide(*values)

    def best_peer(self, subject, panel, size, peers=PEERS):
        """The smallest median of a peer, or None."""
        values = [self.value(subject, panel, peer, size) for peer in peers]
        return min((value for value in values if value is not None), default=None)


def _divide(above, below):
    return None if above is None or below is None else above / below


def verdicts(curves):
    """The rows of `judged`, of all targets that curves can tell."""
    found = Found(curves)
    return [
        row for part in (_match, _evict, _pages, _list, _memory, _steps) for row in part(found)
    ]


def judged(line, what, value, limit, form="{:.2f}", at_least=False):
    """A row of a table, and the numbers behind it; a value of None was not measured."""
    sign = ">=" if at_least else "<="
    row = {"line": line, "what": what, "target": f"{sign} {form.format(limit)}"}
    row |= {"value": value, "limit": limit}
    if value is None:
        return row | {"measured": "", "verdict": UNKNOWN}
    good = value >= limit if at_least else value <= limit
    measured = form.format(value)
    if not good and measured == form.format(limit):
        measured = f"{value:.4g}"  # a miss by little should look like one
    return row | {"measured": measured, "verdict": MET if good else MISSED}


def _match(found):
    cases = (("match", LONG, "1 node", 1.5, 4), ("match-nodes", 256, "256 nodes", 2.5, 8))
    for subject, size, words, limit, _ in cases:
        for page_size in (16, 64, 1):
            panel = f"page {page_size}"
            for ours, name in OURS.items():
                yield judged(
                    f"match of 128k cached tokens, {words}: times memcmp and copy of the ids",
                    f"128k match, {words}, {panel}, {name}: times the floor",
                    found.ratio(subject, panel, ours, FLOOR, size),
                    limit,
                )
    for subject, size, words, _, times in cases:
        for ours, name in OURS.items():
            best = found.best_peer(subject, "page 16", size)
            yield judged(
                f"match of 128k cached tokens, {words}, page 16: times faster than the best peer",
                f"128k match, {words}, page 16, {name}: times faster than the best peer",
                _divide(best, found.value(subject, "page 16", ours, size)),
                times,
                "{:.1f}",
                at_least=True,
            )


def _evict(found):
    for page_size in (16, 64, 1):
        panel = f"page {page_size}"
        values = [
            found.value("evict-one", panel, PARTS, size) for size in (10_000, 100_000, 1_000_000)
        ]
        worst = None if None in values else max(values)
        growth = None if None in values else max(values) / values[0]
        what = "evict one page, 10k to 1M leaves"
        yield judged(f"{what}, mean of 1,000: us", f"{what}, {panel}: us", worst, 1.0)
        yield judged(f"{what}: growth", f"{what}, {panel}: growth", growth, 3.0)


def _pages(found):
    peers = [peer for peer in PEERS if peer != "sglang-rust"]
    for verb in ("take", "give"):
        for page_size in (16, 64):
            for tokens in ("1M", "10M"):
                panel = f"page {page_size}, {tokens} tokens"
                for size, number, limit in ((1, "1 page", 0.5), (8_192, "8,192 pages", 3.0)):
                    for ours, words in ((POOL, "in order"), (SHUFFLED, "shuffled")):
                        yield judged(
                            f"take or give {number}, page 16 and 64: us",
                            f"{verb} {size:,}, {panel}, {words}: us",
                            found.value(verb, panel, ours, size),
                            limit,
                        )
                sizes = {key[3] for key in found.medians if key[:2] == (verb, panel)}
                times = [
                    _divide(
                        found.best_peer(verb, panel, size, peers),
                        found.value(verb, panel, POOL, size),
                    )
                    for size in sizes
                ]
                known = [value for value in times if value is not None]
                yield judged(
                    "take or give 1 to 8,192 pages: times faster than the best peer",
                    f"{verb} 1 to 8,192, {panel}: times faster than the best peer, least",
                    min(known, default=None),
                    1.0,
                    "{:.1f}",
                    at_least=True,
                )


def _list(found):
    for size in (1_024, 8_192, LONG):
        values = [found.value("list", "page 16", name, size) for name in (FROM_A_LIST, POOL)]
        extra = None if None in values else (values[0] - values[1]) * 1_000 / size
        yield judged(
            "prompt as a Python list: ns a token on top",
            f"prompt of {size:,} as a list: ns a token on top",
            extra,
            5.0,
        )


def _memory(found):
    for page_size, limit in ((16, 5.5), (1, 13.0)):
        for name, words in (
            (OWN, "own books"),
            (POOL, "process"),
            (SHUFFLED, "process, shuffled"),
        ):
            whose = "own accounting" if name == OWN else "growth of the process"
            yield judged(
                f"memory of a full pool of 10M, page {page_size}, {whose}: bytes a cached token",
                f"full pool of 10M, page {page_size}, {words}: bytes a cached token",
                found.value("memory", f"page {page_size}", name, 8_192),
                limit,
            )


def _steps(found):
    for words in ("no row enters a page", "every row enters a page"):
        for ours, way in WAYS.items():
            yield judged(
                f"decode step, batch 256, {way}: times faster than SGLang's slots and page table",
                f"decode step, batch 256, {way}, {words}: times faster than SGLang's",
                found.ratio("step", f"page 16, {words}", SGLANG_STEP, ours, 256),
                20.0,
                "{:.1f}",
                at_least=True,
            )
