"""Poison mode: a pool that shows a stale read, a use after free and an unwritten hit.

A debugging mode, off by default. Free pages, and pages that were handed out but not entered yet,
hold a NaN that nobody else writes; what the tree caches is hashed when it enters, and compared at
each hit. Everything that notices stands beside the pool's own parts, as subclasses that a pool
takes when it is made: without poison not a line of this package runs.

==================  ==============================================================================
page                what it holds
==================  ==============================================================================
free                poison, whole
handed out          poison, whole, until a put (or `prepare` of a graph) first enters it
entered             zeros but for what was written: a masked read may meet the rest of it
in the tree         what was hashed
scratch             finite, always
==================  ==============================================================================
"""

from __future__ import annotations

from kvpool.poison.reading import ReadGuard
from kvpool.poison.step import PoisonedStep
from kvpool.poison.table import PoisonedTable
from kvpool.switches import is_switched_on

__all__ = ["PoisonedStep", "PoisonedTable", "ReadGuard", "wants_poison"]


def wants_poison(poison: bool | None) -> bool:
    """`poison`, or where it is None what the switch ``KVPOOL_POISON`` says: off by default."""
    return is_switched_on("KVPOOL_POISON", False) if poison is None else bool(poison)
