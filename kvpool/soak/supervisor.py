"""The parent of a soak: starts the traffic in a process of its own, and sees it crash or hang."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kvpool.soak.script import program
from kvpool.soak.session import Options
from kvpool.soak.shrink import Shrinker
from kvpool.soak.trace import Trace
from kvpool.soak.worker import FILES, INTERRUPTED

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

    def run(self, replay: str | None = None) -> tuple[int, dict[str, Any]]:
        """Soak, or replay a file.

        Returns
        -------
        tuple
            Exit code, and the result as plain data.
        """
        mode = {"mode": "replay", "trace": replay} if replay else {"mode": "soak"}
        code, hangs = self._wait(self._start(mode, to_file=False), watched=True)
        if code in (0, 1, 2, INTERRUPTED) and not hangs:
            result = self.folder / FILES["result"]
            # Without a result it did not get so far: Python itself failed, and has said why.
            found = json.loads(result.read_text(encoding="utf-8")) if result.exists() else {}
            return (code if found or code in (2, INTERRUPTED) else 2), found
        return 1, {"profiles": {}, "failure": self._crash(code, hangs)}

    def script_shows_it(self) -> bool:
        """Whether the script of the failure fails in a process of its own."""
        path = self.folder / FILES["script"]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        with suppress(subprocess.TimeoutExpired):
            ran = subprocess.run(
                [sys.executable, path],
                env=environment,
                capture_output=True,
                timeout=self.operation_seconds,
                check=False,
            )
            return ran.returncode != 0
        return True

    # ---- processes

    def _start(
        self, task: dict[str, Any], to_file: bool = True, answers: bool = False
    ) -> subprocess.Popen[bytes]:
        document = json.dumps(asdict(self.options) | task | {"folder": str(self.folder)})
        command = [sys.executable, "-c", _BOOT, json.dumps(sys.path), document]
        pipe = subprocess.PIPE if answers else subprocess.DEVNULL
        if not to_file:
            return subprocess.Popen(command, stdin=pipe, stdout=pipe)
        with self._said.open("wb") as said:
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
            except KeyboardInterrupt:
                # The child has it too, and reports what it has done so far.
                with suppress(subprocess.TimeoutExpired, KeyboardInterrupt):
                    return child.wait(self.operation_seconds), False
                child.kill()
                return INTERRUPTED, False
            if not watched or not running.exists():
                continue
            if time.time() - max(running.stat().st_mtime, started) > self.operation_seconds:
                child.send_signal(signal.SIGABRT)
                child.wait()
                return child.returncode, True

    # ---- a crash

    def _crash(self, code: int, hangs: bool) -> dict[str, Any]:
        """Make it short and write its script; each trial is a process."""
        shutil.copy(self.folder / FILES["running"], self.folder / FILES["whole"])
        whole = Trace.read(self.folder / FILES["whole"])
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

            shrunk = Shrinker(whole, fails, self.options.shrink_seconds).run()
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
