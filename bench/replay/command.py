"""The command: which cells and contenders, and where the results go."""

import argparse
import fnmatch
import json
import os
import sys
from pathlib import Path

from bench.replay import machine, tables
from bench.replay.cell import Cell, run_cell
from bench.replay.contender import PLACES, missing_packages
from bench.replay.trace import FOLDER_VARIABLE, MADE_UP, find_trace, read_trace

RESULTS = Path(__file__).resolve().parent.parent / "results" / "replay_peers.json"
TRACES = ("conversation", "synthetic")
CAPACITIES = (10_000_000, 1_000_000)
PAGE_SIZES = (16, 64, 1)
WINDOWS = (1, 32)
CONTENDERS = [name for name in PLACES if name != "vllm-xxhash"]
QUICK_CELL, QUICK_REQUESTS = "*:10M:p16:w1", 1_500


def parser():
    """Options of the command."""
    options = argparse.ArgumentParser(
        description="Replay request traces through kvpool and its peers, phase by phase.",
        epilog=f"Traces are looked for in the folder that {FOLDER_VARIABLE} names. A cell is "
        "called like conversation:10M:p16:w1 (trace, capacity, page size, requests in flight).",
    )
    say = options.add_argument
    say(
        "--trace",
        action="append",
        help=f"conversation, synthetic, {MADE_UP}, or a file; repeatable",
    )
    say("--cells", action="append", metavar="PATTERN", help="only cells like '*:10M:p16:*'")
    say("--contenders", metavar="A,B", help=f"of {', '.join(PLACES)}")
    say("--runs", type=int, help="times that each cell is run (3)")
    say("--limit", type=int, metavar="N", help="only the first N requests of a trace")
    say("--core", type=int, help="processor to run on; -1: any (the last one allowed)")
    say("--quick", action="store_true", help="one cell a trace, one run, few requests: a minute")
    say(
        "--json",
        type=Path,
        metavar="FILE",
        help="where cells are added (bench/results; quick: nowhere)",
    )
    say("--list", action="store_true", help="name the cells and stop")
    return options


def main(arguments=None):
    """Run the chosen cells; 1 if a contender's hits were wrong."""
    options = parser().parse_args(arguments)
    traces = options.trace or list(TRACES)
    patterns = options.cells or ([QUICK_CELL] if options.quick else ["*"])
    cells = {trace: chosen(trace, patterns) for trace in traces}
    if options.list:
        print(*(cell for found in cells.values() for cell in found), sep="\n")
        return 0
    names = contenders(options.contenders)
    limit = options.limit or (QUICK_REQUESTS if options.quick else None)
    target = options.json or (None if options.quick or limit else RESULTS)
    wrong = []
    for name, found in cells.items():
        if not found:
            continue
        try:
            trace = read_trace(find_trace(name), limit)
        except FileNotFoundError as error:
            print(error, file=sys.stderr)
            return 2
        for cell in found:
            on = machine.describe()
            result = run_cell(
                trace,
                cell,
                able(names, cell, asked=bool(options.contenders)),
                runs=options.runs or (1 if options.quick else 3),
                core=chosen_core(options.core),
                say=lambda text: print(text, file=sys.stderr, flush=True),
            )
            result["machine"] = on
            print(f"\n{tables.cell_text(result)}\n", flush=True)
            wrong += [f"{cell}: {fault}" for fault in tables.faults(result)]
            if target is not None:
                write(target, str(cell) if limit is None else f"{cell}:first{limit}", result)
    print(*wrong, sep="\n", end="\n" if wrong else "", file=sys.stderr)
    return 1 if wrong else 0


def chosen(trace, patterns):
    """Cells of a trace that match one of the patterns."""
    name = trace if trace in (*TRACES, MADE_UP) else Path(trace).stem
    cells = [
        Cell(name, capacity, page_size, window)
        for window in WINDOWS
        for capacity in CAPACITIES
        for page_size in PAGE_SIZES
    ]
    return [
        cell for cell in cells if any(fnmatch.fnmatch(str(cell), pattern) for pattern in patterns)
    ]


def contenders(wanted):
    """Names asked for, or all that are installed; says which are not."""
    names = wanted.split(",") if wanted else CONTENDERS
    if unknown := [name for name in names if name not in PLACES]:
        raise SystemExit(f"no contender {unknown[0]!r}; there are {', '.join(PLACES)}")
    missing = {name: packages for name in names if (packages := missing_packages(name))}
    for name, packages in missing.items():
        print(
            f"{name} is left out, `make bench-peers` brings {', '.join(packages)}", file=sys.stderr
        )
    return [name for name in names if name not in missing]


def able(names, cell, *, asked):
    """Those of `names` that can run in a cell, and that say something in it."""
    found = []
    for name in names:
        if name.startswith("vllm") and cell.page_size < 16:
            continue  # its blocks are larger
        if name == "kvpool-checkpoint" and cell.window == 1 and not asked:
            continue  # nobody is in flight to share with
        found.append(name)
    return found


def chosen_core(core):
    """The processor to pin to, or None."""
    if not hasattr(os, "sched_getaffinity") or core == -1:
        return None
    return max(os.sched_getaffinity(0)) if core is None else core


def write(path, key, result):
    """Add one cell to a file of results, over an earlier one of its name."""
    cells = json.loads(path.read_text())["cells"] if path.exists() else {}
    cells[key] = result
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"title": "replay of request traces", "cells": cells}, indent=1)
    path.write_text(f"{text}\n")
