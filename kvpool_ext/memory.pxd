# Memory of the C library, for every file here: a test can refuse it in the debug build (`kvpool_ext.faults`). In the
# others CHECKED is the constant 0, and what the compiler leaves of each of these is the call.
from libc.stdlib cimport calloc as libc_calloc
from libc.stdlib cimport free
from libc.stdlib cimport malloc as libc_malloc
from libc.stdlib cimport realloc as libc_realloc

from kvpool_ext.faults cimport is_refused
from kvpool_ext.types cimport CHECKED


cdef inline bint refused() noexcept nogil:
    """Whether memory from elsewhere than the three below is to be refused."""
    return CHECKED and is_refused()


cdef inline void *malloc(size_t num_bytes) noexcept nogil:
    return NULL if refused() else libc_malloc(num_bytes)


cdef inline void *calloc(size_t num_elements, size_t num_bytes) noexcept nogil:
    return NULL if refused() else libc_calloc(num_elements, num_bytes)


cdef inline void *realloc(void *memory, size_t num_bytes) noexcept nogil:
    return NULL if refused() else libc_realloc(memory, num_bytes)
