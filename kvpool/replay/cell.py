"""Cell: what a trace is replayed through, and how large a pool that takes."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product

from kvpool.replay.reader import TraceError
from kvpool.replay.survey import Survey
from kvpool_ext.eviction import EVICTION_POLICIES

MAX_PAGE_SIZE = 1 << 20  # the tree's
MAX_PAGES = 2**31 - 1  # page ids are int32


@dataclass(frozen=True)
class Cell:
    """One pool.

    Attributes
    ----------
    capacity : int or None
        Tokens; the pool has as many whole pages as they fill. None: nothing is ever evicted.
    page_size : int
        Tokens per page.
    policy : str
        What is evicted first, one of `EVICTION_POLICIES`.

    Raises
    ------
    ValueError, TypeError
        No page fits, no such page size or policy, a policy without a capacity, or no integer.
    """

    capacity: int | None
    page_size: int
    policy: str = "lru"

    def __post_init__(self) -> None:
        for name, value in (("page_size", self.page_size), ("capacity", self.capacity)):
            if type(value) is not int and not (value is None and name == "capacity"):
                raise TypeError(f"{name} must be an int, got {type(value).__name__}")
        if not 1 <= self.page_size <= MAX_PAGE_SIZE:
            raise ValueError(f"page_size must be in 1 .. {MAX_PAGE_SIZE:,}, got {self.page_size}")
        if self.capacity is not None and self.capacity < self.page_size:
            raise ValueError(
                f"a capacity of {self.capacity:,} tokens holds no page of {self.page_size:,}"
            )
        check_policy(self.policy)
        if self.capacity is None and self.policy != "lru":
            raise ValueError(
                f"a pool without bound evicts nothing: leave its policy out, got {self.policy!r}"
            )

    def __str__(self) -> str:
        if self.capacity is None:
            return f"unbounded, page size {self.page_size}"
        return f"{self.capacity:,} tokens, page size {self.page_size}, {self.policy}"

    def num_pages(self, survey: Survey, window: int) -> int:
        """Pages to make the pool of: never more than the trace can fill.

        Raises
        ------
        TraceError
            They need more memory than the machine has, or than page ids can name.
        """
        num_pages = survey.unbounded_pages(self.page_size, window)
        if self.capacity is not None:
            num_pages = min(num_pages, self.capacity // self.page_size)
        if num_pages > MAX_PAGES:
            raise TraceError(
                f"{self}: {num_pages:,} pages are more than the {MAX_PAGES:,} that a pool can "
                "have: take a larger page size, a smaller capacity or fewer requests"
            )
        needed, total = bookkeeping_bytes(num_pages, self.page_size), _memory_bytes()
        if needed > total:
            raise TraceError(
                f"{self}: the books over {num_pages:,} pages take {needed / 2**30:,.1f} GiB, this "
                f"machine has {total / 2**30:,.1f}: take a smaller capacity, fewer requests, or "
                "leave the unbounded pool out"
            )
        return num_pages


def check_policy(policy: str) -> None:
    """ValueError if no pool knows this policy."""
    if policy not in EVICTION_POLICIES:
        names = ", ".join(EVICTION_POLICIES)
        raise ValueError(f"policy must be one of {names}, got {policy!r}")


def grid(
    capacities: Iterable[int | None], page_sizes: Iterable[int], policies: Sequence[str] = ("lru",)
) -> list[Cell]:
    """Every combination, page sizes and policies outermost; a pool without bound has no policy.

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
        Cell(capacity, page_size, "lru" if capacity is None else policy)
        for page_size, policy, capacity in product(page_sizes, policies, capacities)
    )
    return list(dict.fromkeys(cells))


def bookkeeping_bytes(num_pages: int, page_size: int) -> int:
    """About what a pool of these pages takes without any K and V: tokens, page ids, free list."""
    tokens = num_pages * page_size * 4
    page_ids = num_pages * 4 * 9 // 8
    return (tokens + page_ids) * 17 // 16 + num_pages * 5


def _memory_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
