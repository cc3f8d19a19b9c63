"""What a picture says, in one line, from its own numbers."""

from bench.curves.collisions import HASH, RANDOM
from bench.curves.footprint import OWN
from bench.curves.prompts import FROM_A_LIST
from bench.curves.subject import FLOOR, PEERS, POOL


def of(subject, curves):
    """The title of a subject's picture."""
    special = {"list": _list, "checkpoint": _growth, "collisions": _collisions, "memory": _memory}
    found = {
        (curve["contender"], curve["panel"], point["size"]): point["median"]
        for curve in curves
        for point in curve["points"]
    }
    text = special[subject.name](found) if subject.name in special else _against(subject, found)
    return f"{subject.title}: {text}" if text else subject.title


def short(size):
    """1,024 as 1k, 1,048,576 and 1,000,000 as 1M."""
    size = round(size)
    for base in (1_024, 1_000):
        for letter, power in (("M", 2), ("k", 1)):
            if size >= base**power and size % base**power == 0:
                return f"{size // base**power}{letter}"
    return f"{size:,}"


def plain(value):
    """1,000,000 and 0.1, without powers of ten."""
    return f"{value:,.0f}" if value >= 1 else f"{value:g}"


def _span(values, form):
    """A range in words, or one value if they look alike."""
    low, high = form(min(values)), form(max(values))
    return low if low == high else f"{low} to {high}"


def _times(value):
    return f"{value:,.0f}" if value >= 9.95 else f"{value:.1f}"


def _against(subject, found):
    """Beside the best peer, and the floor, at the largest size that they share with ours."""
    ours = subject.headline
    faster, above = [], []
    for panel in dict.fromkeys(key[1] for key in found):
        points = {
            size: v for (name, where, size), v in found.items() if (name, where) == (ours, panel)
        }
        peers = {}
        for (name, where, size), value in found.items():
            if name in PEERS and where == panel and size in points:
                peers[size] = min(value, peers.get(size, value))
        if peers:
            faster.append(peers[max(peers)] / points[max(peers)])
        floors = {
            size: found[FLOOR, panel, size] for size in points if (FLOOR, panel, size) in found
        }
        if floors:
            above.append(points[max(floors)] / floors[max(floors)])
    parts = []
    if faster:
        parts.append(f"{_span(faster, _times)} times faster than the best peer")
    if above:
        parts.append(f"{_span(above, _times)} times the floor")
    if not parts:
        return ""
    name = "kvpool" if ours == POOL else "kvpool's tree"
    return f"{name} is {', '.join(parts)}, at the largest size shared"


def _list(found):
    size = max(key[2] for key in found)
    panel = next(iter(found))[1]
    if any((name, panel, size) not in found for name in (FROM_A_LIST, POOL)):
        return ""
    extra = (found[FROM_A_LIST, panel, size] - found[POOL, panel, size]) / size * 1e3
    return f"{extra:.1f} ns a token more than an int32 array, at {size:,}"


def _growth(found):
    points = {size: v for (name, _, size), v in found.items() if name == POOL}
    if len(points) < 2:
        return ""
    values = [
        [v for (name, _, size), v in found.items() if name == POOL and size == end]
        for end in (min(points), max(points))
    ]
    small, large = (_span(part, _times) for part in values)
    return f"{small} us after {short(min(points))} pages, {large} us after {short(max(points))}"


def _collisions(found):
    size = max(key[2] for key in found)
    bad = [v for (name, _, n), v in found.items() if name == HASH and n == size]
    good = [v for (name, _, n), v in found.items() if name == RANDOM and n == size]
    if not bad or not good:
        return ""
    return (
        f"{_span(bad, _times)} us a look-up among {size:,} of one hash, "
        f"{_span(good, _times)} us among random ones"
    )


def _memory(found):
    largest = max(key[2] for key in found)
    parts = []
    for panel in dict.fromkeys(key[1] for key in found):
        ours = found.get((POOL, panel, largest), found.get((OWN, panel, largest)))
        peers = [
            v
            for (name, where, n), v in found.items()
            if name in PEERS and (where, n) == (panel, largest)
        ]
        if ours is not None:
            beside = f" (peers {_span(peers, lambda value: f'{value:.0f}')})" if peers else ""
            parts.append(f"{ours:.1f} at {panel}{beside}")
    return f"kvpool holds {', '.join(parts)} bytes a token"
