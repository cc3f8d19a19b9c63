"""The machine's own floor: compare the hit, copy the new tokens, write the page ids. No books.

Its buffers are touched first, and it is told its hits: those of the exact LRU rule in its cell.
"""

import ctypes

import numpy as np

from bench.replay.contender import Contender


def c_function(name):
    """`memcmp`, `memmove` or `memset` of the C library, as one call from Python."""
    function = getattr(ctypes.CDLL(None), name)
    function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
    function.restype = ctypes.c_int if name == "memcmp" else ctypes.c_void_p
    return function


MEMCMP, MEMMOVE = c_function("memcmp"), c_function("memmove")


class Floor(Contender):
    """Memory traffic of one request: three calls into C, whose 0.4 us each are in the figures."""

    name = "floor"
    exact_lru = True
    notes = (
        "floor: memcmp of the hit with a copy made up to a turn earlier (match), write of the "
        "page ids (alloc), copy of the new tokens into a ring of the capacity (finish); three "
        "ctypes calls",
    )

    def __init__(self, capacity, page_size):
        super().__init__(capacity, page_size)
        self.ring = np.ones(capacity, np.int32)
        self.page_ids = np.arange(capacity // page_size + 1, dtype=np.int32)
        self.row = np.ones_like(self.page_ids)
        self.place = 0
        self.copies = {}  # request -> its hit, copied before the turn

    def before_turn(self, trace, hits, requests):
        for i in requests:
            self.copies[i] = trace.tokens(i)[: hits[i]].copy()

    def prepare(self, job):
        job.copy = self.copies.pop(job.index)
        job.hit = len(job.copy)
        job.from_, job.to = job.tokens.ctypes.data, job.copy.ctypes.data
        job.new_bytes = 4 * (job.num_tokens - job.hit)
        if self.place + job.num_tokens > self.capacity:
            self.place = 0
        job.ring = self.ring.ctypes.data + 4 * self.place
        self.place += job.num_tokens - job.hit
        job.ids = self.row.ctypes.data, self.page_ids.ctypes.data
        job.id_bytes = 4 * -(-job.num_tokens // self.page_size)

    def match(self, job):
        assert MEMCMP(job.from_, job.to, 4 * job.hit) == 0

    def alloc(self, job):
        MEMMOVE(*job.ids, job.id_bytes)

    def finish(self, job):
        MEMMOVE(job.ring, job.from_ + 4 * job.hit, job.new_bytes)

    def cached_tokens(self):
        return self.capacity
