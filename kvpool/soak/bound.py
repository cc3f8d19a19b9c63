"""Bound: what the soak knows of a request that the pool has."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvpool.soak.lineage import Lineage

KEYS: tuple[str | bytes | int | None, ...] = (None, "tenant-a", b"\x00salt", 7)
"""Namespaces of the traffic, by number."""


@dataclass
class Bound:
    """A bound request as it must be.

    Attributes
    ----------
    handle : int
        Its name in the trace.
    request_id : int
        Its name in the pool.
    lineage : Lineage
        Its tokens, and the rows that belong to them.
    prompt_len : int
        Tokens that the pool knows, and that must not change.
    capacity : int
        Slots reserved.
    matched : int or None
        Tokens found at bind; None for a fork.
    shared : int
        Tokens on read-only pages.
    valid : list of int
        Leading written tokens of each layer.
    inserts : bool
        Whether a finish may insert.
    entered : int
        Largest end of all writes: every page up to there was entered.
    ends : list of int
        Of each layer, where nothing was written from then on, or all of it was zeroed since.
    looked_at : int
        `entered` when the pages were last looked at.
    """

    handle: int
    request_id: int
    lineage: Lineage
    prompt_len: int
    capacity: int
    matched: int | None
    shared: int
    valid: list[int]
    inserts: bool
    entered: int = field(init=False)
    ends: list[int] = field(init=False)
    looked_at: int = 0

    def __post_init__(self) -> None:
        self.ends = list(self.valid)
        self.entered = max(self.valid, default=0)

    @property
    def valid_len(self) -> int:
        """Leading tokens written on every layer."""
        return min(self.valid)

    @property
    def room(self) -> int:
        """Tokens that may still be written."""
        return self.capacity - min(self.valid)

    def write(self, layer: int, start: int, end: int) -> None:
        """A put of ``[start, end)``."""
        if start < end:
            self.touch(layer, end)
        if start <= self.valid[layer] < end:
            self.valid[layer] = end

    def touch(self, layer: int, end: int) -> None:
        """Something was written up to `end`, which need not count."""
        self.entered = max(self.entered, end)
        self.ends[layer] = max(self.ends[layer], end)

    def zero(self, start: int, end: int) -> None:
        """``[start, end)`` was zeroed on every layer."""
        self.ends = [min(last, start) if last <= end else last for last in self.ends]

    def declare(self, length: int) -> None:
        """All of ``[0, length)`` is there."""
        for layer in range(len(self.ends)):
            self.touch(layer, length)
        self.valid = [max(valid, length) for valid in self.valid]

    def seal(self, length: int) -> None:
        """Nothing past `length` is there any more."""
        self.valid = [min(valid, length) for valid in self.valid]
