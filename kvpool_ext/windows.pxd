cimport numpy as cnp
from libc.stdint cimport int64_t


# Positions [starts[b], ends[b]) of each row of a step; offsets is their CSR.
cdef class StepWindow:
    cdef readonly Py_ssize_t batch_size
    cdef int64_t *starts           # [batch]
    cdef int64_t *ends             # [batch]
    cdef int64_t *offsets          # [batch + 1]
    cdef public object slots       # device array of its slots, made once
    cdef public object handed      # the same as the caller has it: on a host, a read-only view


# The windows that a step was asked for lately.
cdef class RecentWindows:
    cdef Py_ssize_t batch_size
    cdef int64_t *scratch          # [3 * batch + 1]
    cdef list windows              # newest last

    cdef StepWindow find(self, object start_pos, object seqlen, object qo_indptr, Py_ssize_t num_tokens)


cdef int read_positions(object values, str name, Py_ssize_t n, int64_t *out) except -1
cdef cnp.ndarray new_int64(Py_ssize_t n)
cdef cnp.ndarray new_int32(Py_ssize_t n)
