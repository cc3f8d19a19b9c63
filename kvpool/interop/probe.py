"""What torch and FlashInfer say of themselves; for `kvpool.doctor`, in a process of its own."""

from __future__ import annotations

from typing import Any

# What kvpool calls of FlashInfer.
_WRAPPERS = ("BatchDecodeWithPagedKVCacheWrapper", "BatchPrefillWithPagedKVCacheWrapper")


def torch_facts() -> dict[str, Any]:
    """Version of torch, and what it was built for.

    Returns
    -------
    dict
        ``version``, ``path``, ``cuda`` (major, minor of its build, None without CUDA), ``devices``
        (how many it sees) and ``targets``: ``sm_90`` and others that it has code for.
    """
    import torch

    built_for = torch.version.cuda
    return {
        "version": str(torch.__version__),
        "path": torch.__file__,
        "cuda": None if built_for is None else [int(part) for part in built_for.split(".")[:2]],
        "devices": torch.cuda.device_count() if torch.cuda.is_available() else 0,
        "targets": list(torch.cuda.get_arch_list()),
    }


def flashinfer_facts() -> dict[str, Any]:
    """``version`` and ``path`` of FlashInfer.

    Raises
    ------
    ImportError
        Also where it lacks something that kvpool calls.
    """
    import flashinfer

    missing = [name for name in _WRAPPERS if not hasattr(flashinfer, name)]
    if missing:
        raise ImportError(f"flashinfer at {flashinfer.__file__} has no {', '.join(missing)}")
    return {
        "version": str(getattr(flashinfer, "__version__", "")),
        "path": flashinfer.__file__,
    }
