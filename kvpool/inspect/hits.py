"""PrefixHits: which cached prefixes save how many tokens, counted while it is attached."""

from __future__ import annotations

from dataclasses import dataclass
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from kvpool.inspect.sources import Source, tree_of, watch
from kvpool.request import ExtraKey, Request
from kvpool_ext.counts import PageCounts
from kvpool_ext.outline import check_limit, preview
from kvpool_ext.views import TreeSurvey


@dataclass(frozen=True)
class PrefixSaving:
    """What one node of the tree has saved.

    Attributes
    ----------
    node : int
        Its handle.
    extra_key : str, bytes, int or None
        Its namespace.
    start, end : int
        The tokens of the prefix that are the node's, half-open.
    hits : int
        Binds whose match went through here.
    saved_tokens : int
        ``hits * (end - start)``: tokens of this node that no model had to compute again.
    lock_ref : int
        Holders of it now.
    tokens : str
        The first and the last of the node's own.
    """

    node: int
    extra_key: ExtraKey
    start: int
    end: int
    hits: int
    saved_tokens: int
    lock_ref: int
    tokens: str


class PrefixHits:
    """Counts how often binds find each cached page, from attaching to `close`.

    The tree keeps no such counts: a node is one cache line and has no room for one, and binds at
    which nobody looks should not pay. So they are kept here, one number a page of the pool: a bind
    adds one to each page that it matched, a page that enters the tree starts from zero. No count
    hangs on a node, so that they stay right when nodes are split, and when their tails are
    evicted: the tokens saved by all cached pages, and by those evicted since, add up to the tokens
    that all binds matched. Only a page that a caller puts in by hand, with `radix.insert`, may
    bring the count of an earlier life. Forks look for nothing, and do not count.

    It costs 8 bytes a page of the pool, and 0.3 microseconds for a bind and its finish together,
    with some nanoseconds for each page that matched: cheap enough to stay attached.

    Parameters
    ----------
    pool : KVCachePool or RequestTable
        Whose binds to count. For the scheduler thread, as every call of a pool.

    Attributes
    ----------
    num_binds, num_hits : int
        Binds with a prompt while prefix reuse was on, and those that matched a page or more.
    prompt_tokens, saved_tokens : int
        Tokens of their prompts, and those of them that were matched.

    Examples
    --------
    >>> with PrefixHits(pool) as hits:  # doctest: +SKIP
    ...     serve(pool)
    >>> hits.top(3)  # doctest: +SKIP
    """

    def __init__(self, pool: Source) -> None:
        self.num_binds = self.num_hits = self.prompt_tokens = self.saved_tokens = 0
        self._tree = tree_of(pool)
        self._hits = PageCounts(pool.num_pages)
        self._stop = watch(pool, self)

    def close(self) -> None:
        """Stop counting; what was counted stays. A second close does nothing."""
        self._stop()

    def __enter__(self) -> PrefixHits:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # ---- what it has seen

    def per_node(self, survey: TreeSurvey) -> NDArray[np.int64]:
        """Hits of each node of a survey of the same tree, int64 ``[num_nodes]``.

        A match ends where a node ends, so all pages of a node have been found equally often.
        """
        firsts = np.cumsum(survey.num_pages, dtype=np.int64) - survey.num_pages
        hits: NDArray[np.int64] = self._hits.values()[survey.pages[firsts]]
        return hits

    def top(self, n: int = 10, *, tokens: int | None = 6) -> list[PrefixSaving]:
        """The nodes that saved most, the most first; fewer than `n` where fewer saved anything.

        Parameters
        ----------
        n : int
            How many.
        tokens : int or None
            Tokens of each to show, half of them the first, half the last; None for all.
        """
        check_limit(n, "n", 0)
        check_limit(tokens, "tokens", 0)
        survey = self._tree.survey()
        hits = self.per_node(survey)
        saved = hits * survey.num_pages * survey.page_size
        best = np.argsort(-saved, kind="stable")[:n]
        return [
            PrefixSaving(
                node=int(survey.handles[i]),
                extra_key=survey.namespaces[survey.namespace_ids[i]].extra_key,
                start=int(survey.starts[i]),
                end=int(survey.starts[i] + survey.num_pages[i] * survey.page_size),
                hits=int(hits[i]),
                saved_tokens=int(saved[i]),
                lock_ref=int(survey.lock_refs[i]),
                tokens=preview(self._tree, survey, i, tokens),
            )
            for i in best.tolist()
            if saved[i] > 0
        ]

    @property
    def saved_by_evicted(self) -> int:
        """Those of `saved_tokens` whose pages have left the tree since. Walks the tree."""
        there = int(self._hits.values()[self._tree.survey().pages].sum())
        return self.saved_tokens - there * self._tree.page_size

    # ---- what the pool tells it

    def on_bind(self, request: Request) -> None:
        """Count what was found."""
        self.num_binds += 1
        self.prompt_tokens += request.prompt_len
        if request.matched_pages:
            self.num_hits += 1
            self.saved_tokens += request.matched_pages * self._tree.page_size
            self._hits.add_matched(request)

    def on_publish(self, request: Request) -> None:
        """What may enter the tree now has not been found there yet."""
        self._hits.clear_private(request)
