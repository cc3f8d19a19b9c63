"""Do the parts fit each other? CuPy, numba-cuda, torch and FlashInfer, the driver and the GPU."""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from typing import Any

from kvpool.doctor.children import Answer
from kvpool.doctor.driver import show
from kvpool.doctor.finding import Finding
from kvpool.doctor.packages import cupy_package, cupy_packages
from kvpool.doctor.pins import installed_version
from kvpool.doctor.toolkit import library_origin
from kvpool.kernels.probe import BUILT_IN, NONE


def cuda_extra(driver: Answer) -> str:
    """The extra for this machine: for the newest CUDA that its driver takes."""
    return "cuda12" if driver.facts.get("cuda", [0])[0] == 12 else "cuda13"


def cupy_copies(driver: Answer) -> list[Finding]:
    """Several CuPy packages overwrite each other's files."""
    names = cupy_packages()
    if len(names) < 2:
        return []
    advice = f"pip uninstall -y {' '.join(names)}; pip install 'kvpool[{cuda_extra(driver)}]'"
    value = f"{' and '.join(names)} are installed and overwrite each other"
    return [Finding("CuPy", "unfit", value, advice)]


def numba_target(numba: Answer) -> list[Finding]:
    """numba-cuda is installed, and ``numba.cuda`` must be it."""
    if installed_version("numba-cuda") is None or not numba.facts:
        return []
    target = numba.facts["target"]
    if target not in (BUILT_IN, NONE):
        return []
    value = f"numba-cuda is installed, but numba.cuda is {target} {numba.facts['target_error']}"
    advice = "pip install --force-reinstall numba-cuda: its .pth file redirects numba.cuda"
    return [Finding("numba and numba-cuda", "unfit", value.strip(), advice)]


def one_cuda(cupy: Answer, compilers: Answer, torch: Answer, driver: Answer) -> list[Finding]:
    """CuPy and numba-cuda are for one CUDA, and no package is for a newer one than the driver."""
    majors = {
        "CuPy": cupy.facts.get("cuda", [0])[0],
        "numba-cuda": int(str(compilers.facts.get("bindings", "0")).partition(".")[0]),
        "torch": (torch.facts.get("cuda") or [0])[0],
    }
    here = {name: major for name, major in majors.items() if major}
    findings = []
    ours = {name: here[name] for name in ("CuPy", "numba-cuda") if name in here}
    told = ", ".join(f"{name} for CUDA {major}" for name, major in ours.items())
    if len(set(ours.values())) > 1:
        extra = cuda_extra(driver)
        advice = f"pip uninstall -y {' '.join(cupy_packages())}; pip install 'kvpool[{extra}]'"
        findings.append(Finding("CuPy and numba-cuda", "unfit", told, advice))
    elif len(ours) == 2:
        findings.append(Finding("CuPy and numba-cuda", "ok", told))
    limit = driver.facts.get("cuda", [0])
    if limit[0]:
        findings += _under_driver(here, limit)
    if len(set(here.values())) > 1 and "torch" in here and len(set(ours.values())) == 1:
        value = (
            f"{told}, torch for CUDA {here['torch']}: they work, each with libraries of its own"
        )
        findings.append(Finding("torch and CuPy", "note", value))
    return findings


def _under_driver(majors: dict[str, int], limit: Sequence[int]) -> list[Finding]:
    beyond = {name: major for name, major in majors.items() if major > limit[0]}
    if not beyond:
        told = ", ".join(majors)
        return [Finding("driver and packages", "ok", f"new enough for {told}")] if majors else []
    told = ", ".join(f"{name} is for CUDA {major}" for name, major in beyond.items())
    commands = {
        "CuPy": f"pip install 'kvpool[cuda{limit[0]}]'",
        "numba-cuda": f"pip install 'kvpool[cuda{limit[0]}]'",
        "torch": f"a torch for CUDA {limit[0]}, as pytorch.org says",
    }
    advice = "update the driver, or " + ", ".join(dict.fromkeys(commands[name] for name in beyond))
    value = f"{told}, the driver takes CUDA up to {show(limit)}"
    return [Finding("driver and packages", "unfit", value, advice)]


def cupy_and_gpu(cupy: Answer, driver: Answer) -> list[Finding]:
    """CuPy sees the GPU that the driver shows, and can compile for it."""
    if not driver.facts.get("gpus") or not cupy.facts:
        return []
    name, facts = "CuPy and GPU", cupy.facts
    if not facts["devices"]:
        value = f"CuPy sees no GPU: {facts['devices_error'] or 'none'}"
        return [Finding(name, "unfit", value, f"pip install 'kvpool[{cuda_extra(driver)}]'")]
    if facts["compute_error"]:
        advice = (
            f"pip install '{cupy_package()}[ctk]', or set CUDA_PATH to a CUDA toolkit: CuPy "
            "compiles with NVRTC and CUDA's headers"
        )
        return [Finding(name, "broken", facts["compute_error"], advice)]
    return [Finding(name, "ok", "it sees the GPU, and computes there")]


def torch_and_gpu(torch: Answer, driver: Answer, flashinfer_is_here: bool) -> list[Finding]:
    """On a machine with a GPU, torch has CUDA, and code for that GPU."""
    gpus = driver.facts.get("gpus") or []
    if not gpus or not torch.facts:
        return []
    version, built_for = torch.facts["version"], torch.facts["cuda"]
    install = f"install a torch for CUDA {driver.facts['cuda'][0]}, as pytorch.org says"
    if built_for is None:
        value = f"torch {version} is a build without CUDA, and a GPU is here"
        if flashinfer_is_here:
            return [Finding("torch and GPU", "unfit", f"{value}: FlashInfer needs it", install)]
        return [Finding("torch and GPU", "note", value, install)]
    if not torch.facts["devices"]:
        value = f"torch {version} for CUDA {show(built_for)} sees no GPU"
        return [Finding("torch and GPU", "unfit", value, install)]
    capability, targets = gpus[0]["capability"], torch.facts["targets"]
    if not has_code_for(capability, targets):
        value = f"torch {version} has code for {', '.join(targets)}, not for {show(capability)}"
        return [Finding("torch and GPU", "unfit", value, install)]
    return [Finding("torch and GPU", "ok", f"CUDA {show(built_for)}, has code for this GPU")]


def has_code_for(capability: Sequence[int], targets: Sequence[str]) -> bool:
    """Whether code for these targets runs on a device: same major and no later minor, or PTX."""
    major, minor = capability
    for target in targets:
        kind, _, number = target.partition("_")
        found = re.fullmatch(r"(\d+)(\d)[af]?", number)
        if found is None:
            continue
        its_major, its_minor = int(found[1]), int(found[2])
        if kind == "compute" and (its_major, its_minor) <= (major, minor):
            return True
        exact = number[-1] in "af"
        if its_major == major and (its_minor == minor if exact else its_minor <= minor):
            return True
    return False


def flashinfer_tools(driver: Answer, nvcc: Finding) -> list[Finding]:
    """FlashInfer compiles its kernels at their first use, unless a package brings them."""
    if not driver.facts.get("gpus") or installed_version("flashinfer-jit-cache"):
        return []
    missing = [name for name in ("ninja", "c++") if shutil.which(name) is None]
    if nvcc.state != "ok":
        missing.insert(0, "nvcc")
    if not missing:
        return [Finding("FlashInfer", "ok", "nvcc, ninja and a C++ compiler are here")]
    value = f"it compiles its kernels at first use, and these are not here: {', '.join(missing)}"
    advice = "install the CUDA toolkit, ninja (pip install ninja) and a C++ compiler"
    return [Finding("FlashInfer", "unfit", value, advice)]


def compilers_fit(compilers: Answer) -> list[Finding]:
    """NVVM writes PTX that nvJitLink must read: it must not be the newer one."""
    facts: dict[str, Any] = compilers.facts
    if not facts or "error" in facts["nvvm"] or "error" in facts["nvJitLink"]:
        return []
    package, nvvm = library_origin(compilers, "nvvm")
    _, linker = library_origin(compilers, "nvJitLink")
    if _numbers(nvvm)[:2] <= _numbers(linker)[:2]:
        return []
    value = f"NVVM {nvvm} writes PTX that nvJitLink {linker} cannot read"
    if package:
        advice = f"pip uninstall -y {package}, or bring all to one CUDA: pip list | grep nvidia"
    else:
        advice = (
            f"NVVM is {facts['nvvm']['path']}: leave CUDA_HOME unset, or bring all to one CUDA"
        )
    return [Finding("compilers", "unfit", value, advice)]


def _numbers(version: str) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", version)]
