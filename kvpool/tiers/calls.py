"""TierCall: one call of a tier, from the queue of its lane to the answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvpool.tiers.arena import StagingBuffer
from kvpool.tiers.contract import Tier


class TierCall:
    """What to ask a tier; a lane says when.

    Attributes
    ----------
    verb : str
        ``"exists"``, ``"read"``, ``"write"``, ``"stats"``, or ``"remove"`` of records that are
        damaged.
    keys : sequence of bytes
        ``[n]``.
    rows : ndarray or None
        uint8 ``[n, record_bytes]`` of `buffer`, for reads and writes.
    buffer : StagingBuffer or None
        Held by the call until it has returned, however late that is.
    then : callable or None
        Called with the answer, None if the tier failed, in the lane's thread and without its lock;
        not at all where the call was let go of.
    started_at : float or None
        Monotonic seconds.
    ended : bool
        Nobody waits any more: it has an answer, or was let go of.
    answer : list of bool, mapping or None
        None: the tier failed, or there was no time.
    """

    def __init__(
        self,
        verb: str,
        keys: Sequence[bytes] = (),
        rows: NDArray[np.uint8] | None = None,
        buffer: StagingBuffer | None = None,
        then: Callable[[Any], None] | None = None,
    ) -> None:
        self.verb, self.keys, self.rows = verb, keys, rows
        self.buffer, self.then = buffer, then
        self.started_at: float | None = None
        self.ended = False
        self.answer: Any = None

    def perform(self, tier: Tier) -> Any:
        """Ask `tier`; what it raises, or TypeError for an answer that is none."""
        if self.verb == "stats":
            return {str(name): int(count) for name, count in tier.stats().items()}
        if self.verb == "exists":
            found = tier.exists(self.keys)
        elif self.verb == "remove":
            found = tier.remove(self.keys)
        else:
            assert self.rows is not None, "reads and writes have rows"
            found = (tier.read if self.verb == "read" else tier.write)(self.keys, self.rows)
        answers = [bool(each) for each in found]
        if len(answers) != len(self.keys):
            raise TypeError(f"{self.verb} of {len(self.keys)} keys gave {len(answers)} answers")
        return answers

    def let_go(self) -> None:
        """The call has returned, or will never run: its buffer is free again."""
        buffer, self.buffer = self.buffer, None
        if buffer is not None:
            buffer.release()
