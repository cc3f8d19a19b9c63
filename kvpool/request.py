"""Request: one bound request, and the copy of it that callers may see."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvpool_ext.lease import PageLease

ExtraKey = str | bytes | int | None

# A bound request is its lease: the number of that is the request's id, its row that of the written
# lengths. One object, entered in the books and struck off in one call, so that no interrupt finds
# pages without a request.
Request = PageLease


class RequestWatcher(Protocol):
    """Is told of requests as they meet the tree. What it raises ends the call that told it."""

    def on_bind(self, request: Request) -> None:
        """A prompt was bound while prefix reuse was on, and its match is locked.

        If it raises, the request is unbound again, and its id and its prompt count for nothing.
        What the bind evicted, or an exclusive one released, is gone, and its match was an access.
        """

    def on_publish(self, request: Request) -> None:
        """A finish or checkpoint comes: private pages of `request` may become the tree's.

        If it raises, nothing has changed.
        """


@dataclass(frozen=True)
class RequestInfo:
    """One bound request as it is now; a copy.

    Attributes
    ----------
    request_id : int
        The id that bind gave.
    capacity : int
        Slots reserved, in tokens.
    matched_len : int
        Tokens found in the cache at bind.
    valid_len : int
        Leading tokens written on every layer and not taken back.
    shared_len : int
        Tokens on read-only pages.
    page_ids : ndarray
        int32 ``[capacity / page_size]``, in order of positions, read-only.
    extra_key : str, bytes, int or None
        Namespace.
    priority : int
        Priority of what it will insert.
    """

    request_id: int
    capacity: int
    matched_len: int
    valid_len: int
    shared_len: int
    page_ids: NDArray[np.int32]
    extra_key: ExtraKey
    priority: int

    @classmethod
    def of(cls, request: Request, valid_len: int, page_size: int) -> RequestInfo:
        """What there is to say of a request now."""
        page_ids = request.pages()
        page_ids.flags.writeable = False
        return cls(
            request_id=request.tag,
            capacity=request.num_pages * page_size,
            matched_len=request.matched_pages * page_size,
            valid_len=valid_len,
            shared_len=request.shared_pages * page_size,
            page_ids=page_ids,
            extra_key=request.extra_key,
            priority=request.priority,
        )
