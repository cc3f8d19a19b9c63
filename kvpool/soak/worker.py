"""The process in which the traffic runs: a crash of it is seen, and explained, by its parent."""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from kvpool.pool import KVCachePool
from kvpool.soak.player import Player
from kvpool.soak.session import Failure, Options, Outcome, kind_of, replay, run
from kvpool.soak.signals import INTERRUPTED, end_with, take_signals
from kvpool.soak.trace import Trace, TraceFile

FILES = {
    "running": "running.jsonl",
    "result": "result.json",
    "whole": "whole.jsonl",
    "failure": "failure.jsonl",
    "script": "failure.py",
    "lines": "lines.json",
}


class KeptLines(list[str]):
    """Lines of a script that a crash leaves in a file."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path

    def append(self, line: str) -> None:
        """Keep one more, before its call is made."""
        super().append(line)
        self._path.write_text(json.dumps(self), encoding="utf-8")


def main(task: str) -> int:
    """Do what a JSON document says; the exit code says what came of it.

    Parameters
    ----------
    task : str
        ``mode`` (soak, replay, trials or script), ``folder`` for files, ``trace`` for a replay
        or script, ``limit_s`` for trials and a script, ``parent`` without which it does not go
        on, and the fields of `Options`.
    """
    faulthandler.enable()
    todo = json.loads(task)
    end_with(todo.pop("parent"))
    folder, mode = Path(todo.pop("folder")), todo.pop("mode")
    path = todo.pop("trace", None)
    limit_s = todo.pop("limit_s", 0)
    options = Options(**(todo | {"profiles": tuple(todo["profiles"])}))
    if options.device == "cpu":
        # Imports and code from the cache, before anybody asks how long an operation takes.
        KVCachePool(1, 1, 1, 1, page_size=1).warm_up()
    if mode == "trials":
        return _serve_trials(options.device, limit_s)
    if mode == "script":
        trace = Trace.read(path)
        faulthandler.dump_traceback_later(limit_s, exit=True)
        Player(trace.shape, options.device, KeptLines(folder / FILES["lines"])).play(
            trace.operations
        )
        return 0
    outcome = Outcome()
    try:
        trace_file = TraceFile(folder / FILES["running"])
        take_signals()
        if mode == "replay":
            outcome = replay(Trace.read(path), options, trace_file)
        else:
            outcome.failure = run(options, trace_file, outcome.totals)
    except KeyboardInterrupt:
        outcome.interrupted = True
    _write(outcome, folder)
    if outcome.failure is not None:
        return 1
    return INTERRUPTED if outcome.interrupted else 0


def _serve_trials(device: str, limit_s: int) -> int:
    """Play the traces whose paths come in, each in a fork; answer how each fork ended.

    A fork has all that this process has imported and compiled: a trial takes milliseconds.
    """
    server = os.getpid()
    for line in sys.stdin:
        trace = Trace.read(line.rstrip("\n"))
        child = os.fork()
        if child == 0:
            end_with(server)
            signal.alarm(limit_s)
            os._exit(int(kind_of(trace, device) is not None))
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)
    return 0


def _write(outcome: Outcome, folder: Path) -> None:
    found: dict[str, Any] = {
        "profiles": {name: totals.as_dict() for name, totals in outcome.totals.items()}
    }
    if outcome.failure is not None:
        found["failure"] = _failure_files(outcome.failure, folder)
    (folder / FILES["result"]).write_text(json.dumps(found), encoding="utf-8")


def _failure_files(failure: Failure, folder: Path) -> dict[str, Any]:
    failure.whole.write(folder / FILES["whole"])
    failure.shrunk.write(folder / FILES["failure"])
    (folder / FILES["script"]).write_text(failure.script, encoding="utf-8")
    return {
        "profile": failure.profile,
        "kind": failure.kind,
        "details": failure.details,
        "traceback": failure.traceback,
        "operations": len(failure.whole.operations),
        "shrunk_operations": len(failure.shrunk.operations),
    }
