"""EndVerbs: how requests of the traffic change their room, publish, and go."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvpool.errors import KVCacheExhaustedError
from kvpool.soak.aborts import Interrupted, with_stop
from kvpool.soak.bound import KEYS, Bound
from kvpool.soak.stage import Stage


class EndVerbs(Stage):
    """Operations on bound requests, and on the end of them."""

    # ---- the end

    def finish(self, handle: int, drop: int) -> None:
        """Insert all that is written but `drop` tokens; below zero, sampled ones come along."""
        bound = self.bound.get(handle)
        if bound is None:
            return
        tokens = self._published(bound, drop)
        found = self.calls.call("pool", "finish_request", bound.request_id, tokens)
        self.forget(bound)
        self._inserted(bound, tokens.size, found)

    def checkpoint(self, handle: int, drop: int) -> None:
        """Insert what is written so far, and go on."""
        bound = self.bound.get(handle)
        if bound is None:
            return
        tokens = self._published(bound, drop)
        found = self.calls.call("pool", "checkpoint_request", bound.request_id, tokens)
        if self._inserted(bound, tokens.size, found):
            told = self.whole(min(tokens.size, bound.valid_len))
            bound.shared = max(bound.shared, told)
            bound.prompt_len = max(bound.prompt_len, told)

    def interrupt_finish(self, handle: int, checkpoint: int) -> None:
        """An abort while a finish reads its tokens: the request is bound as before."""
        bound = self.bound.get(handle)
        if bound is None:
            return
        given = with_stop(self._published(bound, 0).tolist())
        method = "checkpoint_request" if checkpoint else "finish_request"
        self.calls.refused(Interrupted, "pool", method, bound.request_id, given)
        self.check_request(bound)

    def abort(self, handle: int) -> None:
        """The caller went away."""
        bound = self.bound.get(handle)
        if bound is None:
            return
        self.calls.call("pool", "unbind_request", bound.request_id)
        self.forget(bound)

    def abort_all(self) -> None:
        """Nobody is left."""
        self.calls.call("pool", "unbind_requests")
        self.forget_all()

    # ---- capacity

    def extend(self, handle: int, more: int) -> None:
        """More pages for a bound request, or a refusal that changes nothing."""
        bound = self.bound.get(handle)
        if bound is None:
            return
        wanted = bound.capacity + max(more, 0)
        found = self.calls.attempt(
            KVCacheExhaustedError, "pool", "extend_request", bound.request_id, wanted
        )
        if isinstance(found, KVCacheExhaustedError):
            self.refusals += 1
        else:
            bound.capacity = self.rounded(wanted)
        self.check_request(bound)

    def shrink(self, handle: int, keep: int) -> None:
        """Give unused pages back."""
        bound = self.bound.get(handle)
        if bound is None:
            return
        wanted = bound.valid_len + max(keep, 0)
        self.calls.call("pool", "shrink_request", bound.request_id, wanted)
        given = self.pool.request(bound.request_id).capacity
        least = max(self.page_size, self.rounded(min(wanted, bound.capacity)))
        if not least <= given <= bound.capacity:
            raise self.wrong_capacity("shrink_request", bound.request_id, wanted, given)
        bound.capacity = given
        self.check_request(bound)

    # ---- what they share

    def _published(self, bound: Bound, drop: int) -> NDArray[np.int32]:
        length = min(max(bound.valid_len - drop, 0), bound.capacity)
        return bound.lineage.tokens(length).copy()

    def _inserted(self, bound: Bound, num_tokens: int, found: int) -> bool:
        """Check the answer of a finish or checkpoint; whether it could insert."""
        length = self.whole(min(num_tokens, bound.valid_len))
        may = bound.inserts and self.reuse
        # What was matched, and what a checkpoint inserted, is no news.
        most = max(0, length - (bound.matched or 0)) if may else 0
        if found % self.page_size or not 0 <= found <= most:
            raise self.calls.fail(
                "tokens that a finish or checkpoint inserted",
                f"{found}, at most {most} are there",
                f"found in range(0, {most + 1}, {self.page_size}), found",
            )
        self.counts["prefix_insert_tokens"] += found
        if may and length:
            self.cached.publish(bound.lineage, length)
            tokens = bound.lineage.tokens(length)
            mark, key = self.calls.mark(), KEYS[bound.lineage.key]
            match = self.calls.let("match", "pool.radix", "match_prefix", tokens, key)
            self.calls.expect(
                length, match.length, "the cached length after an insert", "match.length"
            )
            self.calls.unsay(mark)
        return may
