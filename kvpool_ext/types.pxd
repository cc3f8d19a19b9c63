# The three integers of the tree, and what all files ask of the compiler, named once.
from libc.stdint cimport int32_t

ctypedef int32_t token_t    # a token id; any int32 value is legal
ctypedef int32_t page_t     # a page id, 0 .. num_pages - 1
ctypedef int32_t node_t     # an index into the node arena

cdef enum:
    NO_NODE = -1


cdef extern from *:
    """
    #include <stdint.h>
    #ifdef KVPOOL_DEBUG
    #define KVPOOL_CHECKED 1
    #else
    #define KVPOOL_CHECKED 0
    #endif
    #if defined(__GNUC__) || defined(__clang__)
    #define kvpool_prefetch(start, offset) __builtin_prefetch((const void *)((uintptr_t)(start) + (uintptr_t)(offset)))
    #else
    #define kvpool_prefetch(start, offset) ((void)(start))
    #endif
    """
    # True in the debug build, where the verbs check their own structure after each change.
    const bint CHECKED "KVPOOL_CHECKED"
    # Ask for the cache line `offset` bytes from `start`; any sum is legal, from NULL too, which no pointer may be.
    void prefetch "kvpool_prefetch"(const void *start, Py_ssize_t offset) noexcept nogil
