cdef class Quiet:
    cdef bint was_enabled
