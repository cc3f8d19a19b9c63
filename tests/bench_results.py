"""Results that are made up, for the tests of `bench.report`: each verdict of theirs is known."""

from bench.report.plan import Piece
from bench.report.results import Results
from bench.step import WAYS

MACHINE = {
    "processor": "a processor",
    "cores": 2,
    "caches": {"L2 unified": "1024K"},
    "memory_gb": 8.0,
    "system": "Linux x86_64",
    "libc": "glibc 2.36",
    "python": "3.11.7",
    "load_before": [0.5, 0.4, 0.3],
    "kernel": "6.1",
}


def piece(part, name="all", *command):
    return Piece(part, name, command or ("-m", f"bench.{part}"), 1.0)


def stamp(of, source="abc"):
    return {
        "date": "2026-01-02",
        "command": of.text,
        "source": source,
        "machine": MACHINE,
        "versions": {"kvpool": "0.1.0"},
        "seconds": 60,
    }


def contender(name, mean, hit_rate, *, p99=None):
    figures = {"p50": mean / 2, "p99": p99 or 3 * mean, "mean": mean}
    nothing = dict.fromkeys(figures, 0.0)
    us = dict.fromkeys(("match", "lock", "prefill", "finish"), nothing)
    return {
        "name": name,
        "us": us | {"alloc": figures, "total": figures},
        "requests_per_s": 1e6 / mean,
        "hit_rate": hit_rate,
        "faults": {"not exact LRU": 0} if name.startswith(("kvpool", "floor")) else {},
        "bytes_per_cached_token": 5.0,
        "notes": [f"{name}: a note"],
    }


def cell(trace, capacity, page_size, window, *rows):
    return {
        "trace": trace,
        "capacity": capacity,
        "page_size": page_size,
        "window": window,
        "requests": 100,
        "left_out": 0,
        "prompt_tokens": 1_000_000,
        "runs": 3,
        "exact_lru_hit_rate": 0.3,
        "unlimited_hit_rate": 0.4,
        "machine": MACHINE,
        "rows": list(rows),
    }


def race(what, threads=1, dtype="float32", **seconds):
    found = {name.replace("_", ", "): {"best": value} for name, value in seconds.items()}
    return {"what": what, "dtype": dtype, "threads": threads, "bytes": 1 << 20, "seconds": found}


def curve(subject, panel, name, points):
    points = [{"size": size, "median": value} for size, value in points.items()]
    return {"subject": subject, "panel": panel, "contender": name, "unit": "us", "points": points}


def step_row(way, stages):
    shape = {"batch": 256, "length": 8_192, "crossing": "none crosses", "way": way}
    return {
        "name": "a row",
        "value": 7.0,
        "ratio": 2.0,
        "stages": dict.fromkeys(stages, 3.5),
    } | shape


CELLS = {
    "synthetic:1M:p1:w32": cell(
        *("synthetic", 1_000_000, 1, 32),
        contender("kvpool", 10.0, 0.10),
        contender("kvpool-checkpoint", 13.0, 0.20),
        contender("sglang-py", 45.0, 0.20),
    ),
    "conversation:10M:p16:w1": cell(
        *("conversation", 10_000_000, 16, 1),
        contender("floor", 5.0, 0.3),
        contender("kvpool", 10.0, 0.3, p99=50.0),
        contender("kvpool-shuffled", 16.0, 0.3),
        contender("sglang-rust", 160.0, 0.2999, p99=400.0),
        contender("vllm-sha256", 900.0, 0.31),
    ),
}
PROGRAMS = {  # what the programs write
    "limits": {"title": "limits", "rows": [{"name": "copy 4 KB", "value": 1 / 3, "ratio": 1.0}]},
    "step": {"title": "step", "rows": [step_row(way, names) for way, names in WAYS.items()]},
    "data_path": {
        "machine": MACHINE,
        "versions": {},
        "rows": [
            race("put, 4,096 rows", kvpool=1e-3, NumPy=2e-3, torch=3e-3, copy=0.8e-3),
            race("put, 4,096 rows", 2, kvpool=1e-3, NumPy=0.9e-3, torch=3e-3, copy=0.4e-3),
            race("get, 4,096 rows", kvpool=1e-3, NumPy=2e-3, copy=0.2e-3, copy_fresh=0.9e-3),
            race("decode, batch 1, 2,048 tokens", kvpool=2e-3, torch=1e-3),
            race("decode, batch 8, 2,048 tokens", kvpool=1e-3, torch=5e-3),
        ],
    },
}
CURVES = {
    "match": [
        curve("match", "page 16", name, {131_072: value})
        for name, value in (("floor", 10.0), ("kvpool", 14.0), ("sglang-py", 70.0))
    ],
    "step": [
        curve("step", f"page 16, {words}", name, {256: value})
        for words, eager in (("no row enters a page", 10.0), ("every row enters a page", 30.0))
        for name, value in (("kvpool", eager), ("kvpool, graph", 12.0), ("sglang-py", 300.0))
    ],
}


def made_up_results(folder):
    """Results in a folder, written piece by piece."""
    found = Results(folder)
    for name, values in CELLS.items():
        of = piece("replay", name)
        # A quick run has names of its own for the cells.
        found.keep(of, {"title": "replay", "cells": {f"{name}:first9": dict(values)}}, stamp(of))
    for name, curves in CURVES.items():
        of = piece("growth", name)
        found.keep(of, {"machine": MACHINE, "versions": {}, "curves": curves}, stamp(of))
    for name, values in PROGRAMS.items():
        found.keep(piece(name), values, stamp(piece(name)))
    return found
