"""PoolFollowing: the one follower of a pool's tree, shared by whatever is attached to it."""

from __future__ import annotations

from kvpool.following import TreeFollower
from kvpool.page_keys import PageKeys
from kvpool.pool.core import PoolCore


class PoolFollowing(PoolCore):
    """What tiers and events of a pool have in common."""

    _follower: TreeFollower | None = None

    def _follow(self, keys: PageKeys, *, start: bool = True) -> TreeFollower:
        """The follower of this pool, made if there is none, and started.

        Raises
        ------
        ValueError
            It calls pages by other keys already.
        """
        if self._follower is None:
            self._follower = TreeFollower(self._requests.ledger, keys)
        has = self._follower.keys
        if (has.fingerprint, has.partition) != (keys.fingerprint, keys.partition):
            raise ValueError(
                "the pool's pages have keys already, and whatever is attached to it must agree in "
                f"them: they are of {has.fingerprint} and {has.partition}, these are of "
                f"{keys.fingerprint} and {keys.partition}"
            )
        if start:
            self._follower.start()
        return self._follower

    def _stop_following(self) -> None:
        if self._follower is not None:
            self._follower.close()
