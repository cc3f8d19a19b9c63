"""Tier: what a place for pages outside of the pool must do.

A tier keeps *records*, arrays of bytes under page keys, and knows nothing of what is in them. It
may forget any of them at any time, and may be asked from several threads at once. What it gives
back is verified by the caller, so that a tier which answers wrong costs a hit and nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from kvpool.page_keys import KEY_BYTES

Key = bytes  # 32 of them, see `kvpool.page_keys`


@runtime_checkable
class Tier(Protocol):
    """Batched reads, writes and existence of page records.

    A call raises where the tier as a whole fails (a lost connection, a directory without rights);
    that one record is missing or finds no room is an answer. Records of one pool have one length.

    Attributes
    ----------
    name : str
        What messages, counters and metrics call it; distinct among the tiers of a pool.
    """

    name: str

    def exists(self, keys: Sequence[Key]) -> list[bool]:
        """Whether each key has a record now; that is no promise for a later `read`."""

    def read(self, keys: Sequence[Key], rows: NDArray[np.uint8]) -> list[bool]:
        """Fill ``rows[i]`` with the record of ``keys[i]``; False where there is none.

        Parameters
        ----------
        keys : sequence of bytes
            ``[n]``.
        rows : ndarray
            uint8 ``[n, record_bytes]``, C-contiguous, in a buffer that `register` was told of. A
            row whose answer is False may hold anything afterwards.
        """

    def write(self, keys: Sequence[Key], rows: NDArray[np.uint8]) -> list[bool]:
        """Store each row under its key; False where there was no room.

        A key that has a record keeps the old one or gets the new one, never a mixture: both are
        equal unless one is damaged. `rows` are the caller's again when the call returns.
        """

    def remove(self, keys: Sequence[Key]) -> list[bool]:
        """Take the records of `keys` out; whether each was there.

        For records that do not verify: as long as one exists, nobody writes it anew.
        """

    def register(self, buffer: NDArray[np.uint8]) -> None:
        """Prepare a host buffer from and into which records will move, before its first use.

        A tier with RDMA pins and registers it; for others there is nothing to do.
        """

    def unregister(self, buffer: NDArray[np.uint8]) -> None:
        """The buffer will not be used any more."""

    def stats(self) -> Mapping[str, int]:
        """What the tier counts itself: ``records``, ``bytes``, ``evicted_records``, say."""

    def close(self) -> None:
        """Let go of connections and memory; a second close does nothing."""


def check_name(name: str) -> str:
    """`name`, if counters and messages can call a tier so; TypeError or ValueError if not."""
    if not isinstance(name, str):
        raise TypeError(f"name must be a str, got {type(name).__name__}")
    if not name:
        raise ValueError("name is empty: counters and messages call the tier by it")
    return name


def check_keys(keys: Sequence[Key]) -> None:
    """ValueError or TypeError unless each of `keys` is the 32 bytes of a page key."""
    for i, key in enumerate(keys):
        if type(key) is not bytes:
            raise TypeError(f"keys[{i}] must be bytes, got {type(key).__name__}")
        if len(key) != KEY_BYTES:
            raise ValueError(f"keys[{i}]: a page key has {KEY_BYTES} bytes, got {len(key)}")


def check_rows(keys: Sequence[Key], rows: NDArray[Any], *, fill: bool = False) -> None:
    """ValueError or TypeError unless `rows` are bytes, contiguous, and one a key.

    Of rows to `fill` one more thing is asked: that they can be written to.
    """
    check_keys(keys)
    if not isinstance(rows, np.ndarray):
        raise TypeError(
            "rows must be a C-contiguous uint8 array [n, record_bytes], got a "
            f"{type(rows).__name__}"
        )
    if rows.dtype != np.uint8 or rows.ndim != 2 or not rows.flags.c_contiguous:
        raise TypeError(
            "rows must be a C-contiguous uint8 array [n, record_bytes], got "
            f"{rows.dtype} {rows.shape}"
        )
    if len(rows) != len(keys):
        raise ValueError(f"{len(keys)} keys need as many rows, got {len(rows)}")
    if fill and not rows.flags.writeable:
        raise ValueError("rows are read-only, and records are to be read into them")
