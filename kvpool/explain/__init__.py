"""Why so much of a prompt matches and no more: `KVCachePool.explain`, in fields and in words.

Several reasons can hold at once. The principal one is the first of these that does; the others
stay as fields:

==================  =============================================================================
reason              holds when
==================  =============================================================================
"reuse off"         prefix reuse is off: nothing matches, whatever is cached
"page floor"        the prompt is too short to match a page (its last token is always computed)
"whole"             all that may match does
"evicted"           more of it stood in the cache, and went to make room
"other namespace"   another `extra_key` holds more of it
"diverged"          a cached sequence has a page or more in common with it, then other tokens
"page floor"        a cached sequence has tokens in common with it, but less than a page
"cold"              no more of it was ever cached, as far as the history of evictions reaches
==================  =============================================================================
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvpool.explain.explanation import (
    REASONS,
    BoundRequest,
    EvictedRun,
    Explanation,
    NearestSequence,
    OtherNamespace,
    Reach,
)
from kvpool_ext.inquiry import inquire
from kvpool_ext.tokens import as_tokens

if TYPE_CHECKING:
    from kvpool.request import ExtraKey
    from kvpool_ext.history import EvictionHistory
    from kvpool_ext.ledger import PageLedger
    from kvpool_ext.views import Inquiry

__all__ = [
    "REASONS",
    "BoundRequest",
    "EvictedRun",
    "Explanation",
    "NearestSequence",
    "OtherNamespace",
    "Reach",
    "explain",
]

# By the numbers of `kvpool_ext.history.Cause`.
CAUSES = ("radix.evict", "bind", "extend", "fork", "alloc")
SHOWN = 4  # tokens of the prompt beside those of the cached sequence


def explain(ledger: PageLedger, prompt: Any, extra_key: ExtraKey, reuse: bool) -> Explanation:
    """Why a bind of `prompt` would match as much as it does now; changes nothing.

    Costs O(prompt + nodes + namespaces + bound requests + remembered evictions).

    Raises
    ------
    ValueError, TypeError
        An empty prompt, and as a bind does.
    """
    prompt = as_tokens(prompt)
    found = inquire(ledger, prompt, extra_key)
    history, page_size = ledger.tree.history, ledger.page_size
    now = history.clock() if history is not None else 0
    nearest = None
    if found.nearest is not None:
        common = found.nearest.common_len
        nearest = NearestSequence(
            common_len=common,
            sequence_len=found.nearest.sequence_len,
            cached_tokens=found.nearest.tokens,
            prompt_tokens=tuple(prompt[common : common + SHOWN].tolist()),
            num_branches=found.nearest.num_branches,
            locked=found.nearest.lock_ref > 0,
        )
    return Explanation(
        reason=_reason(found, reuse),
        prompt_len=prompt.size,
        limit_len=found.limit_len,
        matched_len=found.cached_len if reuse else 0,
        cached_len=found.cached_len,
        page_size=page_size,
        extra_key=found.extra_key,
        policy=ledger.tree.eviction,
        nearest=nearest,
        evicted=_evicted(found, page_size, now),
        other_namespace=OtherNamespace(*found.other) if found.other else None,
        bound=BoundRequest(*found.bound) if found.bound else None,
        reach=_reach(history, page_size, now),
    )


def _reason(found: Inquiry, reuse: bool) -> str:
    if not reuse:
        return "reuse off"
    if found.limit_len == 0:
        return "page floor"
    if found.cached_len == found.limit_len:
        return "whole"
    if found.evicted:
        return "evicted"
    if found.other is not None:
        return "other namespace"
    if found.nearest is not None and found.cached_len > 0:
        return "diverged"
    if found.nearest is not None and found.nearest.common_len > 0:
        return "page floor"
    return "cold"


def _evicted(found: Inquiry, page_size: int, now: int) -> tuple[EvictedRun, ...]:
    """The runs in tokens; neighbours that one claim took are one."""
    runs: list[EvictedRun] = []
    for start, end, cause, request, when, since in found.evicted:
        run = EvictedRun(
            start=start * page_size,
            end=end * page_size,
            cause=CAUSES[cause],
            request_id=request or None,
            seconds_ago=_seconds(now - when),
            pages_since=since,
        )
        before = runs[-1] if runs else None
        if before is not None and (before.cause, before.request_id, before.seconds_ago) == (
            run.cause,
            run.request_id,
            run.seconds_ago,
        ):
            # The deeper one went first.
            runs[-1] = EvictedRun(
                before.start, run.end, run.cause, run.request_id, run.seconds_ago, since
            )
        else:
            runs.append(run)
    return tuple(runs)


def _reach(history: EvictionHistory | None, page_size: int, now: int) -> Reach:
    if history is None:
        return Reach(0, 0, False, None, None)
    num_pages, oldest = history.reach()
    return Reach(
        remembered_len=num_pages * page_size,
        limit_len=history.max_pages * page_size,
        complete=history.num_forgotten == 0,
        seconds=None if oldest is None else _seconds(now - oldest),
        reset_seconds_ago=_seconds(now - history.reset_ns) if history.reset_ns else None,
    )


def _seconds(nanoseconds: int) -> float:
    return round(max(0, nanoseconds) / 1e9, 3)
