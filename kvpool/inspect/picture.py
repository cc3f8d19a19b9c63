"""PoolPicture: what every page of a pool is used for, to look at."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from kvpool.inspect.cells import ORDER, Run, cells_of
from kvpool.inspect.colours import LETTERS, OF_STATE, PRIVATE, Look
from kvpool.inspect.png import draw_png
from kvpool.inspect.sources import Source, owners_of
from kvpool.inspect.svg import draw_svg
from kvpool.owners import PageOwners, PageState
from kvpool.pool import KVCachePool


class PoolPicture:
    """The pages of a pool at one moment, by what they are used for.

    Made by `page_map`. It is a copy: the pool may go on. A notebook shows it by itself, and
    printing it draws it with characters.

    Attributes
    ----------
    owners : PageOwners
        State, request and holders of each page, as NumPy arrays.
    page_size : int
        Tokens per page.
    has_scratch : bool
        Whether a scratch page, never handed out, follows the pages.
    """

    def __init__(self, owners: PageOwners, page_size: int, has_scratch: bool) -> None:
        self.owners = owners
        self.page_size = page_size
        self.has_scratch = has_scratch
        ids, counts = np.unique(owners.request_ids[owners.request_ids > 0], return_counts=True)
        self._pages_by_request = dict(zip(ids.tolist(), counts.tolist(), strict=True))
        self._ranks = {request_id: rank for rank, request_id in enumerate(self._pages_by_request)}

    @property
    def num_pages(self) -> int:
        """Pages that the pool hands out."""
        return self.owners.states.size

    @property
    def title(self) -> str:
        """How large the pool is, in words."""
        tokens = f"{self.page_size:,} token{'' if self.page_size == 1 else 's'}"
        return f"{self.num_pages:,} page{'' if self.num_pages == 1 else 's'} of {tokens}"

    @property
    def pages_by_request(self) -> dict[int, int]:
        """Private pages of each request that has any, a shared one at the first."""
        return dict(self._pages_by_request)

    def counts(self) -> dict[str, int]:
        """Pages by state under the names of `KVCachePool.stats`, and ``pages_locked``."""
        count = self.owners.counts()
        return {
            "pages_total": self.num_pages,
            "pages_free": count[PageState.FREE],
            "pages_private": count[PageState.PRIVATE],
            "pages_tree": count[PageState.EVICTABLE] + count[PageState.LOCKED],
            "pages_evictable": count[PageState.EVICTABLE],
            "pages_locked": count[PageState.LOCKED],
            "pages_taken": count[PageState.TAKEN],
        }

    def text(self, columns: int = 64, max_rows: int = 16) -> str:
        """The picture in characters, one a cell, with its legend.

        Parameters
        ----------
        columns, max_rows : int
            Size of the grid; a cell stands for several pages where the pool has more.
        """
        check_grid(columns, max_rows)
        cells = cells_of(self.owners, columns, max_rows)
        glyphs = np.full(cells.num_rows * columns, " ")
        for run in cells.runs():
            first = run.row * columns + run.column
            glyphs[first : first + run.num_cells] = self._glyph(run)
        width = len(f"{self.num_pages:,}")
        lines = [
            f"{row * columns * cells.pages_per_cell:>{width},} "
            + "".join(glyphs[row * columns : (row + 1) * columns]).rstrip()
            for row in range(cells.num_rows)
        ]
        if cells.pages_per_cell > 1:
            lines.append(f"one character: {cells.pages_per_cell:,} pages, as most of them are")
        for state, _, words in self.shares():
            mark = "a-z" if state == PageState.PRIVATE else OF_STATE[state].glyph
            lines.append(f"{mark:>3} {words}")
        return "\n".join(lines)

    def svg(
        self, path: str | os.PathLike[str] | None = None, *, columns: int = 64, max_rows: int = 48
    ) -> str:
        """The picture as SVG text, for light and dark mode; tooltips name the pages of each run.

        Parameters
        ----------
        path : path, optional
            Where to write it too.
        columns, max_rows : int
            Size of the grid; a cell stands for several pages where the pool has more. The file
            has some 100 bytes for each run of equal cells, 200 for a cell of several states.
        """
        check_grid(columns, max_rows)
        drawn = draw_svg(self, cells_of(self.owners, columns, max_rows))
        if path is not None:
            Path(path).write_text(drawn, encoding="utf-8")
        return drawn

    def png(
        self,
        path: str | os.PathLike[str],
        *,
        columns: int = 64,
        max_rows: int = 48,
        dpi: int = 150,
    ) -> None:
        """Write the picture as PNG, with matplotlib.

        Parameters
        ----------
        path : path
            Where to.
        columns, max_rows : int
            Size of the grid; a cell stands for several pages where the pool has more.
        dpi : int
            Dots per inch; the picture is some 9 inches wide.

        Raises
        ------
        ImportError
            matplotlib is not installed.
        """
        check_grid(columns, max_rows)
        draw_png(self, cells_of(self.owners, columns, max_rows), path, dpi)

    # ---- for those who draw it

    def look(self, state: PageState, request_id: int) -> Look:
        """The look of a page; requests take turns with the colours of private ones."""
        if state != PageState.PRIVATE:
            return OF_STATE[state]
        return PRIVATE[self._ranks[request_id] % len(PRIVATE)]

    def shares(self) -> list[tuple[PageState, int, str]]:
        """The states that pages are in, how many are, and what a legend says of them."""
        count = self.owners.counts()
        return [
            (state, count[state], f"{self._name(state)}: {self._amount(count[state])}")
            for state in ORDER
            if count[state]
        ]

    def legend(self) -> list[tuple[list[Look], str]]:
        """Looks and words of each entry of a legend; names requests as long as colours suffice."""
        entries: list[tuple[list[Look], str]] = []
        by_request = self._pages_by_request
        for state, _, words in self.shares():
            if state != PageState.PRIVATE:
                entries.append(([OF_STATE[state]], words))
            elif len(by_request) > len(PRIVATE):
                entries.append((list(PRIVATE), words))
            else:
                entries += [
                    ([self.look(state, request_id)], f"request {request_id}: {self._amount(own)}")
                    for request_id, own in by_request.items()
                ]
        return entries

    def _name(self, state: PageState) -> str:
        if state != PageState.PRIVATE:
            return OF_STATE[state].name
        num_requests = len(self._pages_by_request)
        return f"private to {num_requests:,} request{'' if num_requests == 1 else 's'}"

    def _amount(self, count: int) -> str:
        """Pages and their share of all; never 0 % of some, nor 100 % of not all."""
        share = 100 * count / self.num_pages
        percent = "<0.1" if share < 0.1 else ">99.9" if 99.9 < share < 100 else f"{share:.1f}"
        return f"{count:,} ({percent} %)"

    def _glyph(self, run: Run) -> str:
        state = max(run.counts, key=run.counts.__getitem__)
        if state == PageState.PRIVATE:
            return LETTERS[self._ranks[run.request_id] % len(LETTERS)]
        return OF_STATE[state].glyph

    def _repr_svg_(self) -> str:
        return self.svg()

    def __str__(self) -> str:
        return self.text()


def page_map(pool: Source) -> PoolPicture:
    """What every page of a pool is used for now: free, private, cached, taken.

    For the scheduler thread, as every call of a pool. It costs one pass over free list, tree and
    requests: a few milliseconds for 100,000 pages.

    Parameters
    ----------
    pool : KVCachePool or RequestTable
        What to look at.

    Returns
    -------
    PoolPicture
        Print it, or call its `svg`, `png` or `text`.
    """
    owners, page_size = owners_of(pool)
    return PoolPicture(owners, page_size, isinstance(pool, KVCachePool))


def check_grid(columns: int, max_rows: int) -> None:
    """TypeError or ValueError for a grid without cells."""
    for name, value in (("columns", columns), ("max_rows", max_rows)):
        if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
            raise TypeError(f"{name} must be an int, got {type(value).__name__}")
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
