"""What numba and the CUDA compilers say of themselves, and what they make of the kernels.

For `kvpool.doctor`, which runs each function in a process of its own: a compiler that is told of a
device that it does not know may crash. Importing this module loads none of them.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from kvpool.kernels.capabilities import FP8_HARDWARE, OLDEST

NUMBA_CUDA, BUILT_IN, SIMULATOR, NONE = "numba-cuda", "built-in", "simulator", "none"


def numba_facts() -> dict[str, Any]:
    """Version of numba, and where ``numba.cuda`` comes from.

    Returns
    -------
    dict
        ``version``, ``llvmlite``, ``target`` (``"numba-cuda"``, ``"built-in"``, ``"simulator"`` or
        ``"none"``), ``target_error`` (why it is none), ``jit`` (False under NUMBA_DISABLE_JIT).
    """
    import llvmlite
    import numba

    from kvpool.kernels import launch

    facts = {
        "version": numba.__version__,
        "llvmlite": llvmlite.__version__,
        "jit": not numba.config.DISABLE_JIT,
        "target": NONE,
        "target_error": "",
    }
    try:
        from numba import cuda
    except Exception as error:
        facts["target_error"] = f"{type(error).__name__}: {error}"
        return facts
    if launch.simulating():
        facts["target"] = SIMULATOR
    else:
        facts["target"] = NUMBA_CUDA if "numba_cuda" in str(cuda.__file__) else BUILT_IN
    return facts


def compiler_facts() -> dict[str, Any]:
    """What turns kernels into machine code.

    Returns
    -------
    dict
        ``nvvm``, ``nvJitLink`` and ``nvrtc``: each with ``path`` and ``version`` (may be empty),
        or with ``error``; ``bindings`` and ``core``: versions of cuda-bindings and cuda-core.
    """
    import cuda.bindings
    import cuda.core
    from cuda.pathfinder import load_nvidia_dynamic_lib

    facts: dict[str, Any] = {
        "bindings": cuda.bindings.__version__,
        "core": cuda.core.__version__,
    }
    version_of = {"nvvm": lambda: (), "nvJitLink": _linker_version, "nvrtc": _nvrtc_version}
    for name, ask in version_of.items():
        try:
            path = load_nvidia_dynamic_lib(name).abs_path
            facts[name] = {"path": path, "version": ".".join(map(str, ask()))}
        except Exception as error:
            facts[name] = {"error": f"{type(error).__name__}: {error}"}
    return facts


def _linker_version() -> tuple[int, ...]:
    from cuda.bindings import nvjitlink

    return tuple(nvjitlink.version())


def _nvrtc_version() -> tuple[int, ...]:
    from cuda.bindings import nvrtc

    _, *version = nvrtc.nvrtcVersion()
    return tuple(version)


def compile_facts(major: int, minor: int, names: list[str] | None = None) -> dict[str, Any]:
    """Compile the kernels to machine code; no device is needed, and no cache is read or written.

    Parameters
    ----------
    major, minor : int
        Compute capability.
    names : list of str, optional
        Compile only these; default: all that a device of this capability can need.

    Returns
    -------
    dict
        ``capability``, ``ptx`` (version of its language), ``unknown`` (what the compiler made code
        for instead of this capability; empty if it knows it), ``kernels``: a list of ``name``,
        ``kernel`` (without its variant), ``bytes``, ``registers``, ``stack`` and ``spills`` (bytes
        each), ``seconds`` and ``error``, which is empty where the kernel was compiled. If the
        first one fails, the others are not tried.
    """
    from kvpool.kernels import launch
    from kvpool.kernels.cuda_kernels import PARAMETERS, all_specs

    capability = major, minor
    if capability < OLDEST:
        raise ValueError(
            f"kernels need compute capability {OLDEST[0]}.{OLDEST[1]}, got {major}.{minor}"
        )
    facts: dict[str, Any] = {"capability": [major, minor], "ptx": "", "unknown": "", "kernels": []}
    for spec in all_specs(capability >= FP8_HARDWARE):
        if names is not None and spec.name not in names:
            continue
        start = time.perf_counter()
        with _pretended_device(capability):
            _, ptx = launch.compile_ptx(spec.function, len(spec.parameters), capability)
        facts["ptx"], target = _text(r"\.version (\S+)", ptx), _text(r"\.target (\w+)", ptx)
        if target != f"sm_{major}{minor}":
            # numba falls back on what it knows without a word, and the linker may crash on it.
            facts["unknown"] = target
            break
        kernel = max((name for name in PARAMETERS if f"kvpool_{name}_" in spec.name), key=len)
        made = {"name": spec.name, "kernel": kernel, **_assemble(ptx, target)}
        facts["kernels"].append({**made, "seconds": round(time.perf_counter() - start, 4)})
        if made["error"] and len(facts["kernels"]) == 1:
            break
    return facts


@contextmanager
def _pretended_device(capability: tuple[int, int]) -> Iterator[None]:
    # Compiling a helper function, numba asks the current device what it is, even when it was told
    # what to compile for: there may be no device here, or another one.
    from numba.cuda import dispatcher

    asked = dispatcher.get_current_device
    dispatcher.get_current_device = lambda: SimpleNamespace(compute_capability=capability)
    try:
        yield
    finally:
        dispatcher.get_current_device = asked


def _assemble(ptx: str, target: str) -> dict[str, Any]:
    """What a kernel becomes, by the linker that `launch.compile_code` uses, which tells more."""
    from cuda.core import Linker, LinkerOptions, ObjectCode

    facts = {"bytes": 0, "registers": 0, "stack": 0, "spills": 0, "error": ""}
    try:
        code = ObjectCode.from_ptx(ptx.encode())
        linker = Linker(code, options=LinkerOptions(arch=target, verbose=True))
        facts["bytes"] = len(linker.link("cubin").code)
        log = linker.get_info_log()
    except Exception as error:
        # The log of a linker ends with a zero byte.
        return {**facts, "error": " ".join(str(error).replace("\0", " ").split())}
    # Of the helper functions that were not made part of the kernel, too.
    facts["registers"] = max(map(int, re.findall(r"Used (\d+) registers", log)), default=0)
    facts["stack"] = sum(map(int, re.findall(r"(\d+) bytes stack frame", log)))
    facts["spills"] = sum(map(int, re.findall(r"(\d+) bytes spill", log)))
    return facts


def _text(pattern: str, ptx: str) -> str:
    found = re.search(pattern, ptx)
    return found.group(1) if found else ""
