"""What can be looked at: a pool, the request table behind one, or a tree."""

from __future__ import annotations

from collections.abc import Callable

from kvpool.owners import PageOwners, page_owners
from kvpool.pool import KVCachePool
from kvpool.request import RequestWatcher
from kvpool.requests import RequestTable
from kvpool_ext.radix import RadixCache

Source = KVCachePool | RequestTable


def tree_of(source: Source | RadixCache) -> RadixCache:
    """The tree of a pool or a table, or a tree itself."""
    if isinstance(source, RadixCache):
        return source
    if isinstance(source, RequestTable):
        return source.ledger.tree
    return _pool(source).radix


def owners_of(source: Source) -> tuple[PageOwners, int]:
    """Who has each page of a pool or a table, and its page size."""
    if isinstance(source, RequestTable):
        return page_owners(source.ledger), source.page_size
    return _pool(source).page_owners(), source.page_size


def watch(source: Source, watcher: RequestWatcher) -> Callable[[], None]:
    """Watch the requests of a pool or a table; the answer stops it."""
    return (source if isinstance(source, RequestTable) else _pool(source)).watch(watcher)


def _pool(source: object) -> KVCachePool:
    if not isinstance(source, KVCachePool):
        raise TypeError(f"expected a KVCachePool, got {type(source).__name__}")
    return source
