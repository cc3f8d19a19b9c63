"""The NVIDIA driver and its GPUs, asked directly: no package is needed for that."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvpool.doctor.children import Answer
from kvpool.doctor.finding import Finding

_NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE
_CAPABILITY_MAJOR, _CAPABILITY_MINOR, _NUM_SMS = 75, 76, 16  # CUdevice_attribute
_KERNEL_MODULE = Path("/proc/driver/nvidia/version")


def driver_facts(load: Callable[[str], Any] = ctypes.CDLL) -> dict[str, Any]:
    """What the driver says; to be run in a process of its own, for a driver can hang.

    Returns
    -------
    dict
        ``missing``: why there is no driver, and nothing else; or ``cuda`` (major, minor),
        ``release`` (of the kernel module, may be empty), ``error`` (why it does not work, may be
        empty) and ``gpus``, a list of ``name``, ``bytes``, ``capability`` (major, minor), ``sms``.
    """
    try:
        library = load("libcuda.so.1")
    except OSError as error:
        return {"missing": str(error)}
    number = ctypes.c_int()

    def ask(call: str, *arguments: Any) -> int:
        code: int = getattr(library, call)(ctypes.byref(number), *arguments)
        if code:
            raise OSError(f"{call} says {_error_name(library, code)}")
        return number.value

    facts: dict[str, Any] = {"release": _release(), "error": "", "gpus": [], "cuda": [0, 0]}
    try:
        version = ask("cuDriverGetVersion")
        facts["cuda"] = [version // 1000, version % 1000 // 10]
        code = library.cuInit(0)
        if code == _NO_DEVICE:
            return facts
        if code:
            raise OSError(f"cuInit says {_error_name(library, code)}")
        for ordinal in range(ask("cuDeviceGetCount")):
            device = ctypes.c_int(ask("cuDeviceGet", ordinal))
            name, size = ctypes.create_string_buffer(256), ctypes.c_size_t()
            library.cuDeviceGetName(name, len(name), device)
            library.cuDeviceTotalMem_v2(ctypes.byref(size), device)
            major, minor, num_sms = (
                ask("cuDeviceGetAttribute", attribute, device)
                for attribute in (_CAPABILITY_MAJOR, _CAPABILITY_MINOR, _NUM_SMS)
            )
            facts["gpus"].append(
                {
                    "name": name.value.decode(errors="replace"),
                    "bytes": size.value,
                    "capability": [major, minor],
                    "sms": num_sms,
                }
            )
    except (OSError, AttributeError) as error:
        facts["error"] = str(error)
    return facts


def driver_findings(answer: Answer, oldest: tuple[int, int]) -> list[Finding]:
    """The driver, and each GPU.

    Parameters
    ----------
    answer : Answer
        Of `driver_facts`.
    oldest : tuple of int
        The compute capability that the kernels need.
    """
    facts = answer.facts
    if answer.error:
        advice = "see whether nvidia-smi answers; if not, reinstall the driver, or reboot"
        return [Finding("driver", "broken", answer.error, advice)]
    if "missing" in facts:
        return [Finding("driver", "absent", "none (libcuda.so.1 is not there)")]
    release = f"NVIDIA {facts['release']}, " if facts["release"] else "NVIDIA, "
    value = f"{release}for CUDA up to {show(facts['cuda'])}"
    if facts["error"]:
        advice = (
            "the driver and its kernel module may be of different releases: reboot after an "
            "update; in a container, let the host's driver in and carry none"
        )
        return [Finding("driver", "broken", f"{value}; {facts['error']}", advice)]
    findings = [Finding("driver", "ok", value)]
    for ordinal, gpu in enumerate(facts["gpus"]):
        value = (
            f"{gpu['name']}, {gpu['bytes'] / 2**30:.1f} GiB, {gpu['sms']} SMs, compute capability "
            f"{show(gpu['capability'])}"
        )
        fits = tuple(gpu["capability"]) >= oldest
        advice = "" if fits else f"kernels need {show(oldest)} or later: use device='cpu'"
        findings.append(Finding(f"GPU {ordinal}", "ok" if fits else "unfit", value, advice))
    if not facts["gpus"]:
        advice = "in a container, start it with GPUs (--gpus all); look at CUDA_VISIBLE_DEVICES"
        findings.append(Finding("GPU", "absent", "the driver shows none", advice))
    return findings


def show(version: Any) -> str:
    """Two numbers as people write them: ``9.0``."""
    return ".".join(map(str, version))


def _error_name(library: Any, code: int) -> str:
    name = ctypes.c_char_p()
    library.cuGetErrorName(code, ctypes.byref(name))
    return name.value.decode() if name.value else f"error {code}"


def _release() -> str:
    try:
        text = _KERNEL_MODULE.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    found = re.search(r"NVRM version:.*?\s(\d+\.\d+(?:\.\d+)?)\s", text)
    return found.group(1) if found else ""
