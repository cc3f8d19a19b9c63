"""Writer: the thread that copies chosen pages out of the pool and writes them to the tiers.

Optimistic: pages are copied while the scheduler goes on. That they were in the tree before *and*
after the copy, with the same generation, says that nobody has written to them between; a copy of
a page that was not is thrown away.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvpool.tiers.copies import PageCopies
from kvpool.tiers.ending import ends_within
from kvpool.tiers.epoch import TreeEpoch
from kvpool.tiers.stack import TierStack
from kvpool.tiers.write_back import Follower, WriteBack
from kvpool.tiers.write_queue import CachedPage, WriteQueue

Lacks = NDArray[np.bool_]  # bool [tiers, n]: which tier lacks which page
_log = logging.getLogger("kvpool.tiers")


class Writer:
    """Takes pages off a queue, one buffer full at a time.

    Parameters
    ----------
    queue : WriteQueue
        What to write.
    choice : WriteBack
        Asked for more.
    stack : TierStack
        Where to.
    copies : PageCopies
        Where from; of this thread alone.
    follower : Follower
        Knows whether a page has stayed.
    epoch : TreeEpoch
        Whether the tree is still of the weights that its keys name.
    take_mark : callable
        On a GPU: a mark of the scheduler's stream, None if that cannot be had in time.
    """

    def __init__(
        self,
        queue: WriteQueue,
        choice: WriteBack,
        stack: TierStack,
        copies: PageCopies,
        follower: Follower,
        epoch: TreeEpoch,
        take_mark: Callable[[], Any],
    ) -> None:
        self.counts = dict.fromkeys(
            ("write_pages", "write_known", "write_gone", "write_unreachable", "write_stale"), 0
        )
        self.num_tried = 0
        self._queue, self._choice, self._stack = queue, choice, stack
        self._copies, self._follower = copies, follower
        self._epoch, self._take_mark = epoch, take_mark
        self._thread = threading.Thread(target=self._run, name="kvpool-write-back", daemon=True)
        self._thread.start()

    def join(self, timeout_s: float) -> bool:
        """Wait for the thread, after its queue was closed; whether it has ended."""
        return ends_within(self._thread, timeout_s)

    def _run(self) -> None:
        num_rows = self._stack.arena.num_rows
        while (pages := self._queue.take(num_rows)) is not None:
            try:
                self._choice.choose_victims(self._follower)
                if pages:
                    self.num_tried += len(pages)
                    self._write(pages)
            except Exception:
                # The pages are lost to the tiers, the pool is as it was.
                _log.exception("write-back of %d pages failed", len(pages))

    def _write(self, pages: list[CachedPage]) -> None:
        counts = self.counts
        if self._epoch.is_over:
            counts["write_stale"] += len(pages)
            return
        lacks = self._stack.wanting([page.key for page in pages])
        wanted: Lacks = np.any(lacks, axis=0)
        self._count_unwanted(pages, wanted)
        pages = [page for page, want in zip(pages, wanted.tolist(), strict=True) if want]
        lacks = lacks[:, wanted]
        # A look before the copy: most of what has gone by now costs no copy.
        pages, lacks = self._stayed(pages, lacks)
        if not pages:
            return
        mark = None
        if self._copies.stream.needs_marks and (mark := self._take_mark()) is None:
            counts["write_unreachable"] += len(pages)
            return
        buffer = self._stack.take_buffer()
        if buffer is None:
            counts["write_unreachable"] += len(pages)
            return
        try:
            records, rows = self._stack.records, buffer.rows
            self._copies.read(_ids(pages), records.kv(rows[: len(pages)]), mark)
            stayed = self._follower.still_cached(_ids(pages), _generations(pages))
            if not stayed.all():
                rows[: int(stayed.sum())] = rows[: len(pages)][stayed]
            pages, lacks = self._only(pages, lacks, stayed)
            # A reset between: new weights, and keys that name the old ones.
            if not pages or self._epoch.is_over:
                return
            keys = [page.key for page in pages]
            records.seal(rows[: len(pages)], keys, np.stack([page.tokens for page in pages]))
            taken = self._stack.write(keys, buffer, lacks)
            counts["write_pages"] += int(taken.sum())
            counts["write_unreachable"] += int((~taken).sum())
        finally:
            buffer.release()

    def _count_unwanted(self, pages: list[CachedPage], wanted: Lacks) -> None:
        """Pages that no tier lacks: because one has them, or because none could be asked."""
        keys = [page.key for page, want in zip(pages, wanted.tolist(), strict=True) if not want]
        had = np.zeros(len(keys), np.bool_)
        for known in self._stack.known:
            had |= known.have(keys)
        self.counts["write_known"] += int(had.sum())
        self.counts["write_unreachable"] += int((~had).sum())

    def _stayed(self, pages: list[CachedPage], lacks: Lacks) -> tuple[list[CachedPage], Lacks]:
        if not pages:
            return pages, lacks
        stayed = self._follower.still_cached(_ids(pages), _generations(pages))
        return self._only(pages, lacks, stayed)

    def _only(
        self, pages: list[CachedPage], lacks: Lacks, kept: Lacks
    ) -> tuple[list[CachedPage], Lacks]:
        self.counts["write_gone"] += int((~kept).sum())
        return [page for page, keep in zip(pages, kept.tolist(), strict=True) if keep], lacks[
            :, kept
        ]


def _ids(pages: list[CachedPage]) -> NDArray[np.int32]:
    return np.array([page.page_id for page in pages], np.int32)


def _generations(pages: list[CachedPage]) -> NDArray[np.uint32]:
    return np.array([page.generation for page in pages], np.uint32)
