"""Totals: what a soak has done so far, and whether its memory grows."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from kvpool.soak.player import Player

LEAST_SAMPLES = 16


def resident_bytes() -> int:
    """Resident memory of this process, 0 where the kernel does not say."""
    try:
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


@dataclass
class Totals:
    """Counts of one profile.

    Attributes
    ----------
    seconds : float
        How long it ran.
    episodes, operations, checks : int
        Pools that lived, operations played, full checks.
    rows_read, bytes_read : int
        Rows of K and of V that were compared, and how much that is.
    hits, matched_tokens : int
        Binds that matched something, and how much.
    fetched : int
        Pages that came to a tree from tiers, and were not there yet.
    evicted, refusals : int
        Pages evicted; calls that were refused, rightly.
    resident : list of int
        Resident bytes between episodes, when no pool was open.
    """

    seconds: float = 0.0
    episodes: int = 0
    operations: int = 0
    checks: int = 0
    rows_read: int = 0
    bytes_read: int = 0
    hits: int = 0
    matched_tokens: int = 0
    fetched: int = 0
    evicted: int = 0
    refusals: int = 0
    resident: list[int] = field(default_factory=list)

    def add(self, player: Player) -> None:
        """One more episode is over, or has failed."""
        self.episodes += 1
        self.operations += player.num_operations
        self.checks += player.num_checks
        self.rows_read += player.rows_read
        self.bytes_read += player.bytes_read
        self.hits += player.hits
        self.matched_tokens += player.matched_tokens
        self.fetched += player.fetched
        self.evicted += player.evicted + player.ended_evicted
        self.refusals += player.refusals

    @property
    def operations_per_s(self) -> float:
        """Operations a second, all checks included."""
        return self.operations / self.seconds if self.seconds else 0.0

    @property
    def peak_growth(self) -> int:
        """Bytes between the first and the largest sample."""
        return max(self.resident) - self.resident[0] if self.resident else 0

    @property
    def late_growth(self) -> int | None:
        """Bytes that the second half added; None for a run that is too short to say.

        The smallest samples of the second and the fourth quarter are compared: what a pool leaves
        to the allocator for a while is no growth.
        """
        quarter = len(self.resident) // 4
        if quarter < LEAST_SAMPLES:
            return None
        return min(self.resident[-quarter:]) - min(self.resident[quarter : 2 * quarter])

    def as_dict(self) -> dict[str, int | float | None]:
        """Plain data: the counts, and what follows from them."""
        counts = {name: value for name, value in vars(self).items() if name != "resident"}
        return {
            **counts,
            "operations_per_s": round(self.operations_per_s, 1),
            "peak_growth_bytes": self.peak_growth,
            "late_growth_bytes": self.late_growth,
        }
