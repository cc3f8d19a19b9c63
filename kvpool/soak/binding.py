"""BindVerbs: how requests of the traffic come, share, and go."""

from __future__ import annotations

from typing import Any

from kvpool.errors import KVCacheExhaustedError
from kvpool.soak.aborts import Interrupted, with_stop
from kvpool.soak.bound import KEYS, Bound
from kvpool.soak.lineage import Lineage, Text, length_of
from kvpool.soak.stage import Stage


class BindVerbs(Stage):
    """Operations on the life of requests."""

    # ---- binds

    def bind(self, handle: int, text: Text, more: int, key: int, priority: int, tail: int) -> None:
        """A strict bind with `more` tokens of room behind the prompt, and a look at its match."""
        if handle in self.bound or not length_of(text):
            return
        lineage = self.lineage(text, tail, key)
        length = length_of(text)
        prompt, capacity = lineage.tokens(length).copy(), length + max(more, 0)
        options: dict[str, Any] = {"extra_key": KEYS[key % len(KEYS)]}
        mark = self.calls.mark()
        fits = self.calls.let("fits", "pool", "would_fit", prompt, capacity, **options)
        found = self.calls.attempt(
            KVCacheExhaustedError,
            "pool",
            "bind_request",
            prompt,
            capacity,
            **options,
            priority=priority or None,
        )
        bound = not isinstance(found, KVCacheExhaustedError)
        self.calls.expect(bound, fits, "would_fit before a bind", "fits")
        self.calls.unsay(mark, 1)
        if not bound:
            return self._refuse()
        self._enter(handle, found, lineage, length, capacity)
        return None

    def bind_alone(self, handle: int, text: Text, more: int, key: int, tail: int) -> None:
        """The exclusive bind: everybody else goes, the capacity is clamped."""
        if handle in self.bound or not length_of(text):
            return
        lineage = self.lineage(text, tail, key)
        length = length_of(text)
        prompt, capacity = lineage.tokens(length).copy(), length + max(more, 0)
        error = KVCacheExhaustedError if not self.reuse else ValueError
        options: dict[str, Any] = {"extra_key": KEYS[key % len(KEYS)]}
        found = self.calls.attempt(error, "pool", "bind_with_prefix", prompt, capacity, **options)
        if isinstance(found, Exception):
            self.refusals += 1
            self.counts["bind_failures"] += not self.reuse
            return
        self.forget_all()
        request_id = self.pool.step.request_ids[0]
        given = self.pool.request(request_id).capacity
        if given > self.rounded(capacity) or (self.reuse and given < length):
            raise self.wrong_capacity("bind_with_prefix", request_id, capacity, given)
        prompt_len = length if self.reuse else self._known_of_clamped(length, given)
        matched = self.pool.matched_prefix_len(request_id)
        self.calls.expect(matched, found, "the answer of bind_with_prefix")
        self._enter(handle, request_id, lineage, prompt_len, given)

    def bind_equal(self, handles: list[int], capacity: int, tail: int) -> None:
        """The exclusive bind of several blank requests."""
        handles = [handle for handle in dict.fromkeys(handles) if handle not in self.bound]
        if not handles or capacity < 1:
            return
        found = self.calls.attempt(
            KVCacheExhaustedError, "pool", "bind_requests", len(handles), capacity
        )
        if isinstance(found, KVCacheExhaustedError):
            return self._refuse()
        self.forget_all()
        for i, (handle, request_id) in enumerate(zip(handles, found, strict=True)):
            given = self.pool.request(request_id).capacity
            if not self.page_size <= given <= self.rounded(capacity):
                raise self.wrong_capacity("bind_requests", request_id, capacity, given)
            valid = [0] * self.shape.num_layers
            lineage = self.lineage([], tail + i, 0)
            self.bound[handle] = Bound(
                handle, request_id, lineage, 0, given, 0, 0, valid, self.reuse
            )
        return None

    def interrupt_bind(self, text: Text, more: int) -> None:
        """An abort while a bind reads its prompt leaves nothing behind."""
        tokens = self.lineage(text, 0, 0).tokens(length_of(text)).tolist()
        given = with_stop(tokens)
        capacity = len(tokens) + 1 + max(more, 0)
        self.calls.refused(Interrupted, "pool", "bind_request", given, capacity)

    def fork(self, handle: int, child: int, more: int, tail: int) -> None:
        """A second request over the same written tokens."""
        parent = self.bound.get(handle)
        if parent is None or child in self.bound:
            return
        written = parent.valid_len
        capacity = max(1, written + max(more, 0))
        found = self.calls.attempt(
            KVCacheExhaustedError, "pool", "fork_request", parent.request_id, capacity
        )
        if isinstance(found, KVCacheExhaustedError):
            return self._refuse()
        shared = self.whole(written)
        parent.shared = max(parent.shared, shared)
        # A prompt that is not all written yet binds the child's tokens too.
        lineage = parent.lineage.copy(max(written, parent.prompt_len), tail)
        self.bound[child] = forked = Bound(
            child,
            found,
            lineage,
            parent.prompt_len,
            self.rounded(capacity),
            None,
            shared,
            [written] * self.shape.num_layers,
            parent.inserts,
        )
        # The rest of the partial page is not the parent's any more.
        self.check_request(forked)
        return None

    # ---- what they share

    def _known_of_clamped(self, length: int, given: int) -> int:
        """Prompt tokens that a bind without reuse keeps: none, if they did not fit."""
        return length if given >= length else 0

    def _refuse(self) -> None:
        self.refusals += 1
        self.counts["bind_failures"] += 1

    def _enter(
        self, handle: int, request_id: int, lineage: Lineage, length: int, capacity: int
    ) -> None:
        matched = self.pool.matched_prefix_len(request_id)
        # One token is always left to compute.
        most = self.whole(length - 1) if self.reuse else 0
        if matched % self.page_size or not 0 <= matched <= most:
            raise self.calls.fail(
                "the match of a bind",
                f"{matched} of a prompt of {length} tokens",
                f"pool.matched_prefix_len({request_id}) in range(0, {most + 1}, {self.page_size})",
            )
        known = self.cached.most(lineage, matched)
        if matched > known:
            raise self.calls.fail(
                "a match of what nobody published",
                f"{matched} of a prompt of {length} tokens, {known} were published",
                f"pool.matched_prefix_len({request_id}) <= {known}",
            )
        if self.reuse:
            self.counts["prefix_prompt_tokens"] += length
            self.counts["prefix_match_tokens"] += matched
            self.matched_tokens += matched
            self.hits += matched > 0
        valid = [matched] * self.shape.num_layers
        bound = Bound(
            handle,
            request_id,
            lineage,
            length,
            self.rounded(capacity),
            matched,
            matched,
            valid,
            self.reuse,
        )
        self.bound[handle] = bound
        self.check_request(bound)
        if matched:
            self.read([handle], request_id % 2)

    def read(self, handles: list[int], door: int) -> None:
        """Reading is another verb's."""
        raise NotImplementedError
