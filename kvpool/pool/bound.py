"""PoolRequests: what can be done with, and asked of, bound requests, and their steps."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvpool.errors import KVCacheStateError
from kvpool.numbers import whole_number
from kvpool.pool.core import PoolCore
from kvpool.request import RequestInfo
from kvpool.step import Step


class PoolRequests(PoolCore):
    """Calls of a pool on requests while they are bound."""

    # ---- while bound

    def extend_request(self, request_id: int, total_capacity: int) -> None:
        """Reserve more pages for a bound request, all or nothing.

        Page ids and addresses of what is there stay; less than what is reserved changes nothing.

        Raises
        ------
        KVCacheExhaustedError
            The pages cannot be had now.
        """
        try:
            self._gate.enter()
            self._requests.extend(
                self._requests.get(request_id), whole_number(total_capacity, "total_capacity")
            )
        finally:
            self._gate.leave()

    def shrink_request(self, request_id: int, total_capacity: int) -> None:
        """Give whole unused pages past `total_capacity` back.

        Pages that were written to stay, and so does a last page.
        """
        try:
            self._gate.enter()
            self._requests.shrink(
                self._requests.get(request_id), whole_number(total_capacity, "total_capacity")
            )
        finally:
            self._gate.leave()

    def mark_written(self, request_id: int, length: int) -> None:
        """Declare K and V of ``[0, length)`` present on every layer.

        For code that writes without `put`, which answers for the rest of the last page too. Only
        ever raises `valid_len`.

        Raises
        ------
        KVCacheExhaustedError
            `length` past the request's capacity.
        """
        try:
            self._gate.enter()
            self._requests.mark_written(
                self._requests.get(request_id), whole_number(length, "length")
            )
        finally:
            self._gate.leave()

    def checkpoint_request(self, request_id: int, tokens: Any) -> int:
        """Insert what is written so far and keep the request bound: others share it at once.

        Page ids of the request do not change; its whole written pages become read-only. So give it
        accepted tokens only: a draft that may be taken back is not yet one.

        Parameters
        ----------
        request_id : int
            A bound request.
        tokens : sequence of int
            Its tokens from position 0; cut at `valid_len`.

        Returns
        -------
        int
            Tokens newly inserted.

        Raises
        ------
        ValueError
            Tokens that contradict those given at bind or at an earlier checkpoint.
        """
        try:
            self._gate.enter()
            return self._requests.checkpoint(
                self._requests.get(request_id), tokens, self._prefix_reuse
            )
        finally:
            self._gate.leave()

    # ---- looking at requests

    def is_bound(self, request_id: int) -> bool:
        """Whether the id is bound now."""
        return request_id in self._requests

    def matched_prefix_len(self, request_id: int) -> int:
        """Tokens found in the cache at bind, 0 for an unknown id."""
        request = self._requests.ledger.leases.get(request_id)
        return 0 if request is None else request.matched_pages * self._page_size

    def valid_len(self, request_id: int) -> int:
        """Leading tokens written on every layer and not taken back."""
        try:
            self._gate.enter()
            return self._requests.valid_len(self._requests.get(request_id))
        finally:
            self._gate.leave()

    def request(self, request_id: int) -> RequestInfo:
        """What is known of a bound request, a copy."""
        try:
            self._gate.enter()
            return self._requests.info(self._requests.get(request_id))
        finally:
            self._gate.leave()

    @property
    def bound_request_count(self) -> int:
        """Requests bound now."""
        return len(self._requests)

    @property
    def request_capacity(self) -> int:
        """The smallest capacity of the active rows in tokens, 0 if none."""
        try:
            self._gate.enter()
            rows = self._live_rows()
            return min((self._requests.capacity(request) for request in rows), default=0)
        finally:
            self._gate.leave()

    # ---- steps

    def activate_step(self, *request_ids: Any) -> Step:
        """Make these requests, in this order, the rows of the step.

        Earlier steps stay usable while all of their requests are bound.

        Parameters
        ----------
        request_ids : int, or one sequence of int
            Ids, one by one or as one list or integer array.

        Raises
        ------
        UnknownRequestError
            An id that is not bound.
        ValueError
            No ids, or one twice.
        """
        try:
            self._gate.enter()
            if len(request_ids) == 1 and isinstance(request_ids[0], (list, tuple, np.ndarray)):
                found = np.asarray(request_ids[0])
                request_ids = tuple(found.tolist())
                plain = found.dtype.kind in "iu"
            else:
                plain = {*map(type, request_ids)} == {int}
            if not request_ids:
                raise ValueError("activate_step expects at least one request id, got none")
            if len(set(request_ids)) < len(request_ids):
                raise ValueError(
                    f"activate_step expects each request once, got {list(request_ids)}"
                )
            # 1.0 and True are found under 1, so what is no int is looked at one by one.
            get_each = map(self._requests.get, request_ids)
            requests = self._requests.get_all(request_ids) if plain else [*get_each]
            step = self._make_step(requests)
            if not step.is_alive:
                for request_id in request_ids:
                    self._requests.get(request_id)
            self._activate(requests, step)
            return step
        finally:
            self._gate.leave()

    @property
    def step(self) -> Step:
        """The latest active step.

        Raises
        ------
        KVCacheStateError
            There is none, or one of its requests has ended.
        """
        try:
            self._gate.enter()
            if not self._live_rows():
                raise KVCacheStateError("no step is active: bind a request and call activate_step")
            if self._step is None:
                self._step = self._make_step(self._active)
            return self._step
        finally:
            self._gate.leave()
