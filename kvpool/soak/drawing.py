"""Draw: where the choices of random traffic come from."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Protocol, TypeVar

ItemT = TypeVar("ItemT")


class Draw(Protocol):
    """A source of choices: a seeded generator here, Hypothesis in the tests."""

    def integer(self, least: int, most: int) -> int:
        """An integer, both ends included."""

    def chance(self, percent: int) -> bool:
        """True in so many cases of a hundred."""

    def item(self, items: Sequence[ItemT]) -> ItemT:
        """One of some items."""


class RandomDraw:
    """Choices of a seeded generator: the same seed, the same traffic."""

    def __init__(self, seed: int | str) -> None:
        self._random = random.Random(seed)
        self._uniform = self._random.random

    def integer(self, least: int, most: int) -> int:
        """An integer, both ends included."""
        return least + int(self._uniform() * (most - least + 1))

    def chance(self, percent: int) -> bool:
        """True in so many cases of a hundred."""
        return self._uniform() * 100 < percent

    def item(self, items: Sequence[ItemT]) -> ItemT:
        """One of some items."""
        return items[int(self._uniform() * len(items))]
