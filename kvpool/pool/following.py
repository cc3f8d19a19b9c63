"""PoolFollowing: the one follower of a pool's tree, shared by whatever is attached to it."""

from __future__ import annotations

from kvpool.following import TreeFollower
from kvpool.page_keys import PageKeys, Partition
from kvpool.pool.core import PoolCore
from kvpool.snapshot.fingerprint import Fingerprint


class PoolFollowing(PoolCore):
    """What tiers and events of a pool have in common."""

    _follower: TreeFollower | None = None

    def _follow(self, model: str | None, partition: Partition | None) -> TreeFollower:
        """The follower of this pool, at work; one that nobody needs any more makes way.

        Parameters
        ----------
        model, partition
            What page keys are made of. None: as for what is attached already, else ``""`` and
            all layers and heads.

        Raises
        ------
        ValueError
            What is attached already calls pages by other keys.
        """
        follower, has = self._follower, None
        if follower is not None and self._is_followed:
            has = follower.keys
        if model is None:
            model = "" if has is None else has.fingerprint.model
        if partition is None and has is not None:
            partition = has.partition
        keys = PageKeys(self._fingerprint(model), partition)
        if has is not None and has.root(None) != keys.root(None):
            raise ValueError(
                "tiers and events of a pool call its pages by the same keys, and what is attached "
                f"already has model {has.fingerprint.model!r} and {has.partition}, got model "
                f"{model!r} and {keys.partition}: give both the same, or close the other one first"
            )
        if follower is None or follower.closed or follower.keys.root(None) != keys.root(None):
            self._stop_following()
            follower = self._follower = TreeFollower(self._requests.ledger, keys)
        follower.start()
        return follower

    def _fingerprint(self, model: str) -> Fingerprint:
        return Fingerprint.of(
            model, self._layout, self._page_size, self._dtype, self._k_scale, self._v_scale
        )

    @property
    def _is_followed(self) -> bool:
        """Whether somebody listens to the follower, or has its keys."""
        return self._follower is not None and self._follower.stats()["subscribers"] > 0

    def _stop_following(self) -> None:
        if self._follower is not None:
            self._follower.close()
