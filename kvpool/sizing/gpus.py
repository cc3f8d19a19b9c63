"""Memory of GPUs by name, as their data sheets round it."""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from kvpool.sizing.errors import SizingError

# GiB of the data sheet, which writes GB. The driver reports less: 79.6 GiB of an H100's 80, 140.4
# of an H200's 141, and 6 % less where error correction lies in the same memory (L4, L40S, A10).
# CUDA keeps some hundred MiB of that. So these are for a first look, and a reading replaces them.
GPUS: dict[str, int] = {
    "a10": 24,
    "a100-40": 40,
    "a100-80": 80,
    "a30": 24,
    "a40": 48,
    "b200": 180,
    "gb200": 186,
    "h100": 80,
    "h100-nvl": 94,
    "h20": 96,
    "h200": 141,
    "l4": 24,
    "l40s": 48,
    "rtx-3090": 24,
    "rtx-4090": 24,
    "rtx-5090": 32,
    "rtx-6000-ada": 48,
    "rtx-a6000": 48,
    "t4": 16,
    "v100-16": 16,
    "v100-32": 32,
}


@dataclass(frozen=True)
class GPU:
    """A GPU to size for.

    Attributes
    ----------
    name : str
        How it is called in the answer.
    memory : int
        Bytes.
    is_nominal : bool
        Whether that is the number of the data sheet, not what a driver reports.
    """

    name: str
    memory: int
    is_nominal: bool


def known_gpu(name: str) -> GPU:
    """A GPU of the table by name, whose case does not matter, with its nominal memory.

    Raises
    ------
    SizingError
        A GPU that is not listed.

    >>> known_gpu("H100")
    GPU(name='h100', memory=85899345920, is_nominal=True)
    """
    known = name.lower().replace("_", "-")
    if known not in GPUS:
        close = [
            gpu for gpu in GPUS if known and gpu.startswith(known)
        ] or difflib.get_close_matches(known, GPUS, n=2)
        hint = f" Did you mean {' or '.join(close)}?" if close else ""
        raise SizingError(
            f"no GPU {name!r} is known.{hint} Known: {', '.join(GPUS)}; for any other say how "
            "much memory it has",
            remedy="memory",
        )
    return GPU(known, GPUS[known] * 2**30, is_nominal=True)
