from libc.stdint cimport int16_t, int32_t, int64_t

from kvpool_ext.arena cimport NodeArena
from kvpool_ext.runs cimport TokenRuns
from kvpool_ext.types cimport node_t, token_t

cdef enum:
    HEAD = 7    # tokens that a record holds itself, see `TokenRuns.part`


cdef enum Cause:
    BY_CALL = 0      # `RadixCache.evict`
    BY_BIND = 1
    BY_EXTEND = 2
    BY_FORK = 3
    BY_ALLOC = 4


# A run of pages that eviction took from one node at once.
ctypedef struct Evicted:
    int64_t node           # handle of the node whose pages went
    int64_t above          # handle of what the run stood under: the parent, or `node` where only its tail went
    token_t *run           # its tokens behind those in `head`; owned, NULL for none
    int64_t evicted_pages  # that eviction had taken before
    int64_t when_ns        # monotonic
    int64_t request        # whose claim it was, 0 for none
    int32_t num_pages
    int16_t cause
    int16_t num_head
    token_t head[HEAD]


cdef Py_ssize_t pages_to_remember(object num_tokens, Py_ssize_t num_pages, Py_ssize_t page_size) except -1


cdef class EvictionHistory:
    cdef TokenRuns runs                     # where the runs are
    cdef Evicted *ring                      # the records, in a circle
    cdef Py_ssize_t ring_size               # grows up to `max_records`
    cdef dict dead_roots                    # handle of a root that was dropped -> (extra_key, evicted_pages then)
    cdef readonly Py_ssize_t page_size
    cdef readonly Py_ssize_t max_pages      # remembered at most
    cdef readonly Py_ssize_t max_records
    cdef readonly Py_ssize_t num_pages      # remembered now
    cdef readonly Py_ssize_t num_records
    cdef readonly Py_ssize_t num_forgotten  # records that had to go, since the last reset
    cdef readonly int64_t evicted_pages     # that eviction took, since the tree was made
    cdef readonly int64_t reset_ns          # when the tree was reset last, 0 for never
    cdef Py_ssize_t next_record             # where the next one goes
    cdef int64_t now_ns                     # of the claim at work, as the two below
    cdef int64_t request
    cdef int16_t cause

    cdef void begin(self, int16_t cause, int64_t request) noexcept nogil
    cdef void keep(self, NodeArena arena, node_t n, Py_ssize_t num_pages) noexcept nogil
    cdef Evicted *at(self, Py_ssize_t k) noexcept nogil
    cdef bint grow(self) noexcept nogil
    cdef void forget_oldest(self) noexcept nogil
    cdef void forget_all(self) noexcept nogil
    cdef void reset(self) noexcept
    cdef int bury_root(self, int64_t handle, object extra_key) except -1
    cdef Py_ssize_t common(self, Evicted *record, const token_t *tokens, Py_ssize_t num_pages) noexcept nogil
