"""PageCounts: one number a page, raised for what a lease matched and cleared for what is private to it."""
cimport numpy as cnp
from libc.stdint cimport int64_t
from libc.string cimport memcpy

from kvpool_ext.lease cimport PageLease
from kvpool_ext.memory cimport calloc, free

cnp.import_array()


cdef class PageCounts:
    """A count for each page of a pool, zero at first.

    Parameters
    ----------
    num_pages : int
        Pages of the pool.
    """

    cdef readonly Py_ssize_t num_pages
    cdef int64_t *counts

    def __cinit__(self, Py_ssize_t num_pages):
        if num_pages < 0:
            raise ValueError(f"num_pages must be at least 0, got {num_pages}")
        self.num_pages = num_pages
        self.counts = <int64_t *>calloc(num_pages + 1, sizeof(int64_t))
        if self.counts == NULL:
            raise MemoryError(f"no memory for the counts of {num_pages} pages")

    def __dealloc__(self):
        free(self.counts)

    def add_matched(self, PageLease lease not None):
        """Count each page once that `lease` found in the tree at bind."""
        cdef Py_ssize_t i
        for i in range(lease.matched_pages):
            self.counts[lease.page_ids[i]] += 1

    def clear_private(self, PageLease lease not None):
        """Set the counts of those pages of `lease` to zero that are not the tree's and may become so."""
        cdef Py_ssize_t i
        for i in range(lease.tree_pages, lease.num_pages):
            self.counts[lease.page_ids[i]] = 0

    def values(self):
        """All counts, a new int64 array ``[num_pages]``."""
        cdef cnp.npy_intp n = self.num_pages
        cdef cnp.ndarray out = cnp.PyArray_EMPTY(1, &n, cnp.NPY_INT64, 0)
        memcpy(cnp.PyArray_DATA(out), self.counts, n * sizeof(int64_t))
        return out
