"""Continuous batching over a kvpool: admit, prefill, decode together, preempt, finish.

The scheduler keeps two lists, both oldest first, and everyone waiting is younger than everyone
running. From that follows that it always ends: only the youngest is preempted, only the oldest is
admitted, so the oldest request gains a token in every step, whatever the size of the pool.

A request reserves pages for its prompt and a little more, and grows page by page. When no page is
left, the youngest running request is finished as far as it is written, which leaves its prefix in
the cache, and bound again later with its prompt and what it had answered so far.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from examples.smollm2.model import Llama
from examples.smollm2.sampling import GREEDY, SamplingParams, margin, sample
from kvpool import KVCacheExhaustedError, KVCachePool


@dataclass(frozen=True)
class GenerationRequest:
    """What is asked: a prompt in tokens, and when to stop."""

    name: str
    prompt: Sequence[int]
    max_tokens: int = 48
    sampling: SamplingParams = GREEDY

    def __post_init__(self) -> None:
        if len(self.prompt) == 0:
            raise ValueError(f"request {self.name!r}: expected at least one prompt token")
        if self.max_tokens < 1:
            raise ValueError(
                f"request {self.name!r}: expected max_tokens >= 1, got {self.max_tokens}"
            )


@dataclass(eq=False)
class Generation:
    """One request on its way through the engine, and its record afterwards."""

    request: GenerationRequest
    answer: list[int] = field(default_factory=list)
    margins: list[float] = field(default_factory=list)  # best minus second logit, per token
    finish_reason: str = ""  # "eos", "max_tokens", "context", "pool", "refused"; "" while alive
    message: str = ""  # why it was refused or cut short
    matched_len: int = 0  # prompt tokens found in the cache, at the first bind
    prefilled_len: int = 0  # prompt and answer tokens computed by prefill, over all binds
    preemptions: int = 0
    waited_steps: int = 0  # steps that ran without it, before it was bound and when preempted
    request_id: int = 0  # the pool's while bound; those count from 1
    bound_at: float = 0.0
    first_token_at: float = 0.0
    finished_at: float = 0.0

    @property
    def tokens(self) -> list[int]:
        """The prompt and the answer so far."""
        return [*self.request.prompt, *self.answer]

    @property
    def time_to_first_token(self) -> float:
        """Seconds from the first bind to the first token."""
        return self.first_token_at - self.bound_at

    @property
    def tokens_per_second(self) -> float:
        """Answer tokens a second, after the first."""
        if len(self.answer) < 2:
            return 0.0
        return (len(self.answer) - 1) / (self.finished_at - self.first_token_at)


Observer = Callable[[str, Generation], None]


class Engine:
    """Serves requests on one pool, one forward pass per :meth:`step`.

    Parameters
    ----------
    model : Llama
        The model.
    pool : KVCachePool
        Its KV cache; nobody else binds requests in it meanwhile.
    eos_token : int
        The token that ends an answer.
    headroom : int, optional
        Tokens beyond the prompt to reserve at bind; one page by default.
    max_batch_size, max_step_tokens : int
        The most rows, and about the most new tokens, of one step.
    observer : callable, optional
        Called as ``observer(event, generation)`` for "bound", "token", "preempted", "finished".
    """

    def __init__(
        self,
        model: Llama,
        pool: KVCachePool,
        *,
        eos_token: int,
        headroom: int | None = None,
        max_batch_size: int = 16,
        max_step_tokens: int = 2048,
        observer: Observer | None = None,
    ) -> None:
        self._model = model
        self._pool = pool
        self._eos_token = eos_token
        self._headroom = pool.page_size if headroom is None else headroom
        self._max_batch_size = max_batch_size
        self._max_step_tokens = max_step_tokens
        self._observe = observer or (lambda event, generation: None)
        self._waiting: list[Generation] = []  # oldest first
        self._running: list[Generation] = []  # oldest first; all older than the waiting
        self.num_steps = 0
        self.peak_pages = 0  # the most pages that bound requests held at a time

    @property
    def idle(self) -> bool:
        """Whether nothing waits and nothing runs."""
        return not self._waiting and not self._running

    def submit(self, request: GenerationRequest) -> Generation:
        """Queue a request; it is the youngest. Too long for the model: refused at once."""
        generation, context_len = Generation(request), self._model.config.context_len
        if len(request.prompt) >= context_len:
            message = f"expected a prompt below {context_len} tokens, got {len(request.prompt)}"
            self._finish(generation, "refused", message)
        else:
            self._waiting.append(generation)
        return generation

    def run(self) -> None:
        """Step until nothing is left."""
        while not self.idle:
            self.step()

    def step(self) -> None:
        """Make room, admit who fits, run one forward pass, give every row a token."""
        self._grow()
        admitted = self._admit()
        if self._running:
            self._forward(admitted)
        for generation in self._waiting:
            generation.waited_steps += 1
        self.num_steps += 1

    # Who runs ------------------------------------------------------------------------------

    def _grow(self) -> None:
        """Give every running request, oldest first, a slot for the token it is about to write."""
        for generation in list(self._running):
            while generation in self._running:
                try:
                    self._pool.extend_request(generation.request_id, len(generation.tokens))
                    break
                except KVCacheExhaustedError as error:
                    # The oldest, alone, has every page there is: waiting would not help it.
                    if len(self._running) == 1:
                        self._finish(generation, "pool", str(error))
                    else:
                        self._preempt(self._running[-1])

    def _preempt(self, generation: Generation) -> None:
        self._running.remove(generation)
        self._pool.finish_request(generation.request_id, generation.tokens)
        generation.request_id = 0
        generation.preemptions += 1
        self._waiting.insert(0, generation)
        self._observe("preempted", generation)

    def _admit(self) -> list[Generation]:
        """Bind waiting requests, oldest first, until one has to go on waiting."""
        admitted: list[Generation] = []
        budget = self._max_step_tokens - len(self._running)
        while self._waiting and len(self._running) < self._max_batch_size:
            generation = self._waiting[0]
            if self._running and (budget <= 0 or self._should_wait(generation, admitted)):
                break
            try:
                self._bind(generation)
            except KVCacheExhaustedError as error:
                if error.can_ever_fit and self._running:
                    break
                self._waiting.pop(0)
                self._finish(generation, "pool" if generation.answer else "refused", str(error))
                continue
            self._waiting.pop(0)
            self._running.append(generation)
            admitted.append(generation)
            budget -= len(generation.tokens) - self._pool.valid_len(generation.request_id)
            self._observe("bound", generation)
        return admitted

    def _should_wait(self, generation: Generation, admitted: list[Generation]) -> bool:
        """Whether binding this request now is possible, perhaps, but not wise."""
        pool, tokens = self._pool, generation.tokens
        # Two newcomers with the same prefix: let one compute it and the other match it. Less than
        # a few pages are computed sooner than waited for.
        if pool.prefix_reuse_enabled:
            for other in admitted:
                computed_from = pool.valid_len(other.request_id)
                shared = common_prefix_len(tokens, other.tokens)
                if shared - computed_from >= 4 * pool.page_size:
                    return True
        # Without a page left for each of the others it would be preempted at once.
        capacity = len(tokens) + self._headroom
        reserve = len(self._running) * pool.page_size
        return pool.would_fit(tokens, capacity) and not pool.would_fit(tokens, capacity + reserve)

    def _bind(self, generation: Generation) -> None:
        tokens, started = generation.tokens, time.perf_counter()
        # Headroom is a wish: a request that fills the pool to the last slot is still served.
        capacity = max(len(tokens), min(len(tokens) + self._headroom, self._pool.num_slots))
        request_id = self._pool.bind_request(tokens, capacity)
        generation.request_id = request_id
        if not generation.bound_at:
            generation.bound_at = started
            generation.matched_len = self._pool.matched_prefix_len(request_id)

    # One forward pass ----------------------------------------------------------------------

    def _forward(self, admitted: list[Generation]) -> None:
        pool, rows = self._pool, list(self._running)
        starts = [pool.valid_len(row.request_id) for row in rows]
        new_tokens = [row.tokens[start:] for row, start in zip(rows, starts, strict=True)]
        qo_indptr = np.cumsum([0, *map(len, new_tokens)])
        step = pool.activate_step(*(row.request_id for row in rows))
        logits = to_host(
            self._model.forward(pool, step, np.concatenate(new_tokens), starts, qo_indptr)
        )
        self.peak_pages = max(self.peak_pages, held_pages(pool))
        for i, row in enumerate(rows):
            if row in admitted:
                row.prefilled_len += len(new_tokens[i])
                # Those who wait can share this prefix from the next step on.
                pool.checkpoint_request(row.request_id, row.tokens)
            self._take_token(row, np.ascontiguousarray(logits[i]))

    def _take_token(self, row: Generation, logits: np.ndarray) -> None:
        token = sample(logits, row.request.sampling, len(row.answer))
        if not row.first_token_at:
            row.first_token_at = time.perf_counter()
        if token == self._eos_token:
            self._finish(row, "eos")
            return
        row.answer.append(token)
        row.margins.append(margin(logits))
        self._observe("token", row)
        if len(row.answer) == row.request.max_tokens:
            self._finish(row, "max_tokens")
        elif len(row.tokens) == self._model.config.context_len:
            self._finish(row, "context", f"the model reads {len(row.tokens)} tokens at most")

    def _finish(self, generation: Generation, reason: str, message: str = "") -> None:
        if generation.request_id:
            self._running.remove(generation)
            self._pool.finish_request(generation.request_id, generation.tokens)
            generation.request_id = 0
        generation.finish_reason, generation.message = reason, message
        generation.finished_at = time.perf_counter()
        self._observe("finished", generation)


def held_pages(pool: KVCachePool) -> int:
    """Return how many pages of a pool are neither free nor evictable."""
    return pool.num_pages - pool.free_pages - pool.radix.evictable_size // pool.page_size


def common_prefix_len(a: Sequence[int], b: Sequence[int]) -> int:
    """Return how many leading tokens two sequences share."""
    differ = (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y)
    return next(differ, min(len(a), len(b)))


def to_host(array: Any) -> np.ndarray:
    """Return a NumPy array of a NumPy or CuPy array."""
    return array.get() if hasattr(array, "get") else np.asarray(array)
