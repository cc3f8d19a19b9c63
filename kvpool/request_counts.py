"""RequestCounts: what a table of requests counts, and whom it tells of them."""

from __future__ import annotations

from collections.abc import Callable

from kvpool.request import RequestWatcher

# Why a bind or a fork found too few pages: a bind that could fit later, any of them that never can
# in this pool, a fork that could fit later.
FAILURE_CAUSES = ("no_pages", "too_large", "fork")


class RequestCounts:
    """Counters since a pool was made; `kvpool.requests.RequestTable` raises them.

    Attributes
    ----------
    prefix_prompt_tokens, prefix_match_tokens, prefix_insert_tokens : int
        Tokens of the prompts bound with prefix reuse, those of them that were cached, and those
        that finishes and checkpoints cached.
    failures_by_cause : dict
        A count for each of `FAILURE_CAUSES`.
    watchers : list of RequestWatcher
        Who is told of binds, finishes and checkpoints.
    """

    def __init__(self) -> None:
        self.prefix_prompt_tokens = 0
        self.prefix_match_tokens = 0
        self.prefix_insert_tokens = 0
        # Always the same keys: another thread may read them.
        self.failures_by_cause = dict.fromkeys(FAILURE_CAUSES, 0)
        self.watchers: list[RequestWatcher] = []

    @property
    def bind_failures(self) -> int:
        """Binds and forks that found too few pages."""
        return sum(self.failures_by_cause.values())

    def watch(self, watcher: RequestWatcher) -> Callable[[], None]:
        """Tell `watcher` of binds, finishes and checkpoints until the answer is called."""
        self.watchers.append(watcher)

        def stop() -> None:
            if watcher in self.watchers:
                self.watchers.remove(watcher)

        return stop
