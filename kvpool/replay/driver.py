"""CellReplay: requests through the production bookkeeping of a cell, without its tensors.

What an engine does for each request, in this order: bind the prompt with room for the answer,
`mark_written` after the prefill, checkpoint (so that requests in flight share the prompt), and at
the end `mark_written` and finish. At most `window` requests for each instance are in flight, and
the oldest of all ends first, wherever it is: a replay has no other clock. A request that finds too
few pages waits until others have ended. With tiers, what they have of its prompt is in the tree
before it is bound.
"""

from __future__ import annotations

from array import array
from collections import deque

import numpy as np
from numpy.typing import NDArray

from kvpool.replay.cell import Cell
from kvpool.replay.instance import Instance
from kvpool.replay.keys import ReplayKeys
from kvpool.replay.lines import TraceRequest
from kvpool.replay.losses import Losses
from kvpool.replay.prompt import Prompt
from kvpool.replay.results import CellResult
from kvpool.replay.routing import by_prefix
from kvpool.replay.tiers import TierModel
from kvpool.request import Request
from kvpool.requests import RequestTable


class CellReplay:
    """One cell while it is replayed.

    Parameters
    ----------
    cell : Cell
        What to replay through.
    num_pages : int
        Pages of each of its pools, from `Cell.num_pages`.
    window : int
        Requests in flight at most, times the instances.
    checkpoint : bool
        Publish a prompt when it has been computed, not only when its request ends.
    num_losses : int
        Requests to explain; only of a plain fleet.
    unbounded_lens : ndarray, optional
        int32 ``[requests]``, what each matches if nothing is ever evicted.
    keep_matches : bool
        Keep what each request matched.
    eviction_history : int, optional
        Tokens of evicted prefixes that the pool remembers, for its explanations.
    bytes_per_token : int, optional
        What a token costs, for figures in bytes.
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
        bytes_per_token: int | None = None,
    ) -> None:
        fleet = cell.fleet
        self._result = CellResult(cell, num_pages, bytes_per_token=bytes_per_token)
        self._page_size = cell.page_size
        self._window = window
        self._most_in_flight = window * fleet.instances
        self._checkpoints = checkpoint and self._most_in_flight > 1
        self._page_keys = ReplayKeys(cell.page_size)
        self._instances = [
            Instance(num_pages, cell.page_size, cell.policy, eviction_history)
            for _ in range(fleet.instances)
        ]
        self._remote = self._tier(fleet.remote_tier)
        if fleet.has_tiers:
            for instance in self._instances:
                host = self._tier(fleet.host_tier)
                instance.attach(host, self._remote, fleet.write, self._page_keys)
        self._in_flight: deque[tuple[Instance, Request, NDArray[np.int32]]] = deque()
        self._losses = Losses(num_losses, self.table, unbounded_lens) if num_losses else None
        # A fetch changes the tree, and an explanation is of the tree before.
        self._looks_first = fleet.has_tiers or self._losses is not None
        self._matched_lens = array("i") if keep_matches else None

    @property
    def cell(self) -> Cell:
        """What is replayed."""
        return self._result.cell

    @property
    def table(self) -> RequestTable:
        """The books of the first instance."""
        return self._instances[0].table

    @property
    def tables(self) -> list[RequestTable]:
        """The books of all instances."""
        return [instance.table for instance in self._instances]

    @property
    def hit_rate(self) -> float | None:
        """So far."""
        return self._result.hit_rate

    def fits(self, num_tokens: int) -> bool:
        """Whether a request of so many tokens fits when nothing else is in flight."""
        return self._instances[0].fits_alone(num_tokens)

    def refuse(self, request: TraceRequest) -> None:
        """Count a request that does not fit."""
        self._result.too_large += 1
        self._result.too_large_tokens += request.prompt_len
        if self._matched_lens is not None:
            self._matched_lens.append(-1)

    def serve(self, index: int, request: TraceRequest, tokens: NDArray[np.int32]) -> None:
        """Lead a request that fits through a pool until it is in flight.

        Parameters
        ----------
        index : int
            Its number in the trace.
        request : TraceRequest
            What the trace says.
        tokens : ndarray
            int32 ``[num_tokens + 1]``, from `TokenWriter.tokens`.
        """
        while len(self._in_flight) >= self._most_in_flight:
            self._finish_oldest()
        num_tokens = tokens.size - 1
        prompt = Prompt(request, tokens, self._page_keys)
        instance = self._route(prompt)
        had_to_wait = False
        while True:
            lease = None
            if not self._looks_first or instance.would_fit(prompt, num_tokens):
                if self._losses is not None:
                    explanation = self._losses.ask(index, request, prompt.tokens)
                fetched = instance.fetch(prompt)
                uncut_len = instance.uncut_len(prompt)
                lease = instance.bind(prompt, num_tokens, bool(self._in_flight))
            if lease is not None:
                break
            had_to_wait = True
            self._finish_oldest()
        matched_len = lease.matched_pages * self._page_size
        self._result.waited += had_to_wait
        self._result.count(
            prompt.length, num_tokens - prompt.length, matched_len, max(uncut_len, matched_len)
        )
        self._result.fleet.count(*(pages * self._page_size for pages in fetched))
        self._look_at_pages(instance)
        if self._losses is not None:
            self._losses.add(index, request, lease, explanation)
        if self._matched_lens is not None:
            self._matched_lens.append(matched_len)
        self._in_flight.append((instance, lease, tokens[:-1]))
        instance.prefill(lease, prompt, self._checkpoints)

    def drain(self) -> None:
        """End every request in flight."""
        while self._in_flight:
            self._finish_oldest()

    def close(self) -> None:
        """Let go of the followers of the trees."""
        for instance in self._instances:
            instance.close()

    def result(self) -> CellResult:
        """What was found so far; the same object at each call."""
        result = self._result
        result.evicted_pages = sum(table.ledger.tree.evicted_pages for table in self.tables)
        result.bookkeeping_s = sum(instance.bookkeeping_s for instance in self._instances)
        if result.cell.capacity is None and result.evicted_pages:
            raise AssertionError(f"{result.cell} evicted {result.evicted_pages} pages")
        result.fleet.look(self._instances, self._remote)
        if self._losses is not None:
            result.losses = self._losses.worst()
        if self._matched_lens is not None:
            result.matched_lens = np.array(self._matched_lens, np.int32)
        return result

    def _tier(self, capacity: int | None) -> TierModel | None:
        return None if capacity == 0 else TierModel(capacity, self._page_size)

    def _route(self, prompt: Prompt) -> Instance:
        instances = self._instances
        if self.cell.fleet.route == "prefix":
            near = [instance.near_pages(prompt) for instance in instances]
            return instances[by_prefix(instances, near, self._window)]
        return instances[self._result.num_requests % len(instances)]

    def _finish_oldest(self) -> None:
        instance, lease, tokens = self._in_flight.popleft()
        instance.finish(lease, tokens)

    def _look_at_pages(self, instance: Instance) -> None:
        num_used, num_bound = instance.used_pages()
        self._result.peak_pages = max(self._result.peak_pages, num_used)
        self._result.peak_bound_pages = max(self._result.peak_bound_pages, num_bound)
