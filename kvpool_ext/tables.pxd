from libc.stdint cimport int32_t, int64_t

from kvpool_ext.lengths cimport LengthTable
from kvpool_ext.windows cimport RecentWindows, StepWindow


cdef class StepRows:
    cdef readonly Py_ssize_t batch_size
    cdef readonly Py_ssize_t page_size
    cdef list leases
    cdef void **lease_ptrs         # borrowed from `leases`
    cdef int32_t *rows             # row of each lease in `lengths`
    cdef LengthTable lengths
    cdef RecentWindows windows

    cdef void raise_column(self, Py_ssize_t b, Py_ssize_t column, StepWindow window) noexcept nogil
