"""Contenders that do the same work in turns, and the threads that they may use."""

import contextlib
import os
import statistics
import time
from dataclasses import dataclass

# Else torch's threads spin on their cores for a while after its turn, and the next one's threads
# find no core free.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

try:
    import torch
except ImportError:
    torch = None

FEWEST, MOST = 3, 60  # rounds


@dataclass
class Race:
    """Calls that do the same, `{contender: call}`; kvpool's is the first.

    `num_bytes` is what a copy of the same data would read, `repeat` the calls of one sample.
    """

    what: str
    dtype: str
    num_bytes: int
    calls: dict
    repeat: int = 1

    def run(self, budget):
        """Take turns for about `budget` seconds: `{contender: best, median, rounds}`."""
        calls = {name: call for name, call in self.calls.items() if call is not None}
        samples = {name: [] for name in calls}
        for call in calls.values():  # compiles kernels, maps memory
            call()
        end = time.perf_counter() + budget
        for rounds in range(MOST):
            if rounds >= FEWEST and time.perf_counter() > end:
                break
            for name, call in calls.items():
                samples[name].append(seconds_of(call, self.repeat))
        return {
            name: {"best": min(found), "median": statistics.median(found), "rounds": len(found)}
            for name, found in samples.items()
        }


def seconds_of(call, repeat):
    """Seconds a call, of `repeat` calls."""
    start = time.perf_counter()
    for _ in range(repeat):
        call()
    return (time.perf_counter() - start) / repeat


@contextlib.contextmanager
def on_threads(num_threads):
    """Let the calling thread use so many CPUs, and torch so many threads.

    kvpool takes as many threads as there are CPUs for the caller. NumPy's indexing has one; how
    many its matrix products use is up to its BLAS.
    """
    cpus = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(cpus)[:num_threads])
    if torch is not None:
        torch.set_num_threads(num_threads)
    try:
        yield
    finally:
        os.sched_setaffinity(0, cpus)


def as_torch(array):
    """The same memory as a tensor; bfloat16 is known to NumPy only by its bits."""
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view("int16")).view(torch.bfloat16)
    return torch.from_numpy(array)


def when_torch(call):
    """`call` where torch is installed, None elsewhere: a contender who is not there."""
    return call if torch is not None else None
