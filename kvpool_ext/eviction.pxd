cimport cython
from libc.stdint cimport int32_t, uint64_t

from kvpool_ext.classes cimport ClassRing
from kvpool_ext.types cimport node_t


# In the order of EVICTION_POLICIES.
cdef enum Policy:
    LRU = 0
    FIFO = 1
    LFU = 2

cdef enum:
    MOST_USES = 65535      # counting ends here: pages used more often go by recency alone


@cython.final
cdef class EvictionOrder(ClassRing):
    cdef Policy policy
    cdef uint64_t num_entries      # nodes that entered a class so far; fifo only
    cdef node_t *waiting           # heap of the nodes that go before the lists of their class; fifo only
    cdef Py_ssize_t num_waiting
    cdef Py_ssize_t waiting_capacity

    # What the tree tells: of a path, by its deepest node ...
    cdef void on_match(self, node_t n) noexcept nogil
    cdef void on_bind(self, node_t n) noexcept nogil
    cdef void on_insert(self, node_t n, int32_t rank, bint is_new) noexcept nogil
    # ... and of one node.
    cdef void on_lock(self, node_t n) noexcept nogil
    cdef void on_unlock(self, node_t n) noexcept nogil
    cdef void on_split(self, node_t upper, node_t n) noexcept nogil
    cdef void on_detach(self, node_t n) noexcept nogil
    cdef void on_remove(self, node_t n) noexcept nogil
    cdef void on_childless(self, node_t n) noexcept nogil
    # What it asks.
    cdef node_t first_to_go(self, int32_t *rank) noexcept nogil

    cdef void refresh(self, node_t n, int32_t rank) noexcept nogil
    cdef void count_use(self, node_t n) noexcept nogil
    cdef bint rises_to(self, node_t n, int32_t rank) noexcept nogil
    cdef int32_t move_to(self, node_t n, int32_t rank) noexcept nogil
    cdef void take_off(self, node_t n) noexcept nogil
    cdef void enter(self, node_t n) noexcept nogil
    cdef node_t pass_by(self, int32_t rank) noexcept nogil
    cdef bint goes_before(self, node_t a, node_t b) noexcept nogil
    cdef void wait(self, node_t n) noexcept nogil
    cdef void stop_waiting(self, node_t n) noexcept nogil
    cdef void settle(self, Py_ssize_t place, node_t n) noexcept nogil


cdef Policy policy_of(object eviction) except *
cdef str name_of(Policy policy)
