from kvpool_ext.lease cimport PageLease
from kvpool_ext.publishing cimport LedgerPublishing
from kvpool_ext.tree cimport NodeMemory, Walk
from kvpool_ext.types cimport token_t


cdef class LedgerBinding(LedgerPublishing):
    cdef void hold(self, PageLease lease, Walk *walk, NodeMemory *upper, const token_t *tokens) noexcept
    cdef void release_all(self, list others) noexcept
    cdef Py_ssize_t fetch_room(self, Walk *walk) except -1
