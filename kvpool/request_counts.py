"""RequestCounts: what is counted of a table of requests, and whom it tells of them."""

from __future__ import annotations

from collections.abc import Callable

from kvpool.request import RequestWatcher
from kvpool_ext.ledger import PageLedger

# Why a bind or a fork found too few pages: a bind that could fit later, any of them that never can
# in this pool, a fork that could fit later.
FAILURE_CAUSES = ("no_pages", "too_large", "fork")


class RequestCounts:
    """Counters since a pool was made.

    Parameters
    ----------
    ledger : PageLedger
        It counts what succeeds, in C: a count that needed memory would be one more thing to fail
        once all is done. `kvpool.requests.RequestTable` counts the failures.

    Attributes
    ----------
    failures_by_cause : dict
        A count for each of `FAILURE_CAUSES`.
    watchers : list of RequestWatcher
        Who is told of binds, finishes and checkpoints.
    """

    def __init__(self, ledger: PageLedger) -> None:
        self.ledger = ledger
        # Always the same keys: another thread may read them.
        self.failures_by_cause = dict.fromkeys(FAILURE_CAUSES, 0)
        self.watchers: list[RequestWatcher] = []

    @property
    def prefix_prompt_tokens(self) -> int:
        """Tokens of the prompts that were bound with prefix reuse."""
        return self.ledger.prompt_tokens

    @property
    def prefix_match_tokens(self) -> int:
        """Of these, tokens that were cached."""
        return self.ledger.matched_tokens

    @property
    def prefix_insert_tokens(self) -> int:
        """Tokens that finishes and checkpoints cached."""
        return self.ledger.inserted_tokens

    @property
    def bind_failures(self) -> int:
        """Binds and forks that found too few pages."""
        return sum(self.failures_by_cause.values())

    def watch(self, watcher: RequestWatcher) -> Callable[[], None]:
        """Tell `watcher` of binds, finishes and checkpoints until the answer is called."""

        def stop() -> None:
            if watcher in self.watchers:
                self.watchers.remove(watcher)

        self.watchers.append(watcher)
        return stop
