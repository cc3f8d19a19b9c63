"""PoolPoison: whether a pool is in poison mode, and what looks at its pages then."""

from __future__ import annotations

from kvpool.poison import PoisonedTable, ReadGuard
from kvpool.pool.core import PoolCore


class PoolPoison(PoolCore):
    """What a pool says of its poison mode."""

    @property
    def poison(self) -> bool:
        """Whether this pool is in poison mode, for debugging."""
        return self._poison

    def read_guard(self) -> ReadGuard | None:
        """What looks at pages before attention reads them; None without poison mode."""
        requests = self._requests
        if not isinstance(requests, PoisonedTable):
            return None
        return ReadGuard(requests, self._graph_mode)
