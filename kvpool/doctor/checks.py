"""The child's side: run one check, and answer on stdout with one JSON document."""

from __future__ import annotations

import json
import os
import sys
import warnings
from importlib import import_module
from typing import Any

# By name, so that a child loads what its own check needs and nothing else.
CHECKS = {
    "driver": "kvpool.doctor.driver:driver_facts",
    "modules": "kvpool.doctor.packages:import_errors",
    "numba": "kvpool.kernels.probe:numba_facts",
    "compilers": "kvpool.kernels.probe:compiler_facts",
    "kernels": "kvpool.kernels.probe:compile_facts",
    "cupy": "kvpool.device.probe:cupy_facts",
    "torch": "kvpool.interop.probe:torch_facts",
    "flashinfer": "kvpool.interop.probe:flashinfer_facts",
    "cpu pool": "kvpool.doctor.trips:cpu_pool",
    "cuda pool": "kvpool.doctor.trips:cuda_pool",
    "torch border": "kvpool.doctor.trips:torch_border",
    "attention": "kvpool.doctor.trips:flashinfer_attention",
}


def serve(check: str, arguments: str) -> None:
    """Run a check, answer, and end the process; the arguments come as JSON."""
    # Guests print; what they print is not the answer.
    answer_to = os.dup(1)
    os.dup2(2, 1)
    answer = run(check, json.loads(arguments))
    with os.fdopen(answer_to, "w") as out:
        json.dump(answer, out)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    # Not by way of the guests' exit handlers: the answer is given, whatever they do.
    os._exit(0)


def run(check: str, arguments: list[Any]) -> dict[str, Any]:
    """The answer: ``facts``, ``error`` and ``warnings``."""
    module, _, name = CHECKS[check].partition(":")
    facts: dict[str, Any] = {}
    error = ""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        try:
            facts = getattr(import_module(module), name)(*arguments)
        except BaseException as failure:  # a package may raise SystemExit, too
            error = describe(failure)
    seen = dict.fromkeys(one_line(str(warning.message)) for warning in caught)
    return {"facts": facts, "error": error, "warnings": list(seen)}


def describe(error: BaseException) -> str:
    """An exception on one line: its type, and the first paragraph of what it says."""
    said = one_line(str(error))
    return f"{type(error).__name__}: {said}" if said else type(error).__name__


def one_line(text: str, longest: int = 300) -> str:
    """The first lines of a text as one, cut where it gets too long to read."""
    line = " ".join(text.split())
    return line if len(line) <= longest else line[: longest - 3] + "..."
