"""PoolBinds: how requests come and go."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvpool.calm import undisturbed
from kvpool.errors import KVCacheStateError
from kvpool.numbers import whole_number
from kvpool.pool.core import PoolCore
from kvpool.request import ExtraKey, Request
from kvpool.storage import KVStorage


class PoolBinds(PoolCore):
    """Calls of a pool that bind, fork, finish and unbind requests."""

    # ---- binding

    def bind_request(
        self, prompt: Any, total_capacity: int, *, extra_key: ExtraKey = None, priority: int = 0
    ) -> int:
        """Bind a request: match its prompt, lock the match, reserve the rest of its pages.

        Parameters
        ----------
        prompt : sequence of int
            Token ids ``[n]``; an int32 array is read in place and not kept.
        total_capacity : int
            Tokens to reserve, prompt included; rounded up to whole pages.
        extra_key : str, bytes, int or None
            Namespace (adapter, tenant, weight version): nothing is shared across namespaces.
        priority : int
            Of what this request will insert; lower is evicted first.

        Returns
        -------
        int
            The request id, from 1 up. If nothing was bound, the request becomes the active step.

        Raises
        ------
        KVCacheExhaustedError
            The pages cannot be had now; nothing was changed, no eviction either.
        ValueError
            Empty prompt, capacity below the prompt, a token beyond int32.
        TypeError
            Tokens that are no integers.
        """
        request = None
        try:
            self._gate.enter()
            if self._arrivals:
                self._take_arrivals()
            rows: list[Any] | None = [None] if len(self._requests) == 0 else None
            request = self._requests.bind(
                prompt, total_capacity, extra_key, priority, self._prefix_reuse
            )
            if rows is not None:
                rows[0] = request
                self._activate(rows)
            return request.tag
        except BaseException:
            self._take_back(request)
            raise
        finally:
            self._gate.leave()

    def bind_with_prefix(
        self, prompt: Any, total_capacity: int, *, extra_key: ExtraKey = None
    ) -> int:
        """Release every other request and bind one, clamped to what can be had.

        It becomes the active step.

        Returns
        -------
        int
            Matched prefix length in tokens; 0 with prefix reuse off.

        Raises
        ------
        ValueError
            Not even the prompt fits; then nothing was released.
        """
        request = None
        try:
            self._gate.enter()
            if self._arrivals:
                self._take_arrivals()
            rows: list[Any] = [None]
            request = self._requests.bind_alone(
                prompt, total_capacity, extra_key, self._prefix_reuse
            )
            rows[0] = request
            self._activate(rows)
            return request.matched_len or 0
        except BaseException:
            self._take_back(request)
            raise
        finally:
            self._gate.leave()

    def bind_requests(self, batch_size: int, capacity: int) -> list[int]:
        """Release every other request and bind `batch_size` without a prompt.

        Their capacities are clamped equally to what can be had, and they become the active step.

        Raises
        ------
        KVCacheExhaustedError
            Not one page each; then nothing was released.
        """
        requests: list[Request] = []
        try:
            self._gate.enter()
            batch_size = whole_number(batch_size, "batch_size", at_least=1)
            capacity = whole_number(capacity, "capacity", at_least=1)
            requests, request_ids = self._requests.bind_equal(
                batch_size, capacity, None, self._prefix_reuse
            )
            self._activate(requests)
            return request_ids
        except BaseException:
            self._take_back(*requests)
            raise
        finally:
            self._gate.leave()

    def _take_back(self, *requests: Request | None) -> None:
        # An interrupt came in between, and nobody would know their ids.
        for request in requests:
            if request is not None and request.live:
                self._requests.ledger.take_back(request)

    def would_fit(self, prompt: Any, total_capacity: int, *, extra_key: ExtraKey = None) -> bool:
        """Whether `bind_request` would succeed now; changes nothing, not even recency."""
        try:
            self._gate.enter()
            return self._requests.ledger.would_fit(
                prompt, total_capacity, extra_key, self._prefix_reuse
            )
        finally:
            self._gate.leave()

    def fork_request(self, request_id: int, total_capacity: int) -> int:
        """A second request over the same written tokens, for beam search and parallel sampling.

        Whole written pages are held by both, read-only from now on, and counted once; the partial
        page is copied. Namespace and priority are inherited. The first holder that finishes or
        checkpoints brings the shared pages into the tree.

        If the copy of the partial page fails, the fork is undone, but for what was evicted to make
        room for it.

        Returns
        -------
        int
            The new request's id.

        Raises
        ------
        KVCacheExhaustedError
            The private pages cannot be had now.
        ValueError
            `total_capacity` below what is written.
        """
        try:
            self._gate.enter()
            self._device.check_upload()
            return self._fork(
                self._requests.get(request_id), whole_number(total_capacity, "total_capacity")
            ).tag
        finally:
            self._gate.leave()

    @undisturbed  # a clean-up that unbinds would have the copy go to a page that was given back
    def _fork(self, request: Request, total_capacity: int) -> Request:
        storage, shared_pages = self._open_storage(), request.shared_pages
        child = self._requests.fork(request, total_capacity)
        try:
            self._copy_partial_page(storage, request, child)
        except BaseException:
            self._requests.ledger.unfork(request, child, shared_pages)
            raise
        return child

    def _copy_partial_page(self, storage: KVStorage, request: Request, child: Request) -> None:
        shared, written = divmod(self._requests.valid_len(child), self._page_size)
        if written == 0:
            return
        offsets = np.arange(self._page_size)
        source = int(request.pages()[shared]) * self._page_size + offsets
        target = int(child.pages()[shared]) * self._page_size + offsets
        # What the parent wrote past its valid length is not the child's.
        rest = self._device.to_device(target[written:])
        storage.copy(self._device.to_device(source), self._device.to_device(target))
        storage.zero(rest)

    # ---- the end

    def finish_request(self, request_id: int, tokens: Any) -> int:
        """Insert the request's written whole pages into the tree, then unbind it.

        Parameters
        ----------
        request_id : int
            A bound request.
        tokens : sequence of int
            Prompt and generated tokens from position 0, no padding; may be shorter than what was
            written, and is cut at `valid_len`.

        Returns
        -------
        int
            Tokens newly inserted.

        Raises
        ------
        ValueError
            Tokens that contradict those given at bind or checkpoint; then nothing was changed.
        """
        try:
            self._gate.enter()
            return self._requests.finish(
                self._requests.get(request_id), tokens, self._prefix_reuse
            )
        finally:
            self._gate.leave()

    def finish_active(self, tokens: Any) -> int:
        """`finish_request` of the only bound request, else of the only active one.

        Raises
        ------
        KVCacheStateError
            Several requests are bound, and not exactly one is active.
        """
        try:
            self._gate.enter()
            candidates = list(self._requests) if len(self._requests) == 1 else self._live_rows()
            if len(candidates) != 1:
                raise KVCacheStateError(
                    f"{len(self._requests)} requests are bound and {len(candidates)} active, "
                    "expected one of either: "
                    "name it with finish_request"
                )
            return self._requests.finish(candidates[0], tokens, self._prefix_reuse)
        finally:
            self._gate.leave()

    def unbind_request(self, request_id: int) -> None:
        """Give the request's private pages back at once; nothing is inserted."""
        try:
            self._gate.enter()
            self._requests.unbind(self._requests.get(request_id))
        finally:
            self._gate.leave()

    def unbind_requests(self) -> None:
        """Unbind every request."""
        try:
            self._gate.enter()
            self._requests.unbind_all()
        finally:
            self._gate.leave()
