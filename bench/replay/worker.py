"""One contender in a process of its own: the timed loop, and what is read off it at the end."""

import ctypes
import gc
import os
import time
import traceback

import numpy as np

from bench.replay.contender import Job, contender_class
from bench.replay.trace import BIND

PHASES = ("match", "lock", "alloc", "prefill", "finish")


class Driver:
    """Leads requests through a contender and writes down the seconds of each phase.

    On a busy machine another process may run in the middle of a phase, for milliseconds. The clock
    of this thread's own processor time, read around the phases, tells; what it lacks is taken off
    the longest of them, and `preempted` counts the requests to which that happened.
    """

    STOLEN = 20e-6  # seconds; below, it is the cost of the clocks

    def __init__(self, contender, trace):
        self.contender, self.trace = contender, trace
        self.seconds = np.zeros((len(trace), len(PHASES)))
        self.hits = np.zeros(len(trace), np.int64)
        self.preempted = 0
        self.jobs = {}

    def drive(self, events):
        """Run a stretch of events."""
        for kind, i in events.tolist():
            if kind == BIND:
                job = Job(i, self.trace.tokens(i), int(self.trace.prompt_lens[i]))
                self.contender.prepare(job)
                self.seconds[i, :4] = self.bind(job)
                self.jobs[i] = job
            else:
                job = self.jobs.pop(i)
                self.seconds[i, 4:] = self.finish(job)
                self.hits[i] = job.hit

    def bind(self, job):
        contender, clock = self.contender, time.perf_counter
        used = time.thread_time()
        start = clock()
        contender.match(job)
        matched = clock()
        contender.lock(job)
        locked = clock()
        contender.alloc(job)
        bound = clock()
        contender.prefill(job)
        end = clock()
        used = time.thread_time() - used
        phases = [matched - start, locked - matched, bound - locked, end - bound]
        return self.without_theft(phases, end - start - used)

    def finish(self, job):
        used = time.thread_time()
        start = time.perf_counter()
        self.contender.finish(job)
        end = time.perf_counter()
        used = time.thread_time() - used
        return self.without_theft([end - start], end - start - used)

    def without_theft(self, phases, stolen):
        """The phases, less what the processor spent on others."""
        if stolen > self.STOLEN:
            longest = phases.index(max(phases))
            phases[longest] = max(0.0, phases[longest] - stolen)
            self.preempted += 1
        return phases


def serve(connection, name, trace, events, hits, capacity, page_size, core):
    """Answer turns ``(start, stop)`` of the events, then None with all there is to say."""
    try:
        if core is not None:
            os.sched_setaffinity(0, {core})
        kind = contender_class(name)
        before = private_bytes()
        start = time.perf_counter()
        contender = kind(capacity, page_size)
        made = time.perf_counter() - start
        driver = Driver(contender, trace)
        # As servers do once they are up, so that a collection looks at young objects.
        gc.collect()
        gc.freeze()
        connection.send({"made_s": made})
        while (turn := connection.recv()) is not None:
            stretch = events[slice(*turn)]
            contender.before_turn(trace, hits, stretch[stretch[:, 0] == BIND, 1].tolist())
            driver.drive(stretch)
            connection.send(None)
        grown = private_bytes() - before - contender.other_bytes()
        connection.send(
            {
                "seconds": driver.seconds,
                "hits": driver.hits,
                "preempted": driver.preempted,
                "grown_bytes": grown - driver.seconds.nbytes - driver.hits.nbytes,
                "cached_tokens": int(contender.cached_tokens()),
                "publishes": kind.publishes,
                "exact_lru": kind.exact_lru,
                "versions": kind.versions(),
                "notes": kind.notes,
            }
        )
    except BaseException:
        connection.send({"error": traceback.format_exc()})
        raise


def private_bytes():
    """Written memory that is this process's alone, after malloc gave back what it could."""
    gc.collect()
    try:
        ctypes.CDLL(None).malloc_trim(0)
        with open("/proc/self/smaps_rollup") as file:
            lines = [line.split() for line in file]
    except (OSError, AttributeError):  # not Linux, or not glibc
        return 0
    return sum(int(line[1]) * 1024 for line in lines if line[0] == "Private_Dirty:")
