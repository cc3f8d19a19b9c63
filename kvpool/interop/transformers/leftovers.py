"""Requests of caches that nobody closed, or that could not be closed at the time.

A cache may be dropped in any thread, and a call of another thread may be in the pool when one is
closed. To go in there is to make the scheduler's call fail, so the requests wait for a thread that
comes to the pool with a cache.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING

from kvpool.errors import KVCacheStateError

if TYPE_CHECKING:
    from kvpool.pool import KVCachePool


class Leftovers:
    """Of one pool: requests to unbind, and the thread that may."""

    def __init__(self) -> None:
        self.request_ids: deque[int] = deque()
        self.thread_id = threading.get_ident()


def leftovers_of(pool: KVCachePool) -> Leftovers:
    """Of a pool, the same at each call."""
    found: Leftovers = pool._guests.setdefault("leftovers", Leftovers())
    return found


def sweep(pool: KVCachePool) -> None:
    """Unbind what is left over, by the thread that uses the pool now."""
    leftovers = leftovers_of(pool)
    leftovers.thread_id = threading.get_ident()
    give_back(pool, ())


def give_back(pool: KVCachePool, request_ids: Iterable[int]) -> None:
    """Unbind requests, now or when their thread comes again; those that have ended are left out.

    From any thread, and never an error.
    """
    if pool.closed:
        return
    leftovers = leftovers_of(pool)
    waiting = leftovers.request_ids
    waiting.extend(request_ids)
    if threading.get_ident() != leftovers.thread_id:
        return
    try:
        while waiting:
            # Taken off only afterwards, as an interrupt may come in between.
            request_id = waiting[0]
            if pool.is_bound(request_id):
                pool.unbind_request(request_id)
            if waiting and waiting[0] == request_id:
                waiting.popleft()
    except KVCacheStateError:
        return  # another thread is in the pool
