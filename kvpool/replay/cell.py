"""Cell: what a trace is replayed through, and how large a pool that takes."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product

from kvpool.numbers import counted
from kvpool.replay.fleet import PLAIN, Fleet
from kvpool.replay.reader import TraceError
from kvpool.replay.survey import Survey
from kvpool_ext.eviction import EVICTION_POLICIES

MAX_PAGE_SIZE = 1 << 20  # the tree's
MAX_PAGES = 2**31 - 1  # page ids are int32
RECORD_BYTES = 320  # measured: key, entry and place in the order of one page in a tier's index
FOLLOWED_BYTES = 160  # what a follower keeps of a page besides its tokens


@dataclass(frozen=True)
class Cell:
    """One pool, or a fleet of instances with one each.

    Attributes
    ----------
    capacity : int or None
        Tokens; the pool has as many whole pages as they fill. None: nothing is ever evicted.
    page_size : int
        Tokens per page.
    policy : str
        What is evicted first, one of `EVICTION_POLICIES`.
    fleet : Fleet
        Instances with such a pool, and the tiers below them.

    Raises
    ------
    ValueError, TypeError
        No page fits, no such page size or policy, a policy without a capacity, or no integer.
    """

    capacity: int | None
    page_size: int
    policy: str = "lru"
    fleet: Fleet = PLAIN

    def __post_init__(self) -> None:
        for name, value in (("page_size", self.page_size), ("capacity", self.capacity)):
            if type(value) is not int and not (value is None and name == "capacity"):
                raise TypeError(f"{name} must be an int, got {type(value).__name__}")
        if not 1 <= self.page_size <= MAX_PAGE_SIZE:
            raise ValueError(f"page_size must be in 1 .. {MAX_PAGE_SIZE:,}, got {self.page_size}")
        for name, tokens in (
            ("capacity", self.capacity),
            ("host tier", self.fleet.host_tier or None),
            ("remote tier", self.fleet.remote_tier or None),
        ):
            if tokens is not None and tokens < self.page_size:
                raise ValueError(
                    f"a {name} of {counted(tokens, 'token')} holds no page of {self.page_size:,}"
                )
        check_policy(self.policy)
        if self.capacity is None and self.policy != "lru":
            raise ValueError(
                f"a pool without bound evicts nothing: leave its policy out, got {self.policy!r}"
            )

    @property
    def is_bound(self) -> bool:
        """One pool in which nothing is ever evicted: what nothing can exceed."""
        return self.capacity is None and self.fleet.is_plain

    @property
    def is_unbounded(self) -> bool:
        """Whether something in it grows with the trace."""
        return None in (self.capacity, self.fleet.host_tier, self.fleet.remote_tier)

    def __str__(self) -> str:
        fleet = "" if self.fleet.is_plain else f", {self.fleet}"
        if self.capacity is None:
            return f"unbounded, page size {self.page_size}{fleet}"
        return (
            f"{counted(self.capacity, 'token')}, page size {self.page_size}, {self.policy}{fleet}"
        )

    def num_pages(self, survey: Survey, window: int) -> int:
        """Pages to make each pool of: never more than the trace can fill.

        Raises
        ------
        TraceError
            They, or the index of what the tiers have, need more memory than the machine has, or
            more page ids than there are.
        """
        count = self.fleet.instances
        most_pages = num_pages = survey.unbounded_pages(self.page_size, window * count)
        if self.capacity is not None:
            num_pages = min(num_pages, self.capacity // self.page_size)
        if num_pages > MAX_PAGES:
            raise TraceError(
                f"{self}: {num_pages:,} pages are more than the {MAX_PAGES:,} that a pool can "
                "have: take a larger page size, a smaller capacity or fewer requests"
            )
        num_records = self._num_records(most_pages)
        needed = count * bookkeeping_bytes(num_pages, self.page_size)
        if self.fleet.has_tiers:
            needed += num_records * RECORD_BYTES
            needed += count * following_bytes(num_pages, self.page_size)
        total = _memory_bytes()
        if needed > total:
            pools = f" in each of {count} pools" if count > 1 else ""
            records = f" and {num_records:,} in tiers" if num_records else ""
            raise TraceError(
                f"{self}: the books over {num_pages:,} pages{pools}{records} take "
                f"{needed / 2**30:,.1f} GiB, this machine has {total / 2**30:,.1f}: take a "
                "smaller capacity, fewer requests, or leave the unbounded pool out"
            )
        return num_pages

    def _num_records(self, most_pages: int) -> int:
        """Pages that all tiers have together at most."""

        def room(tokens: int | None) -> int:
            return most_pages if tokens is None else min(most_pages, tokens // self.page_size)

        fleet = self.fleet
        return fleet.instances * room(fleet.host_tier) + room(fleet.remote_tier)


def check_policy(policy: str) -> None:
    """ValueError if no pool knows this policy."""
    if policy not in EVICTION_POLICIES:
        names = ", ".join(EVICTION_POLICIES)
        raise ValueError(f"policy must be one of {names}, got {policy!r}")


def grid(
    capacities: Iterable[int | None],
    page_sizes: Iterable[int],
    policies: Sequence[str] = ("lru",),
    fleets: Sequence[Fleet] = (PLAIN,),
) -> list[Cell]:
    """Every combination, capacities innermost; a pool without bound has no policy.

    >>> [str(cell) for cell in grid([1000, None], [16])]
    ['1,000 tokens, page size 16, lru', 'unbounded, page size 16']

    Raises
    ------
    ValueError
        No such policy, also where no capacity is there for it to matter.
    """
    for policy in policies:
        check_policy(policy)
    cells = (
        Cell(capacity, page_size, "lru" if capacity is None else policy, fleet)
        for page_size, policy, fleet, capacity in product(page_sizes, policies, fleets, capacities)
    )
    return list(dict.fromkeys(cells))


def bookkeeping_bytes(num_pages: int, page_size: int) -> int:
    """About what a pool of these pages takes without any K and V: tokens, page ids, free list."""
    tokens = num_pages * page_size * 4
    page_ids = num_pages * 4 * 9 // 8
    return (tokens + page_ids) * 17 // 16 + num_pages * 5


def following_bytes(num_pages: int, page_size: int) -> int:
    """About what following a tree of these pages takes: key and tokens of each."""
    return num_pages * (page_size * 4 + FOLLOWED_BYTES)


def _memory_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
