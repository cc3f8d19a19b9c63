"""PageMirror: what the cached pages of a pool are called and hold, by page id."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvpool.following.contract import StoredRun
from kvpool.following.pauses import PAGES_AT_ONCE, Pauses
from kvpool.following.records import Record
from kvpool.page_keys import PageKeys
from kvpool.request import ExtraKey

_MOST_ROOTS = 4096


class PageMirror:
    """Keys, tokens and generations of cached pages as far as a follower has told of them.

    Parameters
    ----------
    num_pages : int
        Pages of the pool.
    keys : PageKeys
        How they are called.
    pauses : Pauses
        Are made where there is much to do.
    """

    def __init__(self, num_pages: int, keys: PageKeys, pauses: Pauses) -> None:
        self._keys = keys
        self._pauses = pauses
        self._names: list[bytes | None] = [None] * num_pages
        self._namespaces: list[ExtraKey] = [None] * num_pages
        self._tokens = np.zeros((num_pages, keys.page_size), np.int32)
        self._generations = np.zeros(num_pages, np.uint32)
        self._is_cached = np.zeros(num_pages, np.bool_)
        self._roots: dict[ExtraKey, bytes] = {}

    @property
    def num_cached(self) -> int:
        """Pages that are in the mirror."""
        return int(np.count_nonzero(self._is_cached))

    def store(self, record: Record) -> StoredRun:
        """Take in stored pages, and say what a subscriber is told of them.

        Pages that are here already, in the same generation, keep their keys: they are those of the
        same tokens below the same pages.
        """
        page_ids, above = record.page_ids, record.above
        extra_key = record.extra_key if above < 0 else self._namespaces[above]
        parent_key = None if above < 0 else self._names[above]
        if above >= 0 and not self._is_cached[above]:
            raise RuntimeError(
                f"page {page_ids[0]} came below page {above}, of which nobody told: the journal "
                "of the tree is out of sync"
            )
        names: list[bytes] = []
        last = self._root(extra_key) if parent_key is None else parent_key
        for begin in range(0, len(page_ids), PAGES_AT_ONCE):
            part = slice(begin, begin + PAGES_AT_ONCE)
            names += self._name(
                page_ids[part], record.generations[part], record.tokens[part], last
            )
            last = names[-1]
            for page, name in zip(page_ids[part].tolist(), names[part], strict=True):
                self._names[page] = name
                self._namespaces[page] = extra_key
            self._pauses.after(len(page_ids[part]))
        self._tokens[page_ids] = record.tokens
        self._generations[page_ids] = record.generations
        self._is_cached[page_ids] = True
        # Not the journal's memory: a subscriber may keep this for long.
        return StoredRun(
            page_ids.copy(),
            names,
            parent_key,
            record.tokens.copy(),
            extra_key,
            record.generations.copy(),
        )

    def _name(
        self,
        page_ids: NDArray[np.int32],
        generations: NDArray[np.uint32],
        tokens: NDArray[np.int32],
        above: bytes,
    ) -> list[bytes]:
        names: list[bytes] = []
        same = self._generations[page_ids] == generations
        for page, is_same in zip(page_ids.tolist(), same.tolist(), strict=True):
            name = self._names[page] if is_same else None
            if name is None:
                break
            names.append(name)
        if len(names) < len(page_ids):
            names += self._keys.below(names[-1] if names else above, tokens[len(names) :])
        return names

    def remove(self, page_ids: NDArray[np.int32]) -> list[bytes]:
        """Forget pages; their keys."""
        names: list[bytes] = []
        for begin in range(0, len(page_ids), PAGES_AT_ONCE):
            ids = page_ids[begin : begin + PAGES_AT_ONCE].tolist()
            names += [name for page in ids if (name := self._names[page]) is not None]
            for page in ids:
                self._names[page] = None
            self._pauses.after(len(ids))
        if len(names) < len(page_ids) or not self._is_cached[page_ids].all():
            raise RuntimeError(
                f"of {len(page_ids)} pages that left the tree nobody had told that some were in "
                "it: the journal of the tree is out of sync"
            )
        self._is_cached[page_ids] = False
        return names

    def clear(self) -> None:
        """Forget that any page is cached; keys are kept for pages that turn out to have stayed."""
        self._is_cached[:] = False

    def describe(
        self, page_ids: NDArray[np.int32]
    ) -> tuple[list[bytes | None], NDArray[np.int32], NDArray[np.uint32]]:
        """As `TreeFollower.describe`."""
        cached = self._is_cached[page_ids].tolist()
        names = [
            self._names[page] if is_cached else None
            for page, is_cached in zip(page_ids.tolist(), cached, strict=True)
        ]
        return names, self._tokens[page_ids], self._generations[page_ids]

    def _root(self, extra_key: ExtraKey) -> bytes:
        root = self._roots.get(extra_key)
        if root is None:
            if len(self._roots) >= _MOST_ROOTS:
                self._roots.clear()
            root = self._roots[extra_key] = self._keys.root(extra_key)
        return root
