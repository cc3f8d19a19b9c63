"""Timing of one call on a machine that others use too."""

import time

STOLEN = 20e-6  # seconds; below, it is the cost of the clocks
STRETCH = 200e-6  # seconds that a timed stretch should last
MOST_REPEATS = 200


def timed(call, repeat=1):
    """Seconds a call; what the processor spent on another process meanwhile is taken off."""
    used = time.thread_time()
    start = time.perf_counter()
    for _ in range(repeat):
        call()
    wall = time.perf_counter() - start
    used = time.thread_time() - used
    return (used if wall - used > STOLEN else wall) / repeat


def steady(call):
    """A sampler of a call that changes nothing, or undoes it: warm, repeated if it is short."""
    call()
    repeat = max(1, min(MOST_REPEATS, int(STRETCH / max(timed(call), 1e-9))))

    def sample():
        call()
        return timed(call, repeat)

    return sample
