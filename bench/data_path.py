"""The CPU data path: rows in and out of the pool, FP8, and attention over pages, raced.

`python -m bench.data_path [--quick] [--json [FILE]]` prints a table. The contenders of a row take
turns within one process, serially and on all cores, and the best of their samples counts: on a
machine that others use too, it is what repeats. Ratios above 1 say that kvpool is faster. `copy`
copies the same bytes to memory that was touched before, `copy, fresh` to new memory, as a get
does. Without torch its columns are left out.
"""

import argparse
import json
import os
import sys
from pathlib import Path

from bench.data import attend, moves
from bench.data.race import on_threads, torch
from bench.replay.machine import describe, versions

RESULTS = Path(__file__).parent / "results"
DTYPES = "float32", "bfloat16", "float8_e4m3fn", "float8_e5m2"
PACKAGES = "numpy", "numba", "llvmlite", "ml_dtypes", "torch"
# (batch, tokens, queries of each row)
SHAPES = [(batch, length, 1) for length in (2_048, 16_384) for batch in (1, 8, 32)]
SHAPES += [(1, 2_048, 512), (1, 16_384, 512)]
QUICK_SHAPES = [(1, 64, 1), (2, 640, 1), (1, 128, 32)]
# The pool, what torch gathers of it, its dense copy, and steps of a decoding.
ROOM = 5


def races(options):
    """Every race, one at a time: the arrays of one are gone before the next is made."""
    for dtype in options.dtypes:
        if "moves" in options.parts:
            yield from moves.races(dtype, 64 if options.quick else 4_096)
        if "attention" in options.parts:
            for shape in QUICK_SHAPES if options.quick else SHAPES:
                gigabytes = ROOM * attend.num_bytes(dtype, *shape[:2]) / 2**30
                if gigabytes > free_gigabytes():
                    print(f"left out: {dtype}, {shape} takes {gigabytes:.0f} GB", file=sys.stderr)
                    continue
                yield from attend.race(dtype, *shape)


def free_gigabytes():
    """Memory that is available, where the system tells; else endless."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return float("inf")
    found = dict(line.split(":") for line in lines)
    return int(found["MemAvailable"].split()[0]) / 2**20


def measure(options):
    """The rows of the result."""
    cores = len(os.sched_getaffinity(0))
    rows = []
    for race in races(options):
        for num_threads in sorted({1, cores}):
            with on_threads(num_threads):
                seconds = race.run(options.budget)
            rows.append(
                {
                    "what": race.what,
                    "dtype": race.dtype,
                    "threads": num_threads,
                    "bytes": race.num_bytes,
                    "seconds": seconds,
                }
            )
            print(line(rows[-1]), flush=True)
    return rows


def line(row):
    """A row of the table: kvpool's time and bandwidth, and the others' as multiples of it."""
    best = {name: found["best"] for name, found in row["seconds"].items()}
    ours = best.pop("kvpool")
    number = f"{ours * 1e3:9.3f} ms" if ours > 1e-4 else f"{ours * 1e6:9.2f} us"
    others = "  ".join(f"{name} {seconds / ours:.2f}" for name, seconds in best.items())
    return (
        f"{row['what']:<34} {row['dtype']:<14} {row['threads']:>3}  {number} "
        f"{row['bytes'] / ours / 1e9:7.2f} GB/s  x  {others}"
    )


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="tiny sizes: does it run?")
    parser.add_argument(
        "--json",
        metavar="FILE",
        nargs="?",
        const=RESULTS / "data_path.json",
        help="also write all samples' best and median there (default: bench/results)",
    )
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=DTYPES, metavar="DTYPE")
    parser.add_argument(
        "--parts", nargs="+", choices=("moves", "attention"), default=("moves", "attention")
    )
    parser.add_argument("--budget", type=float, help="seconds a race and number of threads")
    options = parser.parse_args(argv)
    if options.budget is None:
        options.budget = 0.01 if options.quick else 3.0
    if torch is None:
        print("torch is not installed: its columns are left out", file=sys.stderr)
    print(
        "what, dtype, threads, kvpool's best, its bandwidth; others as multiples of kvpool's time"
    )
    result = {"machine": describe(), "versions": versions(PACKAGES), "rows": measure(options)}
    if options.json:
        path = Path(options.json)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
