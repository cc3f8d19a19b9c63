"""What the curves should reach, and whether they do."""

from bench.curves.allocators import SHUFFLED
from bench.curves.footprint import OWN
from bench.curves.prompts import FROM_A_LIST
from bench.curves.steps import SGLANG as SGLANG_STEP
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
    """One ``{what, target, measured, verdict}`` a target."""
    found = Found(curves)
    return [
        row for part in (_match, _evict, _pages, _list, _memory, _steps) for row in part(found)
    ]


def _row(what, value, limit, form="{:.2f}", at_least=False):
    sign = ">=" if at_least else "<="
    row = {"what": what, "target": f"{sign} {form.format(limit)}"}
    if value is None:
        return row | {"measured": "", "verdict": UNKNOWN}
    good = value >= limit if at_least else value <= limit
    return row | {"measured": form.format(value), "verdict": MET if good else MISSED}


def _match(found):
    cases = (("match", LONG, "1 node", 1.5, 4), ("match-nodes", 256, "256 nodes", 2.5, 8))
    for subject, size, words, limit, _ in cases:
        for page_size in (16, 64, 1):
            panel = f"page {page_size}"
            for ours, name in OURS.items():
                yield _row(
                    f"128k match, {words}, {panel}, {name}: times the floor",
                    found.ratio(subject, panel, ours, FLOOR, size),
                    limit,
                )
    for subject, size, words, _, times in cases:
        for ours, name in OURS.items():
            best = found.best_peer(subject, "page 16", size)
            yield _row(
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
        yield _row(f"evict one page, 10k to 1M leaves, {panel}: us", worst, 1.0)
        yield _row(f"evict one page, 10k to 1M leaves, {panel}: growth", growth, 3.0)


def _pages(found):
    peers = [peer for peer in PEERS if peer != "sglang-rust"]
    for verb in ("take", "give"):
        for page_size in (16, 64):
            for tokens in ("1M", "10M"):
                panel = f"page {page_size}, {tokens} tokens"
                for size, limit in ((1, 0.5), (8_192, 3.0)):
                    for ours, words in ((POOL, "in order"), (SHUFFLED, "shuffled")):
                        yield _row(
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
                yield _row(
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
        yield _row(f"prompt of {size:,} as a list: ns a token on top", extra, 5.0)


def _memory(found):
    for page_size, limit in ((16, 5.5), (1, 13.0)):
        for name, words in (
            (POOL, "process"),
            (SHUFFLED, "process, shuffled"),
            (OWN, "own books"),
        ):
            yield _row(
                f"full pool of 10M, page {page_size}, {words}: bytes a cached token",
                found.value("memory", f"page {page_size}", name, 8_192),
                limit,
            )


def _steps(found):
    for words in ("no row enters a page", "every row enters a page"):
        yield _row(
            f"decode step, batch 256, {words}: times faster than SGLang's",
            found.ratio("step", f"page 16, {words}", SGLANG_STEP, POOL, 256),
            20.0,
            "{:.1f}",
            at_least=True,
        )
