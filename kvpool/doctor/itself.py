"""kvpool itself: its version, its compiled part, the Python that runs it."""

from __future__ import annotations

import os
import platform
import sysconfig
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import kvpool
from kvpool.doctor.checks import describe
from kvpool.doctor.finding import Finding
from kvpool.doctor.pins import Pins, installed_version
from kvpool.kernels import code_cache

_REINSTALL = "pip install --force-reinstall --no-deps kvpool; in its source folder: make setup"


def kvpool_finding(pins: Pins) -> Finding:
    """Version and place; whether pip knows this one."""
    folder = Path(kvpool.__file__).parent
    value = f"{kvpool.__version__} in {folder}"
    known = installed_version("kvpool")
    if known is not None and known != kvpool.__version__:
        advice = f"two copies: leave the folder that hides the other one, or {_REINSTALL}"
        return Finding("kvpool", "unfit", f"{value}, but pip has installed {known}", advice)
    if pins.problem:
        value = f"{value}; ranges of other packages are not checked: {pins.problem}"
        return Finding("kvpool", "note", value, "pip install packaging, and kvpool by pip")
    return Finding("kvpool", "ok", value)


def python_finding(pins: Pins) -> Finding:
    """The interpreter, and whether kvpool is made for it."""
    libc, libc_version = platform.libc_ver()
    value = f"{platform.python_implementation()} {platform.python_version()}, {platform.machine()}"
    value += f", {libc} {libc_version}" if libc else f", {platform.system()}"
    if pins.python:
        from packaging.specifiers import SpecifierSet

        if not SpecifierSet(pins.python).contains(platform.python_version(), prereleases=True):
            advice = f"make an environment with a Python {pins.python}"
            return Finding("Python", "unfit", f"{value}; kvpool is for {pins.python}", advice)
    return Finding("Python", "ok", value)


def extension_finding(package: str = "kvpool_ext") -> Finding:
    """The compiled modules: whether all import, are from one build, and for this Python."""
    spec = find_spec(package)
    folder = Path(spec.origin).parent if spec is not None and spec.origin else None
    if folder is None:
        return Finding("extension", "broken", f"{package} is not there", _REINSTALL)
    # The contract of a compiled module is a stub beside it.
    names = sorted(stub.stem for stub in folder.glob("*.pyi") if not _is_python(stub))
    origins: dict[str, Path] = {}
    for name in names:
        try:
            origins[name] = Path(str(import_module(f"{package}.{name}").__file__))
        except Exception as error:
            return Finding("extension", "broken", f"{name}: {describe(error)}", _REINSTALL)
    suffix = str(sysconfig.get_config_var("EXT_SUFFIX"))
    value = f"{len(names)} modules, {flavour(folder)}, {suffix.removesuffix('.so').strip('.')}"
    strangers = [name for name, path in origins.items() if path.parent != folder]
    if strangers:
        value += f"; from another folder: {', '.join(strangers)}"
        return Finding("extension", "unfit", value, _REINSTALL)
    other_tags = [path.name for path in origins.values() if not path.name.endswith(suffix)]
    if other_tags:
        value += f"; not for this Python: {', '.join(other_tags)}"
        return Finding("extension", "unfit", value, _REINSTALL)
    stale = [name for name, path in origins.items() if _is_older(path, folder / f"{name}.pyx")]
    if stale:
        value += f"; older than their sources: {', '.join(stale)}"
        return Finding("extension", "note", value, "make setup")
    return Finding("extension", "ok", value)


def flavour(folder: Path) -> str:
    """Which build a folder holds: release, debug or trace, by where setup.py places it."""
    for name in ("debug", "trace"):
        if f"/build/{name}/lib" in f"{folder.as_posix()}/":
            return name
    return "release"


def cache_finding() -> Finding:
    """Whether compiled kernels can be kept between processes."""
    advice = "set KVPOOL_CACHE_DIR to a folder that can be written"
    try:
        folder = code_cache.folder()
        there = next(path for path in (folder, *folder.parents) if path.exists())
    except (OSError, RuntimeError) as error:  # no home folder, or one that cannot be entered
        return Finding("kernel cache", "note", f"none: {error}", advice)
    if there.is_dir() and os.access(there, os.W_OK | os.X_OK):
        return Finding("kernel cache", "ok", str(folder))
    value = f"{folder} cannot be written: every process compiles anew"
    return Finding("kernel cache", "note", value, advice)


def environment_findings(environment: Any = os.environ) -> list[Finding]:
    """Variables that change what kernels do, where they are set."""
    told = {
        "NUMBA_DISABLE_JIT": "CPU kernels run as plain Python, hundreds of times slower",
        "NUMBA_ENABLE_CUDASIM": "CUDA kernels run in numba's simulator, on the CPU",
    }
    return [
        Finding(name, "note", f"{environment[name]}: {meaning}", f"unset {name}")
        for name, meaning in told.items()
        if environment.get(name, "0") not in ("", "0")
    ]


def _is_python(stub: Path) -> bool:
    return stub.with_suffix(".py").exists() or stub.stem == "__init__"


def _is_older(module: Path, source: Path) -> bool:
    return source.exists() and source.stat().st_mtime > module.stat().st_mtime
