"""Losses: the requests that lost most to a pool's size, each with the reason for its match."""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kvpool.replay.lines import TraceRequest
from kvpool.request import Request
from kvpool.requests import RequestTable

if TYPE_CHECKING:
    from kvpool.explain import Explanation


@dataclass(frozen=True)
class Loss:
    """A request that found less than it might have.

    Attributes
    ----------
    index, line, request_id : int
        Number of the request in the trace, from 0; line of the file; and the id that the pool gave
        it, by which explanations name requests.
    prompt_tokens, matched_tokens : int
        Length of the prompt, and what of it was found.
    unbounded_tokens : int or None
        What would have been found if nothing were ever evicted; None where that is not known.
    explanation : Explanation
        Why so much was found, as the pool says.
    """

    index: int
    line: int
    request_id: int
    prompt_tokens: int
    matched_tokens: int
    unbounded_tokens: int | None
    explanation: Explanation

    @property
    def lost_tokens(self) -> int:
        """What the unbounded pool found besides; without one, all that was not found."""
        reachable = self.prompt_tokens if self.unbounded_tokens is None else self.unbounded_tokens
        return reachable - self.matched_tokens

    def as_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        return {
            "index": self.index,
            "line": self.line,
            "request_id": self.request_id,
            "prompt_tokens": self.prompt_tokens,
            "matched_tokens": self.matched_tokens,
            "unbounded_tokens": self.unbounded_tokens,
            "lost_tokens": self.lost_tokens,
            "reason": self.explanation.reason,
            "text": str(self.explanation),
            "explanation": self.explanation.as_dict(),
        }


class Losses:
    """Keeps the worst `limit` requests of a cell. Asks why before a bind, for a bind changes it.

    Parameters
    ----------
    limit : int
        Requests to keep.
    table : RequestTable
        Whom to ask.
    unbounded_lens : ndarray, optional
        int32 ``[requests]``, what each matches if nothing is ever evicted.
    """

    def __init__(
        self, limit: int, table: RequestTable, unbounded_lens: NDArray[np.int32] | None
    ) -> None:
        self._limit = limit
        self._table = table
        self._unbounded_lens = unbounded_lens
        self._worst: list[tuple[tuple[int, int, int], Loss]] = []  # a heap, the least on top

    def ask(
        self, index: int, request: TraceRequest, prompt: NDArray[np.int32]
    ) -> Explanation | None:
        """Why `prompt` matches what it matches now; None if it is not among the worst so far."""
        # An explanation walks the whole tree, this only the prompt.
        num_pages, _ = self._table.ledger.room_if_alone(prompt, request.extra_key, True)
        if not self._is_kept(self._rank(index, request, num_pages * self._table.page_size)):
            return None
        return self._table.explain(prompt, request.extra_key)

    def add(
        self, index: int, request: TraceRequest, lease: Request, explanation: Explanation | None
    ) -> None:
        """Hear what was bound, with what `ask` said right before."""
        matched_len = lease.matched_pages * self._table.page_size
        rank = self._rank(index, request, matched_len)
        if explanation is None or not self._is_kept(rank):
            return
        loss = Loss(
            index=index,
            line=request.line,
            request_id=lease.tag,
            prompt_tokens=request.prompt_len,
            matched_tokens=matched_len,
            unbounded_tokens=(
                None if self._unbounded_lens is None else int(self._unbounded_lens[index])
            ),
            explanation=explanation,
        )
        heapq.heappush(self._worst, (rank, loss))
        if len(self._worst) > self._limit:
            heapq.heappop(self._worst)

    def worst(self) -> list[Loss]:
        """The worst first."""
        return [loss for _, loss in sorted(self._worst, key=lambda entry: entry[0], reverse=True)]

    def _rank(self, index: int, request: TraceRequest, matched_len: int) -> tuple[int, int, int]:
        """What could have been had, then what was to be computed, then who came first."""
        missed = request.prompt_len - matched_len
        if self._unbounded_lens is None:
            return missed, missed, -index
        return int(self._unbounded_lens[index]) - matched_len, missed, -index

    def _is_kept(self, rank: tuple[int, int, int]) -> bool:
        return len(self._worst) < self._limit or rank > self._worst[0][0]
