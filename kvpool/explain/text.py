"""An Explanation in words: one to three sentences, with the numbers and what there is to do."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvpool.numbers import counted

if TYPE_CHECKING:
    from kvpool.explain.explanation import EvictedRun, Explanation, NearestSequence


def sentences(why: Explanation) -> list[str]:
    """What it says: the reason, what to do about it, and what else is so; three at most."""
    found = _WORDS[why.reason](why)
    for more in (_bound(why), _also_evicted(why), _also_elsewhere(why)):
        if more and len(found) < 3:
            found.append(more)
    return found


def _matched(why: Explanation) -> str:
    verb = "matches" if why.prompt_len == 1 else "match"
    under = "" if why.extra_key is None else f" under extra_key {why.extra_key!r}"
    return f"{why.matched_len:,} of {counted(why.prompt_len, 'prompt token')} {verb}{under}"


# ---- the reasons


def _reuse_off(why: Explanation) -> list[str]:
    would = f"with prefix_reuse_enabled = True, {why.cached_len:,} would"
    return [f"{_matched(why)}: prefix reuse is off; {would}."]


def _whole(why: Explanation) -> list[str]:
    rule = f"the last token is always computed, and pages of {why.page_size} match as a whole"
    return [f"{_matched(why)}, all that can: {rule}."]


def _page_floor(why: Explanation) -> list[str]:
    near, before = why.nearest, why.prompt_len - 1
    common = min(near.common_len, before) if near is not None else 0
    if why.limit_len == 0:
        found = [f"{_matched(why)}: the last token is always computed, {_before_it(why)}."]
    else:
        assert near is not None
        found = [
            f"{_matched(why)}: {counted(common, 'token')} in common with {_sequence(near)} "
            f"{_fill(common)} no page of {why.page_size}; then {_parting(near)}."
        ]
    if common > 0:
        size = "A page size of 1" if common == 1 else f"A page size of {common:,} or less"
        found.append(f"{size} would let some of them match.")
    return found


def _evicted(why: Explanation) -> list[str]:
    found = f"{_matched(why)}: {_went(why)}."
    pages = max(run.pages_since for run in why.evicted)
    if any(run.cause == "radix.evict" for run in why.evicted):
        return [found, f"Eviction has taken {counted(pages, 'page')} since, these among them."]
    what, tokens = counted(pages, "more page"), counted(pages * why.page_size, "token")
    return [found, f"A pool of about {what} ({tokens}) would still hold them."]


def _other_namespace(why: Explanation) -> list[str]:
    other = why.other_namespace
    assert other is not None
    return [
        f"{_matched(why)}, but {other.match_len:,} would under extra_key {other.extra_key!r}.",
        "Nothing is shared across namespaces: use one key for both if their K/V is the same.",
    ]


def _diverged(why: Explanation) -> list[str]:
    near = why.nearest
    assert near is not None
    part = near.common_len - why.cached_len
    found = (
        f"{_matched(why)}: at position {near.common_len:,} {_parting(near)} of {_sequence(near)}"
    )
    if part > 0:
        common = f"{counted(part, 'token')} in common before"
        found += f"; the {common} {_fill(part)} no page of {why.page_size}"
    return [
        f"{found}.",
        "What changes from request to request (a date, an id) belongs behind what they share.",
    ]


def _cold(why: Explanation) -> list[str]:
    here, none = "no cached sequence begins with its first token", "no page of it was evicted"
    if why.cached_len > 0:
        here, none = "there the cached sequence ends", "no further page of it was evicted"
    head, reach = f"{_matched(why)}: {here}", why.reach
    if reach.limit_len == 0:
        return [f"{head}. What was evicted before is not known: eviction_history is 0."]
    if reach.complete and reach.reset_seconds_ago is None:
        return [f"{head}, and {none} since the pool was made."]
    if reach.complete:
        return [f"{head}, and {none} since the cache was reset {_ago(reach.reset_seconds_ago)}."]
    return [
        f"{head}, and {none} as far as is known.",
        f"Known are the last {counted(reach.remembered_len, 'evicted token')} "
        f"({_seconds(reach.seconds)}); a larger eviction_history than {reach.limit_len:,} reaches "
        "further back.",
    ]


_WORDS = {
    "reuse off": _reuse_off,
    "whole": _whole,
    "page floor": _page_floor,
    "evicted": _evicted,
    "other namespace": _other_namespace,
    "diverged": _diverged,
    "cold": _cold,
}


# ---- what else is so


def _bound(why: Explanation) -> str:
    if why.bound is None:
        return ""
    return (
        f"Request {why.bound.request_id}, bound now, has {why.bound.match_len:,} of these tokens "
        "and has not cached them yet: checkpoint_request after its prefill would share them."
    )


def _also_evicted(why: Explanation) -> str:
    if not why.evicted or why.reason == "evicted":
        return ""
    went = _went(why)
    return f"{went[0].upper()}{went[1:]}."


def _also_elsewhere(why: Explanation) -> str:
    other = why.other_namespace
    if other is None or why.reason == "other namespace":
        return ""
    return f"Under extra_key {other.extra_key!r}, {other.match_len:,} would match."


# ---- parts of sentences


def _went(why: Explanation) -> str:
    """Which tokens were evicted, by whom and when; the run that went last is the first."""
    last = why.evicted[0]
    parts = ""
    if len(why.evicted) > 1:
        parts = f" in {len(why.evicted):,} parts, the last"
    return (
        f"tokens [{last.start:,}, {why.evicted_len:,}) were cached and were evicted{parts} "
        f"{_ago(last.seconds_ago)} {_by(last)} ({why.policy})"
    )


def _by(run: EvictedRun) -> str:
    if run.cause == "extend":
        return f"to extend request {run.request_id}"
    if run.cause in ("bind", "fork"):
        return f"by the {run.cause} of request {run.request_id}"
    return f"by {run.cause}"


def _sequence(near: NearestSequence) -> str:
    which = "the cached sequence"
    if near.num_branches > 1:
        which = f"the nearest of {near.num_branches:,} cached sequences"
    locked = ", locked" if near.locked else ""
    return f"{which} ({counted(near.sequence_len, 'token')}{locked})"


def _parting(near: NearestSequence) -> str:
    ours = " ".join(map(str, near.prompt_tokens))
    theirs = " ".join(map(str, near.cached_tokens))
    return f"the prompt has {ours} instead of {theirs}"


def _before_it(why: Explanation) -> str:
    before = why.prompt_len - 1
    if before == 0:
        return "and there is no other"
    return (
        f"and the {counted(before, 'token')} before it {_fill(before)} no page of {why.page_size}"
    )


def _is(number: int) -> str:
    return "is" if number == 1 else "are"


def _fill(number: int) -> str:
    return "fills" if number == 1 else "fill"


def _ago(seconds: float | None) -> str:
    return f"{_seconds(seconds)} ago"


def _seconds(seconds: float | None) -> str:
    seconds = seconds or 0.0
    if seconds < 1:
        return f"{seconds * 1e3:.0f} ms"
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:,.0f} min" if seconds < 7200 else f"{seconds / 3600:,.1f} h"
