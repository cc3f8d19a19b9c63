"""What the page ledger looks like in words: owners of pages, and shortages."""

from __future__ import annotations

from kvpool.errors import KVCacheExhaustedError
from kvpool.paging import num_pages_for_length
from kvpool_ext.lease import PageLease
from kvpool_ext.ledger import PageLedger


def page_owner(ledger: PageLedger, page: int) -> str:
    """The owner of a page: free, a request, the tree, a prefetch, taken or scratch.

    Walks everything.

    Raises
    ------
    ValueError
        The pool has no such page.
    """
    num_pages, page_size = ledger.allocator.num_pages, ledger.page_size
    if page == num_pages:
        return "scratch"
    if page > num_pages:
        raise ValueError(f"page {page} is none of the pool's {num_pages} pages")
    state, holder, index = ledger.locate(page)
    if holder is None:
        number = ledger.fetching.get(page)
        if number is not None:
            return f"prefetch {number}"
        return "taken by alloc" if state == "taken" else state
    if isinstance(holder, PageLease):
        start = index * page_size
        shared = ", shared with its forks" if index < holder.shared_pages else ""
        return f"request {holder.tag}, positions [{start}, {start + page_size}){shared}"
    start = holder.start + index * page_size
    tokens = holder.tokens[index * page_size : (index + 1) * page_size].tolist()
    key = "" if holder.extra_key is None else f" under extra_key {holder.extra_key!r}"
    return f"tree, positions [{start}, {start + page_size}){key}, tokens {tokens}"


def exhausted(
    ledger: PageLedger, what: str, *, needed: int, num_pages: int, free: int | None = None
) -> KVCacheExhaustedError:
    """The error of a call that found too few pages.

    Parameters
    ----------
    ledger : PageLedger
        Whose pages are short.
    what : str
        What was asked for.
    needed : int
        Private pages that it needs.
    num_pages : int
        Pages that it would hold in all: more than the pool has can never fit.
    free : int, optional
        Pages that can be had, where that is not what is free or evictable now.
    """
    total = ledger.allocator.num_pages
    can_ever_fit = num_pages <= total
    if free is None:
        found = (
            f"{ledger.allocator.num_free} are free and {ledger.evictable_pages} evictable "
            "(a matched prefix not counted)"
        )
    else:
        found = f"{free} can be had"
    advice = (
        "wait until other requests finish"
        if can_ever_fit
        else f"no waiting helps, {num_pages} pages in all are more than the pool has"
    )
    return KVCacheExhaustedError(
        f"{what} needs {needed} pages; {found} of {total}: {advice}",
        needed_pages=needed,
        free_pages=ledger.allocator.num_free,
        evictable_pages=ledger.evictable_pages,
        total_pages=total,
        can_ever_fit=can_ever_fit,
    )


def past_capacity(ledger: PageLedger, lease: PageLease, end_pos: int) -> KVCacheExhaustedError:
    """The error of positions up to `end_pos`, where a request has no page for the last of them."""
    num_pages = num_pages_for_length(end_pos, ledger.page_size)
    needed, total = num_pages - lease.num_pages, ledger.allocator.num_pages
    free, evictable = ledger.allocator.num_free, ledger.evictable_pages
    return KVCacheExhaustedError(
        f"positions up to {end_pos} are past the capacity of request {lease.tag}, "
        f"{lease.num_pages * ledger.page_size} tokens: extend_request to {end_pos} ({needed} more "
        f"pages; {free} are free and {evictable} evictable of {total}), or stop generating",
        needed_pages=needed,
        free_pages=free,
        evictable_pages=evictable,
        total_pages=total,
        can_ever_fit=num_pages <= total,
    )
