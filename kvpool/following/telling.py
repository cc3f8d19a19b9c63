"""Telling: the records of a journal, one after the other, into the mirror and to subscribers."""

from __future__ import annotations

from kvpool.following.contract import TreeSubscriber
from kvpool.following.mirror import PageMirror
from kvpool.following.pauses import Pauses
from kvpool.following.records import CLEARED, STORED, Record, split_records
from kvpool.following.subscribers import Subscribers
from kvpool.page_keys import PageKeys
from kvpool_ext.listing import take_changes
from kvpool_ext.radix import RadixCache


class Telling:
    """What is known of a tree, and who is told.

    Not thread-safe: the follower holds its lock around every call.

    Parameters
    ----------
    tree : RadixCache
        One that is followed.
    num_pages : int
        Pages of its pool.
    keys : PageKeys
        What its pages are called.
    """

    def __init__(self, tree: RadixCache, num_pages: int, keys: PageKeys) -> None:
        self._pauses = Pauses()
        self.mirror = PageMirror(num_pages, keys, self._pauses)
        self.subscribers = Subscribers()
        self.counts = dict.fromkeys(("stored_pages", "removed_pages", "resets", "resyncs"), 0)
        self._tree = tree
        self._page_size = keys.page_size
        self._has_listed = False

    @property
    def has_news(self) -> bool:
        """Whether there is anything to tell, and somebody to be told."""
        journal = self._tree.journal
        changed = journal is not None and (journal.num_words > 0 or journal.lost)
        return bool(self.subscribers.joining or (changed and self.subscribers.told))

    def tell(self, *, pausing: bool) -> None:
        """Tell all changes so far; those who wait to join, all that is there after them.

        Parameters
        ----------
        pausing : bool
            Let other threads have the interpreter every few pages.
        """
        self._pauses.wanted = pausing
        joining = self.subscribers.joining
        records, names, listing, listing_names = take_changes(self._tree, bool(joining))
        lost = listing is records
        self.counts["resyncs"] += lost and self._has_listed
        self._has_listed = True
        told = self.subscribers.told
        for record in split_records(records, names, self._page_size):
            self.counts["resets"] += record.kind == CLEARED and not lost
            self._tell(told, record)
        # Before they are told: if that fails, all is told anew, and to them as well.
        self.subscribers.admit(joining)
        if joining and listing is not None:
            # The mirror has these pages by now, so that no key is computed again.
            for record in split_records(listing, listing_names or [], self._page_size):
                if record.kind == STORED:
                    self.subscribers.call(joining, "on_stored", self.mirror.store(record))
        caught_up = self.subscribers.told if len(records) else joining
        self.subscribers.call(caught_up, "on_caught_up")

    def _tell(self, told: tuple[TreeSubscriber, ...], record: Record) -> None:
        if record.kind == STORED:
            self.counts["stored_pages"] += len(record.page_ids)
            self.subscribers.call(told, "on_stored", self.mirror.store(record))
        elif record.kind == CLEARED:
            self.mirror.clear()
            self.subscribers.call(told, "on_cleared")
        else:
            self.counts["removed_pages"] += len(record.page_ids)
            page_ids = record.page_ids.copy()
            self.subscribers.call(told, "on_removed", page_ids, self.mirror.remove(page_ids))
