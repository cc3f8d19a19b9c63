"""Pools with a fault in them, for the soak to find.

`plant` may be called in any process, so that a script that was found can be run with its fault:
``python -m tests.helpers.soak_faults FAULT SCRIPT``.
"""

import ctypes
import runpy
import sys
import time

import numpy as np

from kvpool import requests, storage
from kvpool.following import TreeFollower
from kvpool.tiers.epoch import TreeEpoch
from kvpool.tiers.fetcher import Fetcher
from kvpool.tiers.flow import TierFlow
from kvpool.tiers.records import PageRecords


def write_a_slot_too_far(patch):
    """The last row of a longer write lands one slot behind its own."""
    write = storage.KVStorage.write

    def wrong(self, layer, slots, k, v):
        slots = np.array(slots)
        if slots.size > 2:
            slots[-1] = (slots[-1] + 1) % self.num_slots
        write(self, layer, slots, k, v)

    patch(storage.KVStorage, "write", wrong)


def mix_layers_up(patch):
    """The last layer reads what the first wrote."""
    read = storage.KVStorage.read

    def wrong(self, layer, slots, out=None):
        return read(self, 0, slots, out)

    patch(storage.KVStorage, "read", wrong)


def publish_a_page_too_many(patch):
    """A finish inserts a page more than was written."""
    finish = requests.RequestTable.finish

    def wrong(self, request, tokens, reuse):
        written = self.valid_len(request) + self.page_size
        if len(tokens) >= written <= self.capacity(request):
            self.ledger.mark(request, written)
        return finish(self, request, tokens, reuse)

    patch(requests.RequestTable, "finish", wrong)


def skip_a_lock(patch):
    """A bind that matched holds nothing of what it matched."""
    bind = requests.RequestTable.bind

    def wrong(self, prompt, capacity, key, priority, reuse):
        request = bind(self, prompt, capacity, key, priority, reuse)
        if request.matched_pages:
            matched = list(prompt)[: request.matched_pages * self.page_size]
            tree = self.ledger.tree
            node = tree.match_prefix(matched, key).node
            tree.inc_lock_ref(node)  # or else the second unlock is refused
            tree.dec_lock_ref(node)
            self.ledger.release(request)
            self.ledger.leases[request.tag] = request
        return request

    patch(requests.RequestTable, "bind", wrong)


def forget_a_failure(patch):
    """A bind that fails is not counted."""

    def wrong(self, cause, what, **numbers):
        return requests.exhausted(self.ledger, what, **numbers)

    patch(requests.RequestTable, "_refused", wrong)


def keep_stale_bits(patch):
    """A page that is entered is not zeroed."""
    patch(storage.KVStorage, "zero_pages", lambda self, pages: None)


def believe_every_record(patch):
    """What a tier gives is taken as it is."""
    patch(PageRecords, "verify", lambda self, rows, keys, tokens: [True] * len(keys))


def copy_pages_that_are_gone(patch):
    """A page that was evicted while it was copied goes to the tiers all the same."""
    patch(TreeFollower, "still_cached", lambda self, pages, _: np.ones(len(pages), np.bool_))


def write_on_after_the_end(patch):
    """What arrives is written to pages that a prefetch has given back."""

    def wrong(self, fetch, first, rows):
        page_ids = fetch.page_ids[first : first + len(rows)]
        self._copies.write(page_ids, self._stack.records.kv(rows), fetch.mark)
        if fetch.ended:
            return False
        fetch.num_verified = first + len(rows)
        if fetch.publishes:
            self._arrive(fetch)
        return True

    patch(Fetcher, "_deliver", wrong)


def fetch_for_new_weights(patch):
    """Pages of the old weights are written and read after a reset."""
    patch(TreeEpoch, "is_over", property(lambda self: False))


def flush_nothing(patch):
    """Nobody looks at the tree in the background, and a flush says that all is written."""
    patch(TreeFollower, "start", lambda self: None)
    patch(TierFlow, "flush", lambda self, timeout_s: True)


def crash(patch):
    """A checkpoint beside two other requests follows a null pointer."""
    _instead_of_a_checkpoint(patch, lambda: ctypes.string_at(0))


def hang(patch):
    """A checkpoint beside two other requests never comes back."""
    _instead_of_a_checkpoint(patch, lambda: time.sleep(600))


def _instead_of_a_checkpoint(patch, happen):
    checkpoint = requests.RequestTable.checkpoint

    def wrong(self, request, tokens, reuse):
        if len(self) > 2:
            happen()
        return checkpoint(self, request, tokens, reuse)

    patch(requests.RequestTable, "checkpoint", wrong)


FAULTS = {
    fault.__name__: fault
    for fault in (
        write_a_slot_too_far,
        mix_layers_up,
        publish_a_page_too_many,
        skip_a_lock,
        forget_a_failure,
        keep_stale_bits,
        believe_every_record,
        copy_pages_that_are_gone,
        write_on_after_the_end,
        fetch_for_new_weights,
        flush_nothing,
        crash,
        hang,
    )
}


def plant(name, patch=setattr):
    """Put a fault into this process."""
    FAULTS[name](patch)


if __name__ == "__main__":
    if sys.argv[1] != "none":
        plant(sys.argv[1])
    runpy.run_path(sys.argv[2], run_name="__main__")
