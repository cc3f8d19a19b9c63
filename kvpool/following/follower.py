"""TreeFollower: reads the journal of a tree, and tells subscribers what came and what went."""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import numpy as np
from numpy.typing import NDArray

from kvpool.following.contract import TreeSubscriber
from kvpool.following.polling import Alarm, start_polling
from kvpool.following.telling import Telling
from kvpool.numbers import whole_number
from kvpool.page_keys import PageKeys
from kvpool_ext.ledger import PageLedger
from kvpool_ext.listing import follow_tree, unfollow_tree
from kvpool_ext.victims import next_victims

_logger = logging.getLogger(__name__)


class TreeFollower:
    """Follows one tree; made when tiers or events are attached, and one for both.

    Keys are computed, and subscribers told, by whoever drains: a thread in the background after
    `start`, or the caller of `drain`. No call here enters the gate of the pool, and any thread may
    make it at any time; RuntimeError after `close`, and in a process that was forked since.

    Parameters
    ----------
    ledger : PageLedger
        Whose tree.
    keys : PageKeys
        What its pages are called.
    interval_s : float
        How long the thread sleeps between two looks at a tree that changes; up to 16 ms at one
        that rests.
    max_bytes : int
        Changes that nobody has read yet. Beyond that they are dropped, and the whole tree is told
        anew.

    Raises
    ------
    ValueError
        The tree is followed already, keys of another page size, an interval of 0 or less, or a
        limit that no record fits in.
    """

    def __init__(
        self,
        ledger: PageLedger,
        keys: PageKeys,
        *,
        interval_s: float = 0.002,
        max_bytes: int = 64 << 20,
    ) -> None:
        if keys.page_size != ledger.page_size:
            raise ValueError(
                f"keys are of pages of {keys.page_size} tokens, the tree has {ledger.page_size}"
            )
        if not 0 < interval_s < float("inf"):
            raise ValueError(f"interval_s must be above 0, got {interval_s}")
        self.keys = keys
        self._interval_s = interval_s
        self._tree = ledger.tree
        self._telling = Telling(ledger.tree, ledger.allocator.num_pages, keys)
        # Held by whoever drains; a subscriber may call from inside of it.
        self._lock = threading.RLock()
        self._is_draining = False
        self._failed_drains = 0
        self._process_id = os.getpid()
        self._thread: threading.Thread | None = None
        self._alarm = Alarm()
        self._closed = False
        self._journal = follow_tree(
            ledger, whole_number(max_bytes, "max_bytes", at_most=np.iinfo(np.int64).max)
        )
        # Also where nobody closes it: a tree that nobody follows shall not pay for it.
        self._unfollow = weakref.finalize(self, unfollow_tree, ledger.tree, self._journal)

    # ---- subscribers

    def subscribe(self, subscriber: TreeSubscriber) -> Callable[[], None]:
        """Have `subscriber` told of all that is there, and then of what changes.

        It begins with the next drain. What it raises is logged and ends its subscription.

        Returns
        -------
        callable
            Ends the subscription: once it has returned, the subscriber is told nothing more. It
            waits for a drain that is at work, unless the subscriber itself calls it.
        """
        self._check_open()  # without the lock: a drain that is at work is not waited for
        self._telling.subscribers.add(subscriber)
        self._alarm.ring()
        return partial(self._unsubscribe, subscriber)

    def _unsubscribe(self, subscriber: TreeSubscriber) -> None:
        if self._is_forked():
            return
        with self._lock:
            self._telling.subscribers.remove(subscriber)

    # ---- draining

    def start(self) -> None:
        """Drain in a thread in the background from now on; a second call does nothing.

        The thread is a daemon, and ends with `close` or when nobody has the follower any more.
        """
        with self._open():
            if self._thread is None:
                self._thread = start_polling(self, self._interval_s, self._alarm)

    def drain(self) -> None:
        """Tell all changes so far: when this returns, every subscriber knows them.

        In the caller's thread; with the one in the background it takes turns.

        Raises
        ------
        RuntimeError
            The follower is closed, was made before a fork, or a subscriber calls this while it is
            told something.
        MemoryError
            The next drain tells the whole tree anew.
        """
        self._drain(pausing=False)

    def _drain(self, *, pausing: bool) -> None:
        with self._open():
            if self._is_draining:
                raise RuntimeError(
                    "drain was called by a subscriber that is being told something: what it waits "
                    "for comes when it returns"
                )
            self._is_draining = True
            try:
                self._telling.tell(pausing=pausing)
            except BaseException:
                # Some were told, some were not.
                self._journal.forget()
                self._failed_drains += 1
                raise
            finally:
                self._is_draining = False

    def look(self) -> bool | None:
        """Drain if there is anything to tell, and say so; None once closed. For the thread."""
        if self._closed:
            return None
        if len(self._telling.subscribers) == 0:
            self._journal.forget()  # no keys for nobody; who comes is told of the whole tree
        if not self._telling.has_news:
            return False
        try:
            self._drain(pausing=True)
        except Exception:
            if self.closed:
                return None
            raise
        return True

    # ---- questions

    def still_cached(
        self, page_ids: NDArray[np.int32], generations: NDArray[np.uint32]
    ) -> NDArray[np.bool_]:
        """Whether pages have stayed in the tree since they were stored in these generations.

        Parameters
        ----------
        page_ids : ndarray
            int32 ``[n]``, as in `StoredRun`.
        generations : ndarray
            uint32 ``[n]``, as in `StoredRun`.

        Returns
        -------
        ndarray
            bool ``[n]``, all of one moment: this one. None of them once the follower is closed.

        Raises
        ------
        ValueError
            A page id that the pool does not have, or arrays of different lengths.
        """
        answer = self._journal.still_cached(page_ids, generations)
        return np.zeros_like(answer) if self._closed else answer

    def next_victims(self, num_pages: int) -> NDArray[np.int32]:
        """The pages that eviction would take next, the first to go first; changes nothing.

        Parameters
        ----------
        num_pages : int
            At most so many.

        Returns
        -------
        ndarray
            int32 ``[n]``: cached pages that nobody holds. A subscriber may not have been told yet
            that one of them was stored.
        """
        return next_victims(self._tree, whole_number(num_pages, "num_pages"))

    def describe(
        self, page_ids: NDArray[np.int32]
    ) -> tuple[list[bytes | None], NDArray[np.int32], NDArray[np.uint32]]:
        """Keys, tokens and generations of pages as subscribers were told of them.

        Waits for a drain that is at work, unless a subscriber calls it.

        Parameters
        ----------
        page_ids : ndarray
            int32 ``[n]``.

        Returns
        -------
        keys : list of bytes or None
            ``[n]``; None for a page that was not told as stored, or was told as removed. What the
            other two say of it means nothing.
        tokens : ndarray
            int32 ``[n, page_size]``.
        generations : ndarray
            uint32 ``[n]``, for `still_cached`.
        """
        self._check_process()
        with self._lock:
            return self._telling.mirror.describe(page_ids)

    def stats(self) -> dict[str, int]:
        """Pages and resets told so far; ``resyncs``: how often all was told anew.

        ``losses``: how often the journal had no room or no memory, or a drain failed.
        """
        return self._telling.counts | {
            "failed_drains": self._failed_drains,
            "cached_pages": self._telling.mirror.num_cached,
            "unread_bytes": 4 * self._journal.num_words,
            "losses": self._journal.num_losses,
            "subscribers": len(self._telling.subscribers),
            "dropped_subscribers": self._telling.subscribers.num_dropped,
        }

    # ---- the end

    def close(self, timeout_s: float = 5.0) -> None:
        """Follow no longer, and wait for the thread; a second call does nothing.

        What has not been told is not told any more: `drain` first where it matters. A thread whose
        subscriber has not returned after `timeout_s` is left to end by itself, and that is logged.
        """
        was_closed, self._closed = self._closed, True
        self._alarm.ring()
        self._unfollow()
        thread, own = self._thread, threading.current_thread()
        # In a forked child there is none. A subscriber may close from inside of it.
        if was_closed or thread is None or thread is own or self._is_forked():
            return
        thread.join(timeout_s)
        if thread.is_alive():
            _logger.warning("a subscriber of the tree has not returned for %s s", timeout_s)

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    @contextmanager
    def _open(self) -> Iterator[None]:
        """Hold the lock of a follower that is at work."""
        # Before the lock, which a thread may have held when the process was forked.
        self._check_open()
        with self._lock:
            self._check_open()
            yield

    def _is_forked(self) -> bool:
        return os.getpid() != self._process_id

    def _check_open(self) -> None:
        self._check_process()
        if self._closed:
            raise RuntimeError("the follower of the tree is closed")

    def _check_process(self) -> None:
        if self._is_forked():
            raise RuntimeError(
                f"the follower was made by process {self._process_id}, and this is its fork "
                f"{os.getpid()}, which has no thread of it: make a pool after the fork"
            )
