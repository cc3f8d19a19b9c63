from libc.stdint cimport int64_t

from kvpool_ext.lease cimport PageLease
from kvpool_ext.tables cimport StepRows


# What one row of the map holds: the first pages of one lease.
cdef struct RowNote:
    int64_t serial                 # of the lease
    Py_ssize_t num_pages           # leading pages that are there; 0 where nothing is known
    Py_ssize_t num_shrinks         # of the lease then: since another one, its ids may be others


cdef class PageMapRows:
    cdef readonly Py_ssize_t num_rows
    cdef readonly Py_ssize_t max_pages
    cdef RowNote *notes            # [num_rows]

    cdef Py_ssize_t num_known(self, Py_ssize_t row, PageLease lease) except -1
    cdef int pack_rows(
        self, StepRows step, const int64_t *lengths, const int64_t *starts, int64_t window_len, int64_t max_indices,
        object out,
    ) except -1
    cdef object past_capacity(self, PageLease lease, Py_ssize_t page_size, int64_t length, int64_t start, int64_t end)
