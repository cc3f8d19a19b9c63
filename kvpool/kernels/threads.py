"""Threads that share the work of one kernel call; kernels release the GIL."""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

MAX_THREADS = 16


class _Threads:
    """A pool of threads that starts with its first use and again after a fork."""

    def __init__(self) -> None:
        self._executor: ThreadPoolExecutor | None = None
        if hasattr(os, "register_at_fork"):
            # A child inherits the pool without its threads, and would wait for them forever.
            os.register_at_fork(after_in_child=self._forget)

    def _forget(self) -> None:
        self._executor = None

    def run(self, work: Callable[[int], None], num_shares: int) -> None:
        """Do ``work(share)`` for every share, the first one in the calling thread."""
        if num_shares > 1 and self._executor is None:
            self._executor = ThreadPoolExecutor(MAX_THREADS - 1, "kvpool-attention")
        executor = self._executor
        others = [executor.submit(work, share) for share in range(1, num_shares) if executor]
        work(0)
        for other in others:
            other.result()


def available_cpus() -> int:
    """Return how many CPUs this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


_threads = _Threads()
run_shares = _threads.run
