"""Warm restart: the cached prefixes of a pool in a file, and a pool made of such a file.

The file is a safetensors file (`container`) of the pages in the order of their value (`columns`),
with what must agree before they mean anything (`fingerprint`) and what must verify before they are
served (`checksums`). Nothing in it is code, nothing is unpickled.
"""

from kvpool.snapshot.filling import fill_pool
from kvpool.snapshot.fingerprint import Fingerprint, check_model
from kvpool.snapshot.opening import Snapshot
from kvpool.snapshot.reports import DroppedPage, LoadReport, SaveReport
from kvpool.snapshot.saving import save_snapshot

__all__ = [
    "DroppedPage",
    "Fingerprint",
    "LoadReport",
    "SaveReport",
    "Snapshot",
    "check_model",
    "fill_pool",
    "save_snapshot",
]
