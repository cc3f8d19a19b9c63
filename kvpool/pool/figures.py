"""PoolFigures: what a pool counts, as one consistent reading that any thread may take."""

from __future__ import annotations

import time

from kvpool.errors import KVCacheStateError
from kvpool.pool.core import PoolCore

# How long a reader waits for a moment between two calls of the scheduler, and between two looks.
PATIENCE_SECONDS = 10.0
LOOK_SECONDS = 0.0002


class PoolFigures(PoolCore):
    """Counters and gauges of a pool."""

    @property
    def prefix_prompt_tokens(self) -> int:
        """Prompt tokens of all successful prefix binds, full length."""
        return self._requests.prefix_prompt_tokens

    @property
    def prefix_match_tokens(self) -> int:
        """Of these, tokens found in the cache."""
        return self._requests.prefix_match_tokens

    @property
    def prefix_insert_tokens(self) -> int:
        """Tokens newly brought into the tree by requests."""
        return self._requests.prefix_insert_tokens

    def stats(self) -> dict[str, int]:
        """Counters and gauges as a plain dict; any thread may read them, at any time.

        All are of one moment between two calls: another thread than the scheduler's waits for
        such a moment, while the scheduler's own, inside of a call too, reads at once.

        Pages now: ``pages_total`` is the sum of ``pages_free``, ``pages_private`` (shared ones
        once), ``pages_tree`` and ``pages_taken``; ``pages_evictable`` of the tree's are unlocked,
        and ``pages_fetching`` of those taken wait for what a prefetch reads from tiers.
        Since the pool was made: the three ``prefix_`` counters, ``evicted_pages`` (also those that
        `radix.evict` handed out), ``bind_failures`` (binds and forks that found too few pages),
        which is the sum of ``bind_failures_no_pages`` (binds that waiting may help),
        ``bind_failures_fork`` (such forks) and ``bind_failures_too_large`` (more pages than the
        pool has).

        Raises
        ------
        KVCacheStateError
            The pool is closed, or a call of another thread has not ended for ten seconds.
        """
        requests, gate = self._requests, self._gate
        questions = (requests.ledger.gauges, requests.failures_by_cause.copy)
        give_up, number = 0.0, 0
        while True:
            before = gate.moment()
            if before >= 0:
                found = [question() for question in questions]
                if gate.moment() == before:
                    break
            if not give_up:
                give_up, number = time.monotonic() + PATIENCE_SECONDS, gate.ask(questions)
            elif (answers := gate.answered(number)) is not None:
                found = answers
                break
            elif time.monotonic() > give_up:
                raise KVCacheStateError(
                    f"a call of another thread has not ended for {PATIENCE_SECONDS:.0f} seconds, "
                    "or was cut off by a fork: stats has no moment to read"
                )
            time.sleep(LOOK_SECONDS)
        gauges, failures = found
        return {
            "pages_total": self.num_pages,
            **gauges,
            "bind_failures": sum(failures.values()),
            **{f"bind_failures_{cause}": count for cause, count in failures.items()},
        }
