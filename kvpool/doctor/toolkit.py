"""Compilers and libraries of CUDA on this machine: nvcc, NVVM, NVRTC, nvJitLink."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sysconfig
from importlib.metadata import distributions
from pathlib import Path

from kvpool.doctor.children import Answer
from kvpool.doctor.finding import Finding

LIBRARIES = {"nvvm": "NVVM", "nvJitLink": "nvJitLink", "nvrtc": "NVRTC"}
"""Name in `kvpool.kernels.probe.compiler_facts` -> what people call it."""


def nvcc_finding(timeout_s: float = 20) -> Finding:
    """The nvcc that FlashInfer and torch would find: in CUDA_HOME, on the path, or of pip."""
    found = next(filter(None, map(shutil.which, map(str, _places_of_nvcc()))), None)
    if found is None:
        return Finding("nvcc", "absent", "none")
    try:
        run = subprocess.run(
            [found, "--version"], capture_output=True, timeout=timeout_s, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        return Finding("nvcc", "broken", f"{found}: {error}", "reinstall the CUDA toolkit")
    release = re.search(r"release [\d.]+, V([\d.]+)", run.stdout.decode(errors="replace"))
    return Finding("nvcc", "ok", f"{release.group(1) if release else 'some release'} at {found}")


def _places_of_nvcc() -> list[Path]:
    homes = [os.environ[name] for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    places = [Path(home, "bin", "nvcc") for home in homes]
    places += [Path("nvcc"), Path("/usr/local/cuda/bin/nvcc")]
    packages = Path(sysconfig.get_path("purelib"))
    return places + sorted(packages.glob("nvidia/*/bin/nvcc"), reverse=True)


def library_findings(answer: Answer) -> list[Finding]:
    """The libraries that make machine code of kernels, with the packages that brought them."""
    if not answer.facts:
        return []
    findings = []
    for key, title in LIBRARIES.items():
        facts = answer.facts[key]
        if "error" in facts:
            findings.append(Finding(title, "absent", facts["error"]))
            continue
        package, version = library_origin(answer, key)
        origin = f"of {package}" if package else f"at {facts['path']}"
        findings.append(Finding(title, "ok", f"{version or 'some release'} {origin}"))
    return findings


def library_origin(answer: Answer, key: str) -> tuple[str, str]:
    """The package that a library is part of, empty if of none, and the library's version."""
    facts = answer.facts[key]
    package, its_version = owner_of(Path(facts["path"]))
    return package, facts["version"] or its_version


def owner_of(path: Path) -> tuple[str, str]:
    """Name and version of the NVIDIA package that installed a file; empty if none did."""
    for found in distributions():
        try:
            name, version = found.metadata["Name"], found.version
            files = found.files if name.startswith("nvidia") else ()
        except Exception:  # a broken package owns nothing
            continue
        for file in files or ():
            if file.name == path.name and Path(str(found.locate_file(file))) == path:
                return name, version
    return "", ""
