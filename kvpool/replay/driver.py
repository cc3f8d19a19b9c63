"""CellReplay: requests through the production bookkeeping of one pool, without its tensors.

What an engine does for each request, in this order: bind the prompt with room for the answer,
`mark_written` after the prefill, checkpoint (so that requests in flight share the prompt), and at
the end `mark_written` and finish. At most `window` requests are in flight, and the oldest ends
first. A request that finds too few pages waits until others have ended.
"""

from __future__ import annotations

from array import array
from collections import deque
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from kvpool.errors import KVCacheExhaustedError
from kvpool.paging import num_pages_for_length
from kvpool.replay.cell import Cell
from kvpool.replay.lines import TraceRequest
from kvpool.replay.losses import Losses
from kvpool.replay.results import CellResult
from kvpool.request import Request
from kvpool.requests import RequestTable


class CellReplay:
    """One cell while it is replayed.

    Parameters
    ----------
    cell : Cell
        What to replay through.
    num_pages : int
        Pages of its pool, from `Cell.num_pages`.
    window : int
        Requests in flight at most.
    checkpoint : bool
        Publish a prompt when it has been computed, not only when its request ends.
    num_losses : int
        Requests to explain.
    unbounded_lens : ndarray, optional
        int32 ``[requests]``, what each matches if nothing is ever evicted.
    keep_matches : bool
        Keep what each request matched.
    eviction_history : int, optional
        Tokens of evicted prefixes that the pool remembers, for its explanations.
    """

    def __init__(
        self,
        cell: Cell,
        num_pages: int,
        *,
        window: int,
        checkpoint: bool,
        num_losses: int = 0,
        unbounded_lens: NDArray[np.int32] | None = None,
        keep_matches: bool = False,
        eviction_history: int | None = None,
    ) -> None:
        self.table = RequestTable(
            num_pages,
            cell.page_size,
            1,
            eviction=cell.policy,
            eviction_history=eviction_history,
        )
        self._result = CellResult(cell, num_pages)
        self._page_size = cell.page_size
        self._window = window
        self._checkpoints = checkpoint and window > 1
        self._in_flight: deque[tuple[Request, NDArray[np.int32]]] = deque()
        self._losses = Losses(num_losses, self.table, unbounded_lens) if num_losses else None
        self._matched_lens = array("i") if keep_matches else None

    @property
    def cell(self) -> Cell:
        """What is replayed."""
        return self._result.cell

    @property
    def hit_rate(self) -> float | None:
        """So far."""
        return self._result.hit_rate

    def fits(self, num_tokens: int) -> bool:
        """Whether a request of so many tokens fits when nothing else is in flight."""
        return num_pages_for_length(num_tokens, self._page_size) <= self.table.num_pages

    def refuse(self, request: TraceRequest) -> None:
        """Count a request that does not fit."""
        self._result.too_large += 1
        self._result.too_large_tokens += request.prompt_len
        if self._matched_lens is not None:
            self._matched_lens.append(-1)

    def serve(self, index: int, request: TraceRequest, tokens: NDArray[np.int32]) -> None:
        """Lead a request that fits through the pool until it is in flight.

        Parameters
        ----------
        index : int
            Its number in the trace.
        request : TraceRequest
            What the trace says.
        tokens : ndarray
            int32 ``[num_tokens + 1]``, from `TokenWriter.tokens`.
        """
        while len(self._in_flight) >= self._window:
            self._finish_oldest()
        num_tokens = tokens.size - 1
        prompt = tokens[: request.prompt_len]
        had_to_wait = False
        while True:
            if self._losses is not None and self._would_fit(request, prompt, num_tokens):
                explanation = self._losses.ask(index, request, prompt)
            uncut_len = self._uncut_len(request, tokens)
            lease = self._bind(request, prompt, num_tokens)
            if lease is not None:
                break
            had_to_wait = True
            self._finish_oldest()
        matched_len = lease.matched_pages * self._page_size
        self._result.waited += had_to_wait
        self._result.count(
            prompt.size, num_tokens - prompt.size, matched_len, max(uncut_len, matched_len)
        )
        self._look_at_pages()
        if self._losses is not None:
            self._losses.add(index, request, lease, explanation)
        if self._matched_lens is not None:
            self._matched_lens.append(matched_len)
        self._in_flight.append((lease, tokens[:-1]))
        self._prefill(lease, prompt)

    def drain(self) -> None:
        """End every request in flight."""
        while self._in_flight:
            self._finish_oldest()

    def result(self) -> CellResult:
        """What was found so far; the same object at each call."""
        result = self._result
        result.evicted_pages = self.table.ledger.tree.evicted_pages
        if result.cell.capacity is None and result.evicted_pages:
            raise AssertionError(f"{result.cell} evicted {result.evicted_pages} pages")
        if self._losses is not None:
            result.losses = self._losses.worst()
        if self._matched_lens is not None:
            result.matched_lens = np.array(self._matched_lens, np.int32)
        return result

    # ---- kvpool's calls, and their time

    def _bind(
        self, request: TraceRequest, prompt: NDArray[np.int32], num_tokens: int
    ) -> Request | None:
        start = perf_counter()
        try:
            return self.table.bind(prompt, num_tokens, request.extra_key, 0, True)
        except KVCacheExhaustedError:
            if not self._in_flight:
                raise
            return None
        finally:
            self._result.bookkeeping_s += perf_counter() - start

    def _prefill(self, lease: Request, prompt: NDArray[np.int32]) -> None:
        start = perf_counter()
        self.table.mark_written(lease, prompt.size)
        if self._checkpoints:
            self.table.checkpoint(lease, prompt, True)
        self._result.bookkeeping_s += perf_counter() - start

    def _finish_oldest(self) -> None:
        lease, tokens = self._in_flight.popleft()
        start = perf_counter()
        self.table.mark_written(lease, tokens.size)
        self.table.finish(lease, tokens, True)
        self._result.bookkeeping_s += perf_counter() - start

    # ---- what is only looked at, outside of the time

    def _uncut_len(self, request: TraceRequest, tokens: NDArray[np.int32]) -> int:
        """What the prompt would match without the rule of n - 1; 0 where that makes no difference.

        It is what a prompt of one token more matches, and a walk that changes nothing says it.
        """
        if request.prompt_len % self._page_size:
            return 0
        longer = tokens[: request.prompt_len + 1]
        num_pages, _ = self.table.ledger.room_if_alone(longer, request.extra_key, True)
        return num_pages * self._page_size

    def _would_fit(
        self, request: TraceRequest, prompt: NDArray[np.int32], num_tokens: int
    ) -> bool:
        return self.table.ledger.would_fit(prompt, num_tokens, request.extra_key, True)

    def _look_at_pages(self) -> None:
        num_used = self.table.num_pages - self.table.free_pages
        num_bound = num_used - self.table.ledger.evictable_pages
        self._result.peak_pages = max(self._result.peak_pages, num_used)
        self._result.peak_bound_pages = max(self._result.peak_bound_pages, num_bound)
