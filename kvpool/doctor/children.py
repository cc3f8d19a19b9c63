"""Run checks in processes of their own, so that a broken package takes nothing down with it.

A library that is installed badly may raise anything, print anything, crash, or hang in a driver.
`Children` starts a Python process for each check, all at once, with the module path of this one;
whatever becomes of it is an `Answer`.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import IO, Any

# The parent's path, not the environment's: a check must see the packages that this process sees.
# Before it is set, nothing may be imported that a file in the current folder could stand for.
_BOOT = """
import sys
sys.path[:] = eval(sys.argv[1])
from kvpool.doctor.checks import serve
serve(*sys.argv[2:])
"""


@dataclass(frozen=True)
class Answer:
    """What came of a check.

    Attributes
    ----------
    facts : dict
        What it returned; empty if it failed.
    error : str
        Why it failed, on one line; empty if it did not.
    warnings : list of str
        Warnings that were shown meanwhile.
    """

    facts: dict[str, Any] = field(default_factory=dict)
    error: str = ""
    warnings: list[str] = field(default_factory=list)


NOT_ASKED = Answer()
"""Of a check that was not started."""


class _Child:
    def __init__(self, check: str, arguments: list[Any], timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.ends_at = time.monotonic() + timeout_s
        # Files, not pipes: nobody reads while the child writes.
        self.out: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
        self.errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
        path = repr([str(place) for place in sys.path])
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-c", _BOOT, path, check, json.dumps(arguments)],
                stdin=subprocess.DEVNULL,
                stdout=self.out,
                stderr=self.errors,
                # Compilers that a guest starts must end with it.
                start_new_session=True,
            )
        except BaseException:
            self._close_files()
            raise

    def answer(self) -> Answer:
        """Wait for the end, or for the time to be up."""
        try:
            code = self.process.wait(max(0.0, self.ends_at - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.kill()
            return Answer(error=f"no answer within {self.timeout_s:g} s")
        try:
            said = json.loads(_text(self.out))
            return Answer(said["facts"], said["error"], said["warnings"])
        except (ValueError, KeyError, TypeError):
            return Answer(error=_how_it_ended(code, _text(self.errors)))

    def kill(self) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def close(self) -> None:
        if self.process.poll() is None:
            self.kill()
        self._close_files()

    def _close_files(self) -> None:
        self.out.close()
        self.errors.close()


class Children:
    """Checks that run beside each other; whatever still runs at the end of the ``with`` is killed.

    Examples
    --------
    ::

        with Children() as children:
            children.start("torch", timeout_s=60)
            children.start("cupy", timeout_s=60)
            torch, cupy = children.answer("torch"), children.answer("cupy")
    """

    def __init__(self) -> None:
        self._children: dict[str, _Child | Answer] = {}

    def start(self, check: str, *arguments: Any, timeout_s: float) -> None:
        """Start a check of `kvpool.doctor.checks`; its time runs from now."""
        try:
            self._children[check] = _Child(check, list(arguments), timeout_s)
        except (OSError, ValueError) as error:
            # No interpreter to start (an embedded Python), no processes or files left.
            self._children[check] = Answer(error=f"no process could be started: {error}")

    def answer(self, check: str) -> Answer:
        """What came of a check; `NOT_ASKED` if it was not started. Waits for it."""
        child = self._children.get(check, NOT_ASKED)
        if isinstance(child, _Child):
            answer = child.answer()
            child.close()
            child = self._children[check] = answer
        return child

    def __enter__(self) -> Children:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for child in self._children.values():
            if isinstance(child, _Child):
                child.close()


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")


def _how_it_ended(code: int, errors: str) -> str:
    last = next((line.strip() for line in reversed(errors.splitlines()) if line.strip()), "")
    if code < 0:
        with suppress(ValueError):
            return f"its process died of {signal.Signals(-code).name}" + (last and f": {last}")
    return f"its process ended with exit code {code}" + (last and f": {last}")
