from libc.stdint cimport uint8_t

from kvpool_ext.types cimport page_t


cdef class PageAllocator:
    cdef readonly Py_ssize_t num_pages
    cdef page_t *stack             # free pages that were used before, the top is handed out first
    cdef Py_ssize_t stack_size
    cdef Py_ssize_t stack_height   # up to where its memory was touched and not given back
    cdef page_t next_unused        # every page from here on is free and was never handed out
    cdef uint8_t *taken            # 1 for pages handed out by `take` and not given back
    cdef readonly Py_ssize_t num_taken

    # The moves below trust their caller and mark nothing: the owner of a page that the ledger moves
    # follows from the tree and the leases.
    cdef Py_ssize_t c_num_free(self) noexcept nogil
    cdef void pop(self, page_t *out, Py_ssize_t n) noexcept nogil
    cdef void push(self, const page_t *pages, Py_ssize_t n) noexcept nogil
    cdef void mark(self, const page_t *pages, Py_ssize_t n) noexcept nogil
    cdef Py_ssize_t claim_marks(self, const page_t *pages, Py_ssize_t n) noexcept nogil
    cdef bint claim_run(self, page_t first, Py_ssize_t n) noexcept nogil
    cdef bint claim_piece(self, const page_t *pages, Py_ssize_t n) noexcept nogil
