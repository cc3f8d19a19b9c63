"""Threads that share the work of one kernel call; kernels release the GIL."""

import itertools
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

MAX_THREADS = 16
# More shares than threads: one that started late, or lost its CPU for a while, takes fewer.
SHARES_PER_THREAD = 4
# Rows of so many bytes are moved in several times what it takes to wake a thread.
MIN_BYTES_PER_THREAD = 1 << 20
MIN_BYTES_TO_SHARE = 2 * MIN_BYTES_PER_THREAD


class _Threads:
    """A pool of threads that starts with its first use and again after a fork."""

    def __init__(self) -> None:
        self._executor: ThreadPoolExecutor | None = None
        if hasattr(os, "register_at_fork"):
            # A child inherits the pool without its threads, and would wait for them forever.
            os.register_at_fork(after_in_child=self._forget)

    def _forget(self) -> None:
        self._executor = None

    def run(self, work: Callable[[int], None], num_shares: int, num_threads: int) -> None:
        """Do ``work(share)`` for every share, in the calling thread and in others.

        Each thread takes the next share when it is done with one. Nothing runs any more when this
        returns or raises: what is written to may be somebody else's afterwards.
        """
        numbers = itertools.count()

        def take_shares() -> None:
            while (share := next(numbers)) < num_shares:
                work(share)

        others: list[Future[None]] = []
        try:
            self._start(take_shares, min(num_threads, num_shares, MAX_THREADS) - 1, others)
            take_shares()
        finally:
            _settle(others)
        for other in others:
            if not other.cancelled():
                other.result()

    def _start(
        self, task: Callable[[], None], num_threads: int, started: list[Future[None]]
    ) -> None:
        if num_threads < 1:
            return
        if self._executor is None:
            self._executor = ThreadPoolExecutor(MAX_THREADS - 1, "kvpool-kernels")
        try:
            for _ in range(num_threads):
                started.append(self._executor.submit(task))
        except RuntimeError:
            # An interpreter on its way out starts no threads: the caller does the rest.
            return


def _settle(futures: list[Future[None]]) -> None:
    """Cancel what has not started, and wait for the rest, interrupts or not."""
    interrupt: BaseException | None = None
    running = [future for future in futures if not future.cancel()]
    while running:
        try:
            wait(running)
            running = []
        except BaseException as error:
            interrupt = error
    if interrupt is not None:
        raise interrupt


def available_cpus() -> int:
    """Return how many CPUs this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


_threads = _Threads()
run_shares = _threads.run


def run_rows(move: Callable[[slice], None], num_rows: int, num_bytes: int) -> None:
    """Move all rows, some in each call of `move`, on as many threads as pay off."""
    num_threads = min(available_cpus(), num_bytes // MIN_BYTES_PER_THREAD)
    num_shares = min(num_threads * SHARES_PER_THREAD, num_rows) if num_threads > 1 else 1

    def move_share(share: int) -> None:
        move(slice(num_rows * share // num_shares, num_rows * (share + 1) // num_shares))

    run_shares(move_share, num_shares, num_threads)


def share_rows(
    kernel: Callable[..., None],
    whole: tuple[Any, ...],
    by_row: tuple[Any, ...],
    settings: tuple[Any, ...],
    num_bytes: int,
) -> None:
    """Call ``kernel(*whole, *by_row, *settings)`` with slices of `by_row`, which cover all rows.

    It is here, and not in each function that calls it, because a variable that a function shares
    with an inner one costs every call of it, of one row too, some 20 ns.
    """
    run_rows(
        lambda rows: kernel(*whole, *(array[rows] for array in by_row), *settings),
        len(by_row[0]),
        num_bytes,
    )
