"""What a follower of the tree is told, and whom it tells."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvpool.request import ExtraKey


@dataclass(frozen=True)
class StoredRun:
    """Pages that came to the tree together, each below the one before.

    Attributes
    ----------
    page_ids : ndarray
        int32 ``[n]``.
    keys : list of bytes
        ``[n]`` page keys.
    parent_key : bytes or None
        Key of the page above the first; None where that begins its namespace.
    tokens : ndarray
        int32 ``[n, page_size]``.
    extra_key : str, bytes, int or None
        Namespace.
    generations : ndarray
        uint32 ``[n]``: how often each page id had left the tree before. With them
        `TreeFollower.still_cached` tells whether these pages have stayed since.
    """

    page_ids: NDArray[np.int32]
    keys: list[bytes]
    parent_key: bytes | None
    tokens: NDArray[np.int32]
    extra_key: ExtraKey
    generations: NDArray[np.uint32]


class TreeSubscriber(Protocol):
    """Is told of the changes of a tree, in their order, by one thread at a time.

    A new subscriber is told of all pages that are there first. What it raises is logged and ends
    its subscription, nothing else.
    """

    def on_stored(self, run: StoredRun) -> None:
        """Pages came."""

    def on_removed(self, page_ids: NDArray[np.int32], keys: list[bytes]) -> None:
        """Pages went: int32 ``[n]``, in the order of eviction, with their keys."""

    def on_cleared(self) -> None:
        """Everything went, by a reset; or changes were lost, and what is there is told next."""

    def on_caught_up(self) -> None:
        """All changes so far have been told."""
