"""Pages of prefetches, from the free list to the tree: what a prefetch holds, and all its moves.

A prefetch is a number here. It holds taken pages, those of `ledger.fetching` that have its number, and the lock of a
node of `ledger.fetch_nodes`. Each move is one crossing, in which no interrupt and no clean-up of a caller comes; and it
looks at what is held, not at what the caller remembers, so that a move whose caller was interrupted may be done again.
"""
import numpy as np

from kvpool_ext.ledger cimport PageLedger
from kvpool_ext.quiet cimport Quiet


def begin_fetch(PageLedger ledger not None, number, node, Py_ssize_t num_pages):
    """Lock a node, and take as many pages for a prefetch as can be had.

    Parameters
    ----------
    ledger : PageLedger
        Whose pages.
    number : int
        Of a prefetch that holds nothing yet.
    node : int or None
        Handle of the node where its local match ends; None without one.
    num_pages : int
        Pages to take at most.

    Returns
    -------
    ndarray or None
        int32 ``[n]``; None, and no change, where there is not one.
    """
    cdef Quiet _quiet = Quiet()
    pages = None
    try:
        if node is not None:
            ledger.tree.inc_lock_ref(node)
            try:
                ledger.fetch_nodes[number] = node
            except MemoryError:
                ledger.tree.dec_lock_ref(node)
                raise
        # Now that what is locked cannot be evicted for them.
        num_pages = min(num_pages, ledger.free_or_evictable())
        if num_pages > 0:
            pages = ledger.take(num_pages)
            ledger.fetching.update(dict.fromkeys(pages.tolist(), number))
            return pages
    except BaseException:
        if pages is not None:
            for page in pages:
                ledger.fetching.pop(page, None)
            ledger.give(pages)
        end_fetch(ledger, number)
        raise
    end_fetch(ledger, number)
    return None


def bring_in(PageLedger ledger not None, number, tokens, pages, Py_ssize_t num_local, extra_key):
    """Insert the pages of a prefetch that are written; its lock moves down to the last of them.

    Parameters
    ----------
    ledger : PageLedger
        Whose tree.
    number : int
        Of the prefetch.
    tokens : ndarray
        int32, the tokens of `pages`.
    pages : ndarray
        int32 ``[n]``: the local match, and of the pages that were taken the first ones.
    num_local : int
        How many of `pages` are of the local match.
    extra_key : str, bytes, int or None
        Namespace.

    Returns
    -------
    tuple of int
        Pages that the tree has got, and pages that it had of its own, which are free again.

    Raises
    ------
    MemoryError
        Once more does what is left to do.
    """
    cdef Quiet _quiet = Quiet()
    held = pages[num_local:]
    held = held[[ledger.fetching.get(page) == number for page in held.tolist()]]
    prefix_len, node = ledger.tree.insert(tokens, pages, extra_key)
    # What is held is the end of `pages`; of that, what the tree had of its own comes first.
    duplicates = held[:max(0, prefix_len // ledger.page_size - (len(pages) - len(held)))]
    for page in held.tolist():
        del ledger.fetching[page]
    if len(duplicates):
        ledger.give(duplicates)
    before = ledger.fetch_nodes.get(number)
    ledger.tree.inc_lock_ref(node)
    ledger.fetch_nodes[number] = node
    if before is not None:
        ledger.tree.dec_lock_ref(before)
    return len(held) - len(duplicates), len(duplicates)


def end_fetch(PageLedger ledger not None, number, pages=None):
    """Give back the pages that a prefetch still holds, and its lock; one that holds nothing stays so.

    Parameters
    ----------
    ledger : PageLedger
        Whose pages.
    number : int
        Of the prefetch.
    pages : ndarray, optional
        int32, all that it took. Without them every page that is fetched is looked at.

    Returns
    -------
    int
        Pages given back.
    """
    cdef Quiet _quiet = Quiet()
    candidates = list(ledger.fetching) if pages is None else pages.tolist()
    held = np.array([page for page in candidates if ledger.fetching.get(page) == number], np.int32)
    for page in held.tolist():
        del ledger.fetching[page]
    ledger.give(held)
    node = ledger.fetch_nodes.pop(number, None)
    if node is not None:
        ledger.tree.dec_lock_ref(node)
    return len(held)
