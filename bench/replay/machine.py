"""What a result was measured on, without naming the machine."""

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


def describe():
    """Processor, caches, memory and versions, as plain values."""
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        "caches": _caches(),
        "memory_gb": _memory_gb(),
        "system": f"{platform.system()} {platform.machine()}",
        "libc": " ".join(platform.libc_ver()),
        "python": platform.python_version(),
        "load_before": [round(load, 2) for load in os.getloadavg()],
    }


def _lines(path):
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []


def _processor():
    for line in _lines("/proc/cpuinfo"):
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _caches():
    found = {}
    for folder in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        level, kind, size = (_lines(folder / name) for name in ("level", "type", "size"))
        if level and kind and size:
            found[f"L{level[0]} {kind[0].lower()}"] = size[0]
    return found


def _memory_gb():
    for line in _lines("/proc/meminfo"):
        if line.startswith("MemTotal:"):
            return round(int(line.split()[1]) / 2**20, 1)
    return None


def versions(packages):
    """Package -> version, of those that are there."""
    import kvpool  # not for the process of a peer

    found = {"kvpool": kvpool.__version__}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
