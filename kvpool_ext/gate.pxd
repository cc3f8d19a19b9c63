cdef class Gate:
    cdef object error
    cdef str what
    cdef unsigned long owner       # thread of the call that runs, or ran last
    cdef Py_ssize_t depth          # calls that run, each inside the one before
    cdef readonly Py_ssize_t num_calls    # outermost calls so far
    cdef readonly bint closed
    cdef tuple wanted              # what readers wait for, None: nobody waits
    cdef list answers              # of one moment
    cdef Py_ssize_t num_answers    # moments at which readers were answered

    cdef int c_enter(self) except -1
    cdef void c_leave(self) noexcept
    cdef void answer(self) noexcept
