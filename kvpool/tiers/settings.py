"""TierSettings: the options of `attach_tiers`, checked before anything is made."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from kvpool.numbers import whole_number
from kvpool.tiers.contract import Tier
from kvpool.tiers.write_back import POLICIES

# More would only make a chunk longer, and what waits for it.
_MOST_BUFFER_BYTES = 8 << 20
_MOST_BUFFER_ROWS = 256


@dataclass(frozen=True)
class TierSettings:
    """How pages flow between a pool and its tiers.

    Attributes
    ----------
    write : str
        ``"insert"``, ``"evict"`` or ``"none"``.
    queue_pages : int
        Pages that may wait to be written.
    low_pages : int
        For ``"evict"``: free pages below which the next victims are written.
    max_fetching_pages : int
        Pages that prefetches may hold together.
    staging_bytes : int
        Host memory that records move through.
    timeout_s : float
        The longest that a call of a tier may take.
    max_failures : int
        Failures in a row after which a tier is not asked for a while.
    retry_s : float
        Seconds until it is tried again.
    """

    write: str
    queue_pages: int
    low_pages: int
    max_fetching_pages: int
    staging_bytes: int
    timeout_s: float
    max_failures: int
    retry_s: float

    def __post_init__(self) -> None:
        if self.write not in POLICIES:
            raise ValueError(f"write must be one of {', '.join(POLICIES)}, got {self.write!r}")
        whole_number(self.queue_pages, "queue_pages", at_least=1)
        whole_number(self.low_pages, "low_pages")
        whole_number(self.max_fetching_pages, "max_fetching_pages")
        whole_number(self.staging_bytes, "staging_bytes", at_least=1)
        whole_number(self.max_failures, "max_failures", at_least=1)
        for name in ("timeout_s", "retry_s"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise TypeError(f"{name} must be a number, got {type(value).__name__}")
            if not (value > 0 and math.isfinite(value)):
                raise ValueError(f"{name} must be above 0 and finite, got {value}")

    def staging(self, num_tiers: int, record_bytes: int) -> tuple[int, int]:
        """Buffers of the staging memory, and records in each.

        One buffer to read into and one to write from, and for each tier one that a call which
        hangs may keep and one for what is promoted to it.

        Raises
        ------
        ValueError
            `staging_bytes` is too little for one record in each.
        """
        num_buffers = 2 + 2 * num_tiers
        buffer_bytes = min(self.staging_bytes // num_buffers, _MOST_BUFFER_BYTES)
        if self.staging_bytes < num_buffers * record_bytes:
            raise ValueError(
                f"staging_bytes must be at least {num_buffers * record_bytes}: {num_buffers} "
                f"buffers of one record, which has {record_bytes} bytes; got {self.staging_bytes}"
            )
        return num_buffers, max(1, min(_MOST_BUFFER_ROWS, buffer_bytes // record_bytes))


def check_tiers(tiers: Sequence[Tier]) -> list[Tier]:
    """A list of `tiers`; TypeError or ValueError for what cannot be one."""
    if isinstance(tiers, Tier):
        raise TypeError(f"tiers must be a sequence of them, got one {type(tiers).__name__}")
    found = list(tiers)
    if not found:
        raise ValueError("tiers is empty, expected at least one tier")
    for tier in found:
        if not isinstance(tier, Tier):
            raise TypeError(
                "a tier has name, exists, read, write, remove, register, unregister, stats and "
                f"close; {type(tier).__name__} has not"
            )
    names = [tier.name for tier in found]
    if len(set(names)) < len(names):
        raise ValueError(f"tiers must have distinct names, got {', '.join(map(repr, names))}")
    return found
