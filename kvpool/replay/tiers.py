"""Tiers of a replay: which pages a tier of some size would have, without their bytes.

A tier here is the index that `HostTier` has, with a page's tokens for its size, under the keys
that a pool's pages have. What comes to the tree of an instance and leaves it, a `TreeFollower`
tells, as it tells a pool's tiers. A replay knows no time: a page is in its tiers as soon as the
instance has got or lost it, and no page is evicted before it was copied. It knows no buffers
either: pages are asked for one by one, where a pool asks for a buffer full at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from kvpool.following.contract import StoredRun
from kvpool.tiers.index import LRUIndex


class TierModel:
    """Which pages one tier has.

    Parameters
    ----------
    capacity : int or None
        Tokens; None: without bound. It has as many whole pages as they fill.
    page_size : int
        Tokens per page.
    """

    def __init__(self, capacity: int | None, page_size: int) -> None:
        self._page_size = page_size
        self._index: LRUIndex[None] = LRUIndex(capacity)

    @property
    def num_pages(self) -> int:
        """Pages that it has; they never become fewer."""
        return len(self._index)

    @property
    def evicted_pages(self) -> int:
        """Pages that went to make room."""
        return self._index.num_evicted

    def __contains__(self, key: bytes) -> bool:
        return key in self._index

    def read(self, key: bytes) -> bool:
        """Whether the page is there; then it is the most recently used."""
        return self._index.touch(key)

    def write(self, keys: Iterable[bytes]) -> None:
        """Have these pages; one that is here already is not written, and that is no use of it."""
        self._index.put_new(keys, None, self._page_size)


class InstanceTiers:
    """The tiers that one instance reaches; subscribes to its tree.

    Parameters
    ----------
    host : TierModel or None
        Its own.
    remote : TierModel or None
        The store that it shares.
    write : str
        ``"insert"`` or ``"evict"``, see `Fleet`.
    """

    def __init__(self, host: TierModel | None, remote: TierModel | None, write: str) -> None:
        self.host, self.remote = host, remote
        self._tiers = [tier for tier in (host, remote) if tier is not None]
        self._on_insert = write == "insert"

    def read_run(self, keys: Sequence[bytes]) -> tuple[int, int]:
        """Read the leading pages that are there, each from the nearest tier that has it.

        What only the store had goes to the host tier too.

        Returns
        -------
        tuple of int
            Pages that came from the host tier, and from the store.
        """
        num_host = num_remote = 0
        for key in keys:
            if self.host is not None and self.host.read(key):
                num_host += 1
            elif self.remote is not None and self.remote.read(key):
                num_remote += 1
                if self.host is not None:
                    self.host.write([key])
            else:
                break
        return num_host, num_remote

    def has(self, key: bytes) -> bool:
        """Whether some tier has a page; no access."""
        return any(key in tier for tier in self._tiers)

    # ---- TreeSubscriber

    def on_stored(self, run: StoredRun) -> None:
        """Pages came to the tree."""
        if self._on_insert:
            self._write(run.keys)

    def on_removed(self, page_ids: NDArray[np.int32], keys: list[bytes]) -> None:
        """Pages left it."""
        if not self._on_insert:
            self._write(keys)

    def on_cleared(self) -> None:
        """The tree is told anew."""

    def on_caught_up(self) -> None:
        """All has been told."""

    def _write(self, keys: Sequence[bytes]) -> None:
        for tier in self._tiers:
            tier.write(keys)
