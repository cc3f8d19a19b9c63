"""Shrinking: a shorter trace that shows the same fault, for as long as there is time."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

from kvpool.soak.trace import Operation, PoolShape, Trace, TraceError

Fails = Callable[[Trace], bool]
"""Whether a trace still shows the fault."""


class Shrinker:
    """Tries traces that leave something out, and keeps what still fails.

    Parameters
    ----------
    trace : Trace
        One that fails.
    fails : callable
        Plays a trace.
    seconds : float
        When to be content.
    """

    def __init__(self, trace: Trace, fails: Fails, seconds: float) -> None:
        self.trace = trace
        self.num_trials = 0
        self._fails = fails
        self._ends_at = time.monotonic() + seconds

    def run(self) -> Trace:
        """The shortest that was found."""
        while self._in_time():
            before = self.trace
            self._drop_operations()
            self._simplify_pool()
            self._simplify_numbers()
            if self.trace is before:
                break
        return self.trace

    def shortest(self) -> Trace:
        """`run`, or as far as it came until an interrupt."""
        with suppress(KeyboardInterrupt):
            self.run()
        return self.trace

    def _in_time(self) -> bool:
        return time.monotonic() < self._ends_at

    def _try(self, shape: PoolShape, operations: list[Operation]) -> bool:
        # A trace without an operation is refused by whoever replays it.
        if not operations or not self._in_time():
            return False
        self.num_trials += 1
        candidate = Trace(shape, operations)
        if self._fails(candidate):
            self.trace = candidate
            return True
        return False

    def _drop_operations(self) -> None:
        """Runs of operations, long ones first, from the end: the last is what fails."""
        size = max(1, len(self.trace.operations) // 2)
        while size:
            end = len(self.trace.operations)
            while end > 0 and self._in_time():
                start = max(0, end - size)
                operations = self.trace.operations
                self._try(self.trace.shape, operations[:start] + operations[end:])
                end = start
            size //= 2

    def _simplify_pool(self) -> None:
        plain = PoolShape(vocabulary=50_000)
        for name in (
            "num_layers",
            "num_kv_heads",
            "head_dim",
            "max_batch_size",
            "zero_rejected_kv",
            "eviction",
            "vocabulary",
            "page_size",
        ):
            value = getattr(plain, name)
            if getattr(self.trace.shape, name) != value:
                self._try_shape(**{name: value})
        if self.trace.shape.dtype != "float32":
            self._try_shape(dtype="float32", scale=1)
        while self.trace.shape.num_pages > 1:
            fewer = self.trace.shape.num_pages
            if not (self._try_shape(num_pages=fewer // 2) or self._try_shape(num_pages=fewer - 1)):
                break

    def _try_shape(self, **changes: Any) -> bool:
        try:
            shape = replace(self.trace.shape, **changes)
        except TraceError:
            return False
        return self._try(shape, self.trace.operations)

    def _simplify_numbers(self) -> None:
        """Lists get shorter, integers smaller, one after the other."""
        for i in range(len(self.trace.operations) - 1, -1, -1):
            again = True
            while again and self._in_time():
                again = any(
                    self._try(self.trace.shape, self._with(i, simpler))
                    for simpler in simpler_operations(self.trace.operations[i])
                )

    def _with(self, i: int, operation: Operation) -> list[Operation]:
        return [*self.trace.operations[:i], operation, *self.trace.operations[i + 1 :]]


def simpler_operations(operation: Operation) -> Iterator[Operation]:
    """An operation with one argument made simpler, in every way that is worth a try."""
    for path, value in _arguments(operation):
        if isinstance(value, list):
            candidates: list[Any] = [value[:i] + value[i + 1 :] for i in range(len(value))]
        else:
            candidates = [
                n for n in dict.fromkeys((0, 1, value // 2, value - 1)) if 0 <= n < value
            ]
        for candidate in candidates:
            changed = copy.deepcopy(operation)
            place = changed
            for step in path[:-1]:
                place = place[step]
            place[path[-1]] = candidate
            yield changed


def _arguments(operation: Operation) -> Iterator[tuple[tuple[int, ...], Any]]:
    for i, value in enumerate(operation[1:], 1):
        yield from _nested((i,), value)


def _nested(path: tuple[int, ...], value: Any) -> Iterator[tuple[tuple[int, ...], Any]]:
    # A pair of seed and length is no list that may get shorter.
    pair = isinstance(value, list) and len(path) > 1
    if not pair:
        yield path, value
    if isinstance(value, list):
        for i, inner in enumerate(value):
            yield from _nested((*path, i), inner)
