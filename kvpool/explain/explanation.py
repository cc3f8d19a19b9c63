"""Explanation and what it is made of: frozen values, without a reference to the pool."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from kvpool.explain.text import sentences

if TYPE_CHECKING:
    from kvpool.request import ExtraKey

REASONS = (
    "whole",
    "cold",
    "diverged",
    "page floor",
    "evicted",
    "other namespace",
    "reuse off",
)


@dataclass(frozen=True)
class NearestSequence:
    """The cached sequence that has most leading tokens in common with the prompt.

    Attributes
    ----------
    common_len : int
        Leading tokens in common, not cut at pages: they part at this position.
    sequence_len : int
        Tokens of the longest cached sequence that goes on so; its last token is at
        ``sequence_len - 1``.
    cached_tokens, prompt_tokens : tuple of int
        Up to four tokens of each from `common_len` on.
    num_branches : int
        Cached continuations where the prompt leaves the tree; this is the nearest.
    locked : bool
        A holder keeps the page in which they part.
    """

    common_len: int
    sequence_len: int
    cached_tokens: tuple[int, ...]
    prompt_tokens: tuple[int, ...]
    num_branches: int
    locked: bool


@dataclass(frozen=True)
class EvictedRun:
    """Tokens of the prompt that were cached, and went to make room.

    Attributes
    ----------
    start, end : int
        The tokens ``[start, end)``.
    cause : str
        Whose need it was: "bind", "extend", "fork", "alloc", or "radix.evict".
    request_id : int or None
        The request that was bound or extended, or that the fork made; None for the other causes.
    seconds_ago : float
        Since it happened, to some milliseconds.
    pages_since : int
        Pages that eviction took since then, these among them: with so many more, the pool would
        still hold them.
    """

    start: int
    end: int
    cause: str
    request_id: int | None
    seconds_ago: float
    pages_since: int


@dataclass(frozen=True)
class OtherNamespace:
    """The namespace that holds most of the prompt.

    Attributes
    ----------
    extra_key : str, bytes, int or None
        Which one.
    match_len : int
        Tokens that would match there, whole pages.
    """

    extra_key: ExtraKey
    match_len: int


@dataclass(frozen=True)
class BoundRequest:
    """The bound request of whose tokens most would match.

    Attributes
    ----------
    request_id : int
        Which one.
    match_len : int
        Tokens that would match once it has cached them, whole pages.
    """

    request_id: int
    match_len: int


@dataclass(frozen=True)
class Reach:
    """How far back evictions are remembered.

    Attributes
    ----------
    remembered_len : int
        Evicted tokens that are remembered now.
    limit_len : int
        Remembered at most; 0: none.
    complete : bool
        Nothing was forgotten since the cache was made or reset.
    seconds : float or None
        Age of the oldest of them; None without any.
    reset_seconds_ago : float or None
        Since the last reset of the cache; None for never.
    """

    remembered_len: int
    limit_len: int
    complete: bool
    seconds: float | None
    reset_seconds_ago: float | None


@dataclass(frozen=True)
class Explanation:
    """Why this much of a prompt matches; ``str()`` of it is for people.

    Attributes
    ----------
    reason : str
        The principal reason, one of `REASONS`, by the order that `kvpool.explain` documents.
    prompt_len : int
        Tokens of the prompt.
    limit_len : int
        Tokens that may match at most: whole pages of ``prompt_len - 1``.
    matched_len : int
        Tokens that a bind would match now.
    cached_len : int
        Tokens that are cached, of those that may match; `matched_len` unless reuse is off.
    page_size : int
        Tokens per page.
    extra_key : str, bytes, int or None
        The namespace asked about.
    policy : str
        By which pages are evicted.
    nearest : NearestSequence or None
        The sequence that it parts from. None where the cache has nothing beside what matches, or
        all that may match does.
    evicted : tuple of EvictedRun
        What of it went, from `cached_len` on and one after the other.
    other_namespace : OtherNamespace or None
        The namespace that holds most of it, if that is more than `cached_len`.
    bound : BoundRequest or None
        The bound request of whose tokens most would match were they cached, if that is more.
    reach : Reach
        How far back evictions are remembered: what went before that reads as never cached.
    """

    reason: str
    prompt_len: int
    limit_len: int
    matched_len: int
    cached_len: int
    page_size: int
    extra_key: ExtraKey
    policy: str
    nearest: NearestSequence | None
    evicted: tuple[EvictedRun, ...]
    other_namespace: OtherNamespace | None
    bound: BoundRequest | None
    reach: Reach

    @property
    def evicted_len(self) -> int:
        """Tokens that would match had nothing been evicted; `cached_len` if that is all."""
        return self.evicted[-1].end if self.evicted else self.cached_len

    def as_dict(self) -> dict[str, Any]:
        """All fields as values that JSON can hold, with ``evicted_len`` and ``text``.

        A key of bytes is given by its ``repr``, tuples are lists.
        """
        found = _plain(asdict(self))
        assert isinstance(found, dict)
        return found | {"evicted_len": self.evicted_len, "text": str(self)}

    def __str__(self) -> str:
        return " ".join(sentences(self))


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    return repr(value) if isinstance(value, bytes) else value
