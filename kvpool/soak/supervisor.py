"""The parent of a soak: starts the traffic in a process of its own, and sees it crash or hang."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kvpool.soak.script import program
from kvpool.soak.session import Options
from kvpool.soak.shrink import Shrinker
from kvpool.soak.signals import INTERRUPTED, exit_code_of, held_back
from kvpool.soak.trace import PoolShape, Trace, TraceError
from kvpool.soak.worker import FILES

# The parent's path, not the environment's: both must find the same kvpool.
_BOOT = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from kvpool.soak.worker import main
sys.exit(main(sys.argv[2]))
"""
_POLL_S = 0.05
_NO_NEWS = "Extension modules:"
_TAIL = 4000  # characters of what a process said last


class Supervisor:
    """Runs workers.

    Parameters
    ----------
    options : Options
        What to run.
    folder : Path
        Where files go.
    operation_seconds : float
        After so long without a new operation a worker hangs.
    """

    def __init__(self, options: Options, folder: Path, operation_seconds: float) -> None:
        self.options = options
        self.folder = folder
        self.operation_seconds = operation_seconds
        self._said = folder / "stderr.txt"
        self._interrupt: KeyboardInterrupt | None = None

    def run(self, replay: str | None = None) -> tuple[int, dict[str, Any]]:
        """Soak, or replay a file.

        Returns
        -------
        tuple
            Exit code, and the result as plain data. A finding comes before an interrupt.
        """
        for name in (FILES["running"], FILES["result"]):
            (self.folder / name).unlink(missing_ok=True)
        mode = {"mode": "replay", "trace": replay} if replay else {"mode": "soak"}
        code, hangs = self._wait(self._start(mode, to_file=False), watched=True)
        result = self.folder / FILES["result"]
        found = json.loads(result.read_text(encoding="utf-8")) if result.exists() else {}
        if self._interrupt is not None and code != 1:
            return exit_code_of(self._interrupt), found
        if code in (0, 1, 2, INTERRUPTED) and not hangs:
            # Without a result it did not get so far: Python itself failed, and has said why.
            return (code if found or code in (2, INTERRUPTED) else 2), found
        return 1, {"profiles": {}, "failure": self._crash(code, hangs)}

    def script_shows_it(self) -> bool | None:
        """Whether the script of the failure fails in a process of its own; None: interrupted."""
        path = self.folder / FILES["script"]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        try:
            ran = subprocess.run(
                [sys.executable, path],
                env=environment,
                capture_output=True,
                timeout=self.operation_seconds,
                check=False,
            )
            return ran.returncode != 0
        except subprocess.TimeoutExpired:
            return True
        except KeyboardInterrupt:
            return None  # what was found is not lost

    # ---- processes

    def _start(
        self, task: dict[str, Any], to_file: bool = True, answers: bool = False
    ) -> subprocess.Popen[bytes]:
        more = {"folder": str(self.folder), "parent": os.getpid()}
        document = json.dumps(asdict(self.options) | task | more)
        command = [sys.executable, "-c", _BOOT, json.dumps(sys.path), document]
        pipe = subprocess.PIPE if answers else subprocess.DEVNULL
        # A worker that is asked to end reports what it has done: not before it can.
        with ExitStack() as stack:
            said = stack.enter_context(self._said.open("wb")) if to_file else None
            stack.enter_context(held_back())
            return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=said)

    def _wait(self, child: subprocess.Popen[bytes], watched: bool) -> tuple[int, bool]:
        """Exit code, and whether it hung. A hang is ended by a signal that shows where."""
        started = time.time()
        running = self.folder / FILES["running"]
        while True:
            try:
                return child.wait(_POLL_S), False
            except subprocess.TimeoutExpired:
                pass
            except KeyboardInterrupt as interrupt:
                self._interrupt = interrupt
                return self._end(child), False
            if not watched or not running.exists():
                continue
            if time.time() - max(running.stat().st_mtime, started) > self.operation_seconds:
                child.send_signal(signal.SIGABRT)
                child.wait()
                return child.returncode, True

    def _end(self, child: subprocess.Popen[bytes]) -> int:
        """End a child, which reports what it has done so far, if that is anything."""
        if (self.folder / FILES["running"]).exists():
            # From a terminal it has the signal too; it heeds the first.
            child.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired, KeyboardInterrupt):
                return child.wait(self.operation_seconds)
        child.kill()
        return child.wait()

    # ---- a crash

    def _left(self) -> Trace:
        """What the worker was about to play when it ended."""
        try:
            left = Trace.read(self.folder / FILES["running"])
        except (OSError, TraceError):
            left = Trace(PoolShape(), [])  # it ended before its first pool, as a smaller one may
        # Making the pool may be what crashes: a trace that can be replayed has an operation.
        return Trace(left.shape, left.operations or [["check_now"]])

    def _crash(self, code: int, hangs: bool) -> dict[str, Any]:
        """Make it short and write its script; each trial is a process."""
        whole = self._left()
        whole.write(self.folder / FILES["whole"])
        path = self.folder / FILES["failure"]

        wanted = -signal.SIGALRM if hangs else code
        task = {"mode": "trials", "limit_s": max(1, round(self.operation_seconds))}
        with self._start(task, answers=True) as trials:

            def fails(candidate: Trace) -> bool:
                candidate.write(path)
                assert trials.stdin is not None
                assert trials.stdout is not None
                trials.stdin.write(f"{path}\n".encode())
                trials.stdin.flush()
                return trials.stdout.readline().strip() == str(wanted).encode()

            shrunk = Shrinker(whole, fails, self.options.shrink_seconds).shortest()
        shrunk.write(path)
        lines_path = self.folder / FILES["lines"]
        lines_path.write_text("[]", encoding="utf-8")
        task |= {"mode": "script", "trace": str(path)}
        again, _ = self._wait(self._start(task), watched=False)
        # A script that hangs is ended by faulthandler, which shows where.
        shown = "again" if again == (1 if hangs else code) else "not again"
        lines = json.loads(lines_path.read_text(encoding="utf-8"))
        kind = "a hang" if hangs else f"a crash ({_signal_name(code)})"
        text = program(lines, shrunk.shape, kind)
        (self.folder / FILES["script"]).write_text(text, encoding="utf-8")
        words = self._said.read_text(encoding="utf-8", errors="replace")
        words = "".join(line for line in words.splitlines(True) if not line.startswith(_NO_NEWS))
        return {
            "profile": "",
            "kind": kind,
            "details": f"{shown} when it was replayed",
            "traceback": words.strip()[-_TAIL:],
            "operations": len(whole.operations),
            "shrunk_operations": len(shrunk.operations),
        }


def _signal_name(code: int) -> str:
    with suppress(ValueError):
        return signal.Signals(-code).name
    return f"exit code {code}"
