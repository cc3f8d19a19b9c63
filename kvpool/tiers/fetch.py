"""Fetch: one prefetch on its way, which the scheduler's thread and the background share.

The background writes to the fetch's pages only under its lock and only until the scheduler has
ended it; ending takes the lock, so it waits for one small copy at most, and never for a tier.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvpool.request import ExtraKey


class Fetch:
    """What is to be fetched, where to, and how far that is.

    Parameters
    ----------
    number : int
        From 1 up; the owner of its pages in words.
    tokens : ndarray
        int32, whole pages from the start of the prompt: those that the tree had, then those that
        are to be fetched.
    extra_key : str, bytes, int or None
        Namespace.
    local_ids : ndarray
        int32, pages that the tree had at the call, locked as long as the fetch lives.
    publishes : bool
        Whether pages go to the tree as they arrive, or when the caller says so.
    epoch : int
        Of the tree at the call: after a reset nothing is published.

    Attributes
    ----------
    page_ids : ndarray
        int32 ``[n]``, taken pages for what follows the local ones.
    num_verified : int
        Leading pages of `page_ids` that are written.
    num_published : int
        Of these, pages that went to the tree, or were there already. The scheduler's.
    ended : bool
        The scheduler is done with it: nothing is written to its pages any more.
    dropped : bool
        The caller has let go of it without a word.
    is_done : bool
        The background is done with it, or it ended.
    """

    def __init__(
        self,
        number: int,
        tokens: NDArray[np.int32],
        extra_key: ExtraKey,
        local_ids: NDArray[np.int32],
        publishes: bool,
        epoch: int,
    ) -> None:
        self.number = number
        self.tokens, self.extra_key, self.local_ids = tokens, extra_key, local_ids
        self.publishes, self.epoch = publishes, epoch
        self.page_ids = np.empty(0, np.int32)
        self.mark: Any = None
        self.num_verified = 0
        self.num_published = 0
        self.ended = False
        self.dropped = False
        self.is_done = False
        # A thread may come again: in a clean-up that the collector runs while it has the lock.
        self._changed = threading.Condition(threading.RLock())
        self._is_writing = False
        self._process_id = os.getpid()
        self._num_ended = 0

    def give_pages(self, page_ids: NDArray[np.int32], mark: Any) -> None:
        """Set the pages to write to, and on a GPU the mark to wait for; before the fetch runs."""
        self.page_ids, self.mark = page_ids, mark

    @property
    def num_available(self) -> int:
        """Pages from the start that the tree had, or that have been written so far."""
        return self._num_ended if self.ended else self.local_ids.size + self.num_verified

    def wait(self, timeout_s: float | None) -> None:
        """Wait until it is done, or for `timeout_s`; not in a fork, where nobody fetches."""
        if self.is_done or self._is_forked:
            return
        with self._changed:
            self._changed.wait_for(lambda: self.is_done, timeout_s)

    # ---- the background

    def fill(self, first: int, num_pages: int, write: Callable[[NDArray[np.int32]], None]) -> bool:
        """Have `write` fill `num_pages` of `page_ids` from `first` on; False once it has ended."""
        with self._changed:
            if self.ended:
                return False
            self._is_writing = True
            try:
                write(self.page_ids[first : first + num_pages])
            finally:
                self._is_writing = False
            self.num_verified = first + num_pages
        return True

    def finish(self) -> None:
        """Say that nothing more comes."""
        with self._changed:
            self.is_done = True
            self._changed.notify_all()

    # ---- the scheduler

    def end(self, num_available: int) -> bool:
        """Have the background write no more, once and for all.

        Parameters
        ----------
        num_available : int
            What there is to say of it from now on.

        Returns
        -------
        bool
            False, and no change, where a write of this very thread is under way: the caller is a
            clean-up that the collector runs in the middle of it.
        """
        if self._is_forked:
            self.ended, self.is_done, self._num_ended = True, True, num_available
            return True
        with self._changed:
            if self._is_writing:
                return False
            self._num_ended, self.ended = num_available, True
            self.finish()
        return True

    @property
    def _is_forked(self) -> bool:
        """Whether this is a fork: the lock may have been held, and stays so for ever."""
        return os.getpid() != self._process_id
