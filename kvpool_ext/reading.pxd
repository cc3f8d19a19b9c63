from kvpool_ext.tree cimport RadixTree
from kvpool_ext.types cimport node_t


cdef class TreeReading(RadixTree):
    cdef bint holds_pages(self, node_t n) noexcept
