"""``python -m kvpool.soak``: arguments in, a table or a failure out."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from kvpool.device import device_of
from kvpool.soak.player import check_operations
from kvpool.soak.profiles import PROFILES
from kvpool.soak.session import Options
from kvpool.soak.signals import exit_code_of, held_back, orderly_end
from kvpool.soak.supervisor import Supervisor
from kvpool.soak.table import failure_text, table
from kvpool.soak.trace import Trace, TraceError
from kvpool.soak.worker import FILES

_GPU_NOTE = (
    "note: the soak has not run on a GPU yet; what it finds there first may be a fault of its own"
)


def parser() -> argparse.ArgumentParser:
    """The command's arguments."""
    made = argparse.ArgumentParser(
        prog="python -m kvpool.soak",
        description="Random traffic over real pools; each row of K and V that is read is checked.",
        epilog="Exit code: 0 nothing found, 1 found, 2 usage, 130 interrupted, 143 terminated.",
    )
    made.add_argument("--seconds", type=_seconds, default=60.0, help="in all (default: 60)")
    made.add_argument("--seed", type=int, default=0, help="the same seed, the same traffic")
    made.add_argument(
        "--profile", choices=[*PROFILES, "all"], default="all", help="kind of traffic"
    )
    made.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N")
    made.add_argument("--poison", action="store_true", help="run with KVPOOL_POISON=1")
    made.add_argument("--json", action="store_true", help="one JSON document on standard output")
    made.add_argument("--replay", metavar="FILE", help="play a trace that a failure left")
    made.add_argument("--out", metavar="DIR", help="keep traces and script here")
    made.add_argument(
        "--shrink-seconds", type=_seconds, default=30.0, help="to make a failure shorter (30)"
    )
    made.add_argument(
        "--operation-seconds",
        type=_limit,
        default=120.0,
        help="an operation that takes longer hangs (120, at least 1)",
    )
    return made


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    arguments = parser().parse_args(argv)
    try:
        device = str(device_of(arguments.device))
    except ValueError as error:
        return _usage(error)
    if device != "cpu":
        print(_GPU_NOTE, file=sys.stderr)
    if arguments.replay:
        try:
            _check_trace(arguments.replay)
        except (OSError, UnicodeDecodeError, TraceError) as error:
            return _usage(error)
    if arguments.poison:
        os.environ["KVPOOL_POISON"] = "1"
    profiles = tuple(PROFILES) if arguments.profile == "all" else (arguments.profile,)
    options = Options(
        arguments.seconds, arguments.seed, profiles, device, arguments.shrink_seconds
    )
    with orderly_end():
        code, folder = 2, None
        try:
            try:
                # Held back until the folder is known: else nobody would remove it.
                with held_back():
                    folder = _folder(arguments.out)
                supervisor = Supervisor(options, folder, arguments.operation_seconds)
                code, found = _run(supervisor, folder, arguments.replay)
            except _NoFolderError as error:
                return _usage(f"--out: {error}")
            except KeyboardInterrupt as interrupt:
                # Before a worker ran, or while a crash was made short.
                code, found = exit_code_of(interrupt), {}
            more = {"interrupted": code > 2, "seed": arguments.seed, "device": device}
            _print(arguments, {"profiles": {}} | found | more)
        finally:
            if folder is not None and code != 1 and not arguments.out:
                shutil.rmtree(folder, ignore_errors=True)
    return code


def _run(supervisor: Supervisor, folder: Path, replay: str | None) -> tuple[int, dict[str, Any]]:
    code, found = supervisor.run(replay)
    if "failure" in found:
        found["failure"] |= {
            "script_shows_it": supervisor.script_shows_it(),
            "script": str(folder / FILES["script"]),
            "trace": str(folder / FILES["failure"]),
            "whole_trace": str(folder / FILES["whole"]),
        }
    return code, found


class _NoFolderError(Exception):
    """No files can be written there."""


def _folder(out: str | None) -> Path:
    """Where files go."""
    folder = Path(out or tempfile.mkdtemp(prefix="kvpool-soak-"))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError as error:
        raise _NoFolderError(str(error)) from error


def _check_trace(path: str) -> None:
    """Refuse a trace that cannot be played; say where one is cut short."""
    trace = Trace.read(path)
    check_operations(trace.operations)
    cut = f"{path} ends in the middle of line {len(trace.operations) + 2}"
    if not trace.operations:
        raise TraceError(cut if trace.is_cut else f"{path} has no operation to play")
    if trace.is_cut:
        print(f"note: {cut}, which is left out", file=sys.stderr)


def _usage(error: object) -> int:
    print(f"python -m kvpool.soak: {error}", file=sys.stderr)
    return 2


def _print(arguments: argparse.Namespace, found: dict[str, Any]) -> None:
    if arguments.json:
        print(json.dumps(found, indent=2))
        return
    if found["profiles"] or found["interrupted"]:
        print(table(found["profiles"]))
    if found["interrupted"]:
        print("interrupted: this is what was done until then", file=sys.stderr)
    if "failure" in found:
        script = Path(found["failure"]["script"]).read_text(encoding="utf-8")
        print(failure_text(found["failure"], script, os.environ.get("KVPOOL_POISON", "")))


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 <= value <= 10**7:
        raise argparse.ArgumentTypeError(f"expected seconds in 0 .. 10000000, got {text}")
    return value


def _limit(text: str) -> float:
    value = _seconds(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected at least 1 second, got {text}")
    return value
