"""Whether torch and FlashInfer are there, and why not: the sections that use them skip then."""

from __future__ import annotations

from importlib.util import find_spec


def torch_or_none():
    """Torch, if it is there and sees the GPU."""
    if why_no_torch():
        return None
    import torch

    return torch


def why_no_torch():
    """Why sections with torch are skipped; None where they run."""
    try:
        import torch
    except ImportError:
        return "torch is not installed"
    return None if torch.cuda.is_available() else "torch sees no GPU"


def why_no_flashinfer():
    """Why sections with FlashInfer are skipped; None where they run."""
    if find_spec("flashinfer") is None:
        return "flashinfer-python is not installed"
    return why_no_torch()
