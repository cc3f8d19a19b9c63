"""Cached: which pages a pool may match, whatever the timing, as fingerprints of their ends."""

from __future__ import annotations

from kvpool.soak.lineage import Lineage


class Cached:
    """Pages that were published in a tree, and those that tiers may have got from it.

    Eviction takes nothing out: what is here may be cached, what is not must not be.

    Parameters
    ----------
    page_size : int
        Tokens a page.
    """

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._tree: set[int] = set()
        self._tiers: set[int] = set()
        self.writes = False
        """Whether tiers are written to now."""

    def publish(self, lineage: Lineage, length: int) -> None:
        """The first `length` tokens came to the tree."""
        pages = lineage.page_prints(length, self._page_size)
        self._tree.update(pages)
        if self.writes:
            self._tiers.update(pages)

    def write_all(self) -> None:
        """Tiers are written to from now on, with what is in the tree already."""
        self.writes = True
        self._tiers |= self._tree

    def clear_tree(self) -> None:
        """The tree was reset, or is another one; until somebody says so, no tier is written to."""
        self._tree.clear()
        self.writes = False

    def fetch(self, lineage: Lineage, start: int, end: int) -> None:
        """Of the tokens ``[start, end)`` whatever tiers have may come to the tree."""
        pages = lineage.page_prints(end, self._page_size)
        for page in pages[start // self._page_size :]:
            if page not in self._tiers:
                return
            self._tree.add(page)

    def most(self, lineage: Lineage, length: int) -> int:
        """Of the first `length` tokens, those that a match may find."""
        for i, page in enumerate(lineage.page_prints(length, self._page_size)):
            if page not in self._tree:
                return i * self._page_size
        return length - length % self._page_size
