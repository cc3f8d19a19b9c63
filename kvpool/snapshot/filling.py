"""Fill: the pages of a snapshot that verify, into a fresh pool."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvpool.snapshot.checksums import PageHasher
from kvpool.snapshot.opening import Snapshot
from kvpool.snapshot.planting import plant
from kvpool.snapshot.reports import MOST_LISTED, DroppedPage, LoadReport
from kvpool.snapshot.saving import CHUNK_BYTES
from kvpool.storage import KVStorage
from kvpool_ext.ledger import PageLedger


def fill_pool(snapshot: Snapshot, ledger: PageLedger, storage: KVStorage) -> LoadReport:
    """Bring in every page that verifies, with all pages above it, while there is room.

    The most valuable come first, each behind its parent: so one pass decides, and pages for which
    there is no room are not even read.

    Parameters
    ----------
    snapshot : Snapshot
        Of the storage's shape and dtype.
    ledger, storage
        Of a pool that has handed out nothing.

    Raises
    ------
    SnapshotError
        The file shrinks meanwhile. The pool is of no use then.
    """
    columns, n = snapshot.columns, snapshot.columns.num_pages
    page_bytes = snapshot.contents.fingerprint.page_bytes
    room = min(n, ledger.allocator.num_free)
    step = max(1, min(CHUNK_BYTES // page_bytes, room))
    page_shape = snapshot.contents.fingerprint.page_shape
    staging = np.empty((step, *page_shape), storage.dtype.storage)
    rows = staging.view(np.uint8).reshape(step, -1)
    verdicts = _Verdicts(snapshot, room)
    page_ids = [np.empty(0, np.int32)]
    with PageHasher() as hasher:
        for begin in range(0, n, step):
            end = min(n, begin + step)
            num_kept = len(verdicts.kept)
            to = rows[: max(0, min(end, snapshot.num_whole) - begin) if num_kept < room else 0]
            snapshot.read_pages(begin, to)
            found = hasher.checksums(snapshot.identities[begin : begin + len(to)], to)
            for page in range(begin, end):
                verdicts.judge(page, found[page - begin] if page - begin < len(to) else None)
            if len(verdicts.kept) > num_kept:
                chosen = np.array(verdicts.kept[num_kept:]) - begin
                page_ids.append(_put_pages(ledger, storage, staging, chosen))
    plant(ledger.tree, columns, np.array(verdicts.kept, np.int64), np.concatenate(page_ids))
    return verdicts.report


class _Verdicts:
    """Which pages to keep, and the report that says so; judged in their order."""

    def __init__(self, snapshot: Snapshot, room: int) -> None:
        self.kept: list[int] = []
        self.report = LoadReport(
            snapshot.path,
            pages_saved=snapshot.columns.num_pages,
            file_bytes=snapshot.file_bytes,
            expected_bytes=snapshot.expected_bytes,
        )
        self._snapshot = snapshot
        self._parents = snapshot.columns.parents.tolist()
        self._reasons: list[str | None] = []  # why a page is not kept, None: it is
        self._room = room

    def judge(self, page: int, checksum: bytes | None) -> None:
        """Decide on the next page; `checksum` of what was read, None where nothing was."""
        parent = self._parents[page]
        above = self._reasons[parent] if parent >= 0 else None
        reason = None
        if above is not None:
            reason = "room" if above == "room" else "below"
        elif len(self.kept) == self._room:
            reason = "room"
        elif checksum is None:
            reason = "cut off"
        elif checksum != self._snapshot.checksum(page):
            reason = "checksum"
        self._reasons.append(reason)
        if reason is None:
            self.kept.append(page)
            self.report.pages_loaded += 1
            return
        self.report.count(reason)
        if len(self.report.dropped) < MOST_LISTED:
            columns = self._snapshot.columns
            key = columns.namespaces[int(columns.namespace_ids[page])]
            self.report.dropped.append(DroppedPage(key, columns.start(page), reason))


def _put_pages(
    ledger: PageLedger, storage: KVStorage, staging: NDArray[Any], chosen: NDArray[np.int64]
) -> NDArray[np.int32]:
    """Take a page for each `chosen` row of `staging` and write it there; the page ids."""
    page_ids = ledger.take(chosen.size)
    assert page_ids is not None, "a fresh pool has as many as were counted"
    # Where all are chosen, without a copy.
    all_chosen = chosen[-1] + 1 == chosen.size
    pages = staging[: chosen.size] if all_chosen else staging[chosen]
    k, v = (storage.device.to_device(pages[:, part].swapaxes(0, 1)) for part in (0, 1))
    storage.write_pages(page_ids, k, v)
    return page_ids
