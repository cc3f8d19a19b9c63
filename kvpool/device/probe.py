"""What CuPy says of itself and of the devices; for `kvpool.doctor`, in a process of its own."""

from __future__ import annotations

from typing import Any


def cupy_facts() -> dict[str, Any]:
    """Version of CuPy, what it was built for, and whether it can compute.

    Returns
    -------
    dict
        ``version``, ``path``, ``cuda`` (major, minor of the runtime that it was built with),
        ``devices`` (how many it sees), ``devices_error`` (why none, may be empty) and
        ``compute_error``, of a small computation on the first device; empty where there is none.
    """
    import cupy

    runtime = cupy.cuda.runtime
    number: int = runtime.runtimeGetVersion()
    facts: dict[str, Any] = {
        "version": cupy.__version__,
        "path": cupy.__file__,
        "cuda": [number // 1000, number % 1000 // 10],
        "devices": 0,
        "devices_error": "",
        "compute_error": "",
    }
    try:
        facts["devices"] = int(runtime.getDeviceCount())
    except runtime.CUDARuntimeError as error:
        facts["devices_error"] = str(error)
    if facts["devices"]:
        # It compiles, so it shows whether CuPy finds NVRTC and the headers of CUDA.
        try:
            computed = float((cupy.arange(4, dtype=cupy.float32) + 1).sum())
            facts["compute_error"] = "" if computed == 10 else f"1 + 2 + 3 + 4 gave {computed}"
        except Exception as error:
            facts["compute_error"] = f"{type(error).__name__}: {error}"
    return facts
