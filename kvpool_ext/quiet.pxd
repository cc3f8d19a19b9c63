cdef class Quiet:
    pass
