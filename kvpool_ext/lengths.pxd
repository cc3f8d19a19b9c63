from libc.stdint cimport int32_t


# Leading written lengths: a row per bound request, a column per layer.
cdef class LengthTable:
    cdef readonly Py_ssize_t num_columns
    cdef int32_t *lengths          # [capacity, num_columns]
    cdef Py_ssize_t capacity
    cdef Py_ssize_t num_rows       # rows ever handed out
    cdef int32_t *free_rows        # [capacity], the last is handed out next
    cdef Py_ssize_t num_free

    cdef int32_t *row(self, Py_ssize_t row) noexcept nogil
    cdef int reserve(self, Py_ssize_t extra) except -1
    cdef Py_ssize_t take(self, Py_ssize_t length) noexcept
    cpdef Py_ssize_t add(self, Py_ssize_t length) except -1
    cpdef void remove(self, Py_ssize_t row) noexcept
    cpdef Py_ssize_t minimum(self, Py_ssize_t row) noexcept
    cpdef void raise_to(self, Py_ssize_t row, Py_ssize_t length) noexcept
    cpdef void cap(self, Py_ssize_t row, Py_ssize_t length) noexcept
