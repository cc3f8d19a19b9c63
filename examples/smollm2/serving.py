"""Continuous batching over a kvpool: admit, prefill, decode together, preempt, finish.

The scheduler keeps two lists, both oldest first, and everyone waiting is younger than everyone
running. From that follows that it always ends: only the youngest is preempted, only the oldest is
admitted, so the oldest request gains a token in every step, whatever the size of the pool.

A request reserves pages for its prompt and a little more, and grows page by page. When no page is
left, the youngest running request is finished as far as it is written, which leaves its prefix in
the cache, and bound again later with its prompt and what it had answered so far.

With speculation every row may write a draft too, and the pass verifies it. Drafts come last: they
take pages that nobody needs for now, and where there are none they are short or left out.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np

from examples.smollm2.generation import Generation, GenerationRequest
from examples.smollm2.model import Llama
from examples.smollm2.windows import Window, draft_for
from kvpool import KVCacheExhaustedError, KVCachePool

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
    speculate : int
        The most tokens of a draft; 0 drafts nothing. Answers do not depend on it.
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
        speculate: int = 0,
        observer: Observer | None = None,
    ) -> None:
        if speculate < 0:
            raise ValueError(f"expected speculate >= 0, got {speculate}")
        self._model = model
        self._pool = pool
        self._eos_token = eos_token
        self._headroom = pool.page_size if headroom is None else headroom
        self._max_batch_size = max_batch_size
        self._max_step_tokens = max_step_tokens
        self._speculate = speculate
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
        """Make room, admit who fits, run one forward pass, give every row its tokens."""
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
        budget = self._max_step_tokens - len(self._running) * (1 + self._speculate)
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
            new_len = len(generation.tokens) - self._pool.valid_len(generation.request_id)
            generation.prefilled_len += new_len
            budget -= new_len
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
        pool, windows = self._pool, [self._window(row) for row in self._running]
        step = pool.activate_step(*(window.row.request_id for window in windows))
        drafted = any(window.draft for window in windows)
        with step.verify_window() if drafted else nullcontext():
            all_logits = self._logits(step, windows)
        self.peak_pages = max(self.peak_pages, held_pages(pool))
        context_len, reasons = self._model.config.context_len, []
        on_token = partial(self._observe, "token")
        for window, logits in zip(windows, all_logits, strict=True):
            reasons.append(window.take_tokens(logits, self._eos_token, context_len, on_token))
            window.row.first_token_at = window.row.first_token_at or time.perf_counter()
        if drafted:
            # Before anything is published: what was rejected must not reach the tree.
            step.truncate_to(
                [window.sealed_len for window in windows], [window.end for window in windows]
            )
        for row in admitted:
            # Those who wait can share this prefix from the next step on.
            pool.checkpoint_request(row.request_id, row.tokens)
        for window, reason in zip(windows, reasons, strict=True):
            if reason == "context":
                self._finish(window.row, reason, f"the model reads {context_len} tokens at most")
            elif reason:
                self._finish(window.row, reason)

    def _window(self, row: Generation) -> Window:
        """Return what a row writes next; the pool has slots for it."""
        context_len = self._model.config.context_len
        draft = draft_for(row, self._speculate, self._eos_token, context_len)
        if draft:
            draft = draft[: self._reserve(row, len(draft))]
        start = self._pool.valid_len(row.request_id)
        return Window(row, start, [*row.tokens[start:], *draft], draft)

    def _reserve(self, row: Generation, draft_len: int) -> int:
        """Take pages for a draft where there are some to spare; return how long it may be."""
        pool, num_tokens = self._pool, len(row.tokens)
        capacity, wanted = pool.request(row.request_id).capacity, num_tokens + draft_len
        if wanted > capacity:
            # A page once written to stays with its row, even if the guess was wrong. So one must
            # be left for the next token of each row, or guesses would preempt their neighbours.
            left = pool.free_pages + pool.radix.evictable_size // pool.page_size
            spare = max(0, left - len(self._running))
            wanted = min(wanted, capacity + spare * pool.page_size)
            pool.extend_request(row.request_id, wanted)
        return wanted - num_tokens

    def _logits(self, step: Any, windows: list[Window]) -> list[np.ndarray]:
        """Write all windows; return for each what follows its last ``num_logits`` tokens."""
        qo_indptr = np.cumsum([0, *(len(window.tokens) for window in windows)])
        lasts = [
            np.arange(end - window.num_logits, end)
            for window, end in zip(windows, qo_indptr[1:], strict=True)
        ]
        logits = self._model.forward(
            self._pool,
            step,
            np.concatenate([window.tokens for window in windows]),
            [window.start for window in windows],
            qo_indptr,
            logits_of=np.concatenate(lasts),
        )
        ends = list(accumulate(window.num_logits for window in windows))
        return np.split(to_host(logits), ends[:-1])

    def _finish(self, generation: Generation, reason: str, message: str = "") -> None:
        if generation.request_id:
            self._running.remove(generation)
            self._pool.finish_request(generation.request_id, generation.tokens)
            generation.request_id = 0
        generation.finish_reason, generation.message = reason, message
        generation.lookup = None
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
