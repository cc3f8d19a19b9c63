"""PageOwners: who has each page of a pool, for all pages at once."""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvpool_ext.ledger import PageLedger

_NOBODY = 255


class PageState(IntEnum):
    """What a page is used for; every page is in exactly one state."""

    FREE = 0
    PRIVATE = 1
    EVICTABLE = 2  # the tree's, held by nobody
    LOCKED = 3  # the tree's, held by a request or a lock
    TAKEN = 4  # by a caller's alloc


class PageOwners(NamedTuple):
    """Who has each page, by page id; a copy.

    Attributes
    ----------
    states : ndarray
        uint8 ``[num_pages]``, `PageState`.
    request_ids : ndarray
        int64 ``[num_pages]``, the request that has a private page, the first bound of those that
        share it; 0 for a page that is not private.
    num_holders : ndarray
        int32 ``[num_pages]``, requests that hold a private page, more than one after a fork; 0 for
        a page that is not private.
    """

    states: NDArray[np.uint8]
    request_ids: NDArray[np.int64]
    num_holders: NDArray[np.int32]

    def counts(self) -> dict[PageState, int]:
        """Pages in each state."""
        found = np.bincount(self.states, minlength=len(PageState)).tolist()
        return {state: found[state] for state in PageState}


def page_owners(ledger: PageLedger) -> PageOwners:
    """Who has each page: one pass over free list, tree and leases, no look-up a page.

    Raises
    ------
    RuntimeError
        A page has no owner: the ledger is out of sync.
    """
    num_pages = ledger.allocator.num_pages
    survey = ledger.tree.survey()
    states = np.full(num_pages, _NOBODY, np.uint8)
    states[ledger.allocator.free_pages()] = PageState.FREE
    states[ledger.allocator.taken_pages()] = PageState.TAKEN
    of_nodes = np.where(survey.lock_refs > 0, PageState.LOCKED, PageState.EVICTABLE)
    states[survey.pages] = np.repeat(of_nodes.astype(np.uint8), survey.num_pages)

    request_ids = np.zeros(num_pages, np.int64)
    num_holders = np.zeros(num_pages, np.int32)
    leases = list(ledger.leases.values())
    if leases:
        pages_of = [lease.private_pages() for lease in leases]
        tags = np.repeat([lease.tag for lease in leases], [pages.size for pages in pages_of])
        pages = np.concatenate(pages_of)
        states[pages] = PageState.PRIVATE
        # The first holder names a shared page: assigned last, it stays.
        request_ids[pages[::-1]] = tags[::-1]
        num_holders = np.bincount(pages, minlength=num_pages).astype(np.int32)
    if num_pages and states.max() == _NOBODY:
        page = int(np.argmax(states))
        raise RuntimeError(f"the ledger is out of sync: page {page} has no owner")
    return PageOwners(states, request_ids, num_holders)
