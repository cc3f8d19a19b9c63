"""Measuring: one program after the other, each in its own process, with a line of progress."""

import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path

from bench.replay.machine import describe, versions
from bench.report.sources import ROOT, source_hash

PACKAGES = "numpy", "numba", "llvmlite", "ml_dtypes", "torch", "sglang", "vllm"
LAST_LINES = 15  # of what a program said before it failed


def measure(pieces, results, logs, *, again=False, say=print):
    """Measure what is not kept; the pieces that failed. An interruption loses one piece only."""
    source = source_hash()
    missing = [piece for piece in pieces if again or not results.is_kept(piece, source)]
    guess = sum(minutes_of(piece, results) for piece in missing)
    say(f"sources {source}: {len(pieces)} pieces, {len(pieces) - len(missing)} are kept")
    if missing:
        say(f"{len(missing)} to measure, in about {guess:.0f} minutes")
    failed = []
    for number, piece in enumerate(missing, 1):
        say(
            f"[{number:2}/{len(missing)}] {piece}, about {minutes_of(piece, results):.1f} min ... "
        )
        made = {
            "date": date.today().isoformat(),
            "command": piece.text,
            "source": source,
            "machine": describe() | {"kernel": platform.release()},
            "versions": versions(PACKAGES),
        }
        start = time.monotonic()
        found = run(piece, logs, say)
        seconds = round(time.monotonic() - start)
        if found is None:
            failed.append(piece)
            continue
        if source_hash() != source:
            raise SystemExit(f"the sources changed while {piece} was measured: it is not kept")
        results.keep(piece, found, made | {"seconds": seconds})
        say(f"        {seconds // 60} min {seconds % 60} s")
    return failed


def minutes_of(piece, results):
    """What it took the last time, or a guess."""
    made = results.made(piece.part).get(piece.name, {})
    same = made.get("command") == piece.text
    return made["seconds"] / 60 if same else piece.minutes


def run(piece, logs, say):
    """What the program wrote, or None if it failed; all that it said is in a log."""
    logs.mkdir(parents=True, exist_ok=True)
    log = logs / f"{str(piece).replace(' ', '_').replace(':', '_')}.log"
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder, "found.json")
        command = [sys.executable, *piece.command, "--json", str(target)]
        with open(log, "w") as file:
            process = subprocess.run(command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT)
        if process.returncode == 0 and target.exists():
            return json.loads(target.read_text())
    say(f"        failed with {process.returncode}; the end of {os.path.relpath(log)}:")
    for line in log.read_text(errors="replace").splitlines()[-LAST_LINES:]:
        say(f"        | {line}")
    return None
