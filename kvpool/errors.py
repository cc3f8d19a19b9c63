"""Every exception of kvpool: what it means and who raises it.

Bad arguments are plain `ValueError` and `TypeError`. A call that raises has changed nothing.
"""

from __future__ import annotations


class KVCacheError(Exception):
    """Base of kvpool's own exceptions."""


class KVCacheExhaustedError(KVCacheError, RuntimeError):
    """Not enough pages, or a position past a row's capacity.

    Raised by binds, `extend_request`, `fork_request`, `alloc`, the sizing factories, and by steps
    for positions that a row has no page for.

    Attributes
    ----------
    needed_pages : int
        Private pages that the call needs.
    free_pages, evictable_pages : int
        Pages that nobody holds, and cached ones that eviction could take, when it was raised.
    total_pages : int
        Pages of the pool.
    can_ever_fit : bool
        False: no waiting helps, the pool is too small for this call.
    """

    def __init__(
        self,
        message: str,
        *,
        needed_pages: int,
        free_pages: int,
        evictable_pages: int,
        total_pages: int,
        can_ever_fit: bool,
    ) -> None:
        super().__init__(message)
        self.needed_pages = needed_pages
        self.free_pages = free_pages
        self.evictable_pages = evictable_pages
        self.total_pages = total_pages
        self.can_ever_fit = can_ever_fit

    def __reduce__(self) -> tuple[object, ...]:
        # Keyword-only arguments do not survive the default pickling of exceptions.
        return _rebuild_exhausted, (str(self), dict(self.__dict__))


def _rebuild_exhausted(message: str, fields: dict[str, int]) -> KVCacheExhaustedError:
    return KVCacheExhaustedError(message, **fields)  # type: ignore[arg-type]


class SnapshotError(KVCacheError, ValueError):
    """A snapshot that cannot be used, or a pool that none can hold; says why.

    Raised by `KVCachePool.load` and `KVCachePool.save`. What the file system refuses is an
    `OSError` as everywhere.
    """


class UnknownRequestError(KVCacheError, KeyError):
    """A request id that is not bound: finished, unbound or never given out; none is reused."""

    def __str__(self) -> str:
        # KeyError would print the repr of the message.
        return str(self.args[0]) if self.args else ""


class KVCacheStateError(KVCacheError, RuntimeError):
    """No state for this call: closed pool, no active step, a dead step, concurrent entry."""


class KVCacheCorruptionError(KVCacheError, RuntimeError):
    """A page holds what it must not: poison, or bytes that changed since they were cached.

    Raised by pools in poison mode only; `kvpool.poison` says what they look at.

    Attributes
    ----------
    page : int
        The page, -1 where it is not about one.
    """

    def __init__(self, message: str, page: int = -1) -> None:
        super().__init__(message)
        self.page = page
