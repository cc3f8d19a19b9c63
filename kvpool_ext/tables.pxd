from libc.stdint cimport int32_t, int64_t


# Leading written lengths: a row per bound request, a column per layer.
cdef class LengthTable:
    cdef readonly Py_ssize_t num_columns
    cdef int32_t *lengths          # [capacity, num_columns]
    cdef Py_ssize_t capacity
    cdef Py_ssize_t num_rows       # rows ever handed out
    cdef list free_rows

    cdef int32_t *row(self, Py_ssize_t row) noexcept nogil


# Positions [starts[b], ends[b]) of each row of a step; offsets is their CSR.
cdef class StepWindow:
    cdef readonly Py_ssize_t batch_size
    cdef int64_t *starts           # [batch]
    cdef int64_t *ends             # [batch]
    cdef int64_t *offsets          # [batch + 1]
    cdef public object slots       # device array of its slots, made once
    cdef public object handed      # the same as the caller has it: on a host, a read-only view


cdef class StepRows:
    cdef readonly Py_ssize_t batch_size
    cdef readonly Py_ssize_t page_size
    cdef list leases
    cdef void **lease_ptrs         # borrowed from `leases`
    cdef int32_t *rows             # row of each lease in `lengths`
    cdef LengthTable lengths
    cdef int64_t *scratch          # [2 * batch + 1]
    cdef list windows              # the latest few, newest last

    cdef int read_indptr(self, object qo_indptr, Py_ssize_t num_tokens, int64_t *out) except -1
    cdef bint copy_int64(self, object values, Py_ssize_t n, int64_t *out) noexcept
    cdef int read_positions(self, object values, str name, int64_t *out) except -1
