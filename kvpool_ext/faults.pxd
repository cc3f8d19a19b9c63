cdef bint is_refused() noexcept nogil
