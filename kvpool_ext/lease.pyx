"""PageLease: the pages of one holder, from bind to finish. Its intervals are drawn in `lease.pxd`."""
cimport cython
from libc.stdint cimport int64_t
from libc.string cimport memcpy

import numpy as np

cimport numpy as cnp

from kvpool_ext.runs cimport TokenRuns
from kvpool_ext.types cimport NO_NODE, page_t

cnp.import_array()


@cython.no_gc_clear  # the memory of its runs outlives it
cdef class PageLease:
    """The pages that one holder has over one token sequence; made by `PageLedger` only."""

    def __dealloc__(self):
        if self.runs is not None:
            self.id_runs.give(self.page_ids)
            self.id_runs.give(self.duplicates)
            self.runs.give(self.known)

    def pages(self):
        """Page ids in order, a new int32 array ``[num_pages]``."""
        cdef cnp.npy_intp n = self.num_pages
        cdef cnp.ndarray out = cnp.PyArray_EMPTY(1, &n, cnp.NPY_INT32, 0)
        memcpy(cnp.PyArray_DATA(out), self.page_ids, n * sizeof(page_t))
        return out

    def private_pages(self):
        """Ids of the pages that are not the tree's, int32; a page shared with forks is among them."""
        pages = self.pages()
        parts = [
            pages[self.duplicates[2 * i]:self.duplicates[2 * i + 1]] for i in range(self.num_duplicates)
        ]
        return np.concatenate([*parts, pages[self.tree_pages:]])


cdef int64_t num_leases = 0


cdef PageLease new_lease(Py_ssize_t num_pages, TokenRuns runs, TokenRuns id_runs):
    global num_leases
    cdef PageLease lease = PageLease.__new__(PageLease)
    lease.runs = runs
    lease.id_runs = id_runs
    lease.page_ids = <page_t *>id_runs.take(num_pages)
    if lease.page_ids == NULL:
        raise MemoryError(f"no memory for {num_pages} page ids")
    num_leases += 1
    lease.serial = num_leases
    lease.num_pages = num_pages
    lease.node = NO_NODE
    return lease
