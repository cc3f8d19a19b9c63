"""The machine's own floor: what comparing, copying and writing memory costs, with no books kept.

`python -m bench.limits [--trace conversation] [--json FILE]` prints bytes compared, copied and
written at several sizes, first touches apart, and, if the trace is at hand, the floor of whole
requests: compare the hit, copy the new tokens, write the page ids.
"""

import argparse
import mmap
import sys

import numpy as np

from bench.clock import Table, interleave
from bench.replay.floor import MEMCMP, MEMMOVE, Floor, c_function
from bench.replay.oracle import replay_hits
from bench.replay.trace import find_trace, order_of_events, read_trace
from bench.replay.worker import Driver

SIZES = 4 << 10, 64 << 10, 512 << 10, 4 << 20, 64 << 20  # bytes
CAPACITY = 10_000_000  # tokens
PAGE_SIZES = 1, 16, 64
TURN = 1_000  # events between two collections of the floor's copies
US = 1e6

MEMSET = c_function("memset")


def primitives(table, rounds):
    """Compare, copy and write at each size; the call alone is the first row."""
    ones = np.ones(max(SIZES), np.uint8)
    twin, target = ones.copy(), ones.copy()
    one, two, three = (array.ctypes.data for array in (ones, twin, target))
    call = interleave({"call": lambda: MEMCMP(one, two, 0)}, rounds=rounds, repeat=100)["call"]
    table.add("one call into C through ctypes", call * US, "us")
    for size in SIZES:
        cases = {
            f"compare {size >> 10:,} KB": lambda size=size: MEMCMP(one, two, size),
            f"copy {size >> 10:,} KB": lambda size=size: MEMMOVE(three, one, size),
            f"write {size >> 10:,} KB": lambda size=size: MEMSET(three, 1, size),
            f"write {size >> 10:,} KB, first touch": (fresh_memory(size), first_touch(size)),
        }
        few = max(3, rounds * (64 << 10) // size) if size > 64 << 10 else rounds
        found = interleave(cases, rounds=min(rounds, few))
        copy = found[f"copy {size >> 10:,} KB"]
        for name, seconds in found.items():
            table.add(name, seconds * US, "us", ratio=seconds / copy, to="copy of these bytes")


def fresh_memory(size):
    """What maps memory that nobody has touched."""
    return lambda: mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE)


def first_touch(size):
    """What writes it; NumPy's view tells where it is."""

    def write(memory):
        view = np.frombuffer(memory, np.uint8)
        MEMSET(view.ctypes.data, 1, size)

    return write


def whole_requests(table, trace):
    """Mean, median and p99 of the floor of each request, at each page size, window 1."""
    for page_size in PAGE_SIZES:
        capacity = CAPACITY // page_size * page_size
        events = order_of_events(trace.lengths, window=1, capacity=capacity, page_size=page_size)
        # Hits at page 16 are near those of the others, and a hundred times faster to have.
        hits = replay_hits(trace, events, 16, capacity=CAPACITY // 16 * 16)
        driver = Driver(Floor(capacity, page_size), trace)
        for start in range(0, len(events), TURN):
            stretch = events[start : start + TURN]
            driver.contender.before_turn(trace, hits, stretch[::2, 1].tolist())
            driver.drive(stretch)
        seconds = driver.seconds[events[::2, 1]].sum(axis=1)
        for what, value in (
            ("mean", seconds.mean()),
            ("median", np.median(seconds)),
            ("p99", np.percentile(seconds, 99)),
        ):
            table.add(f"request of {trace.name}, page {page_size}, {what}", value * US, "us")


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", metavar="FILE", help="also write the table there")
    parser.add_argument("--rounds", type=int, default=200, help="samples a case")
    parser.add_argument("--trace", default="conversation", help="a name, a file, or made-up")
    parser.add_argument("--limit", type=int, help="only the first requests of it")
    options = parser.parse_args(argv)
    table = Table("limits of this machine, medians unless said otherwise, one thread")
    primitives(table, options.rounds)
    try:
        path = find_trace(options.trace)
    except FileNotFoundError as error:
        print(f"no floor of requests: {error}", file=sys.stderr)
    else:
        whole_requests(table, read_trace(path, options.limit))
    table.show()
    if options.json:
        table.write_json(options.json)


if __name__ == "__main__":
    main()
