"""ClosedTable: what is left of the requests of a pool that was closed."""

from __future__ import annotations

from typing import Any

from kvpool.errors import KVCacheStateError


class ClosedTable:
    """Stands where the requests of a pool were: every use says that the pool is closed."""

    def __getattr__(self, name: str) -> Any:
        raise KVCacheStateError("the pool is closed")

    def __len__(self) -> int:
        raise KVCacheStateError("the pool is closed")

    def __contains__(self, request_id: object) -> bool:
        raise KVCacheStateError("the pool is closed")
