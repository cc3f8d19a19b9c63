from kvpool_ext.tree cimport RadixTree


cdef class RadixCache(RadixTree):
    pass
