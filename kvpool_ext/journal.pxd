from libc.stdint cimport int32_t, uint32_t

from kvpool_ext.arena cimport NodeArena
from kvpool_ext.types cimport node_t, page_t, token_t


cdef enum Kind:
    CLEARED = 0
    STORED = 1
    REMOVED = 2


cdef enum:
    HEADER = 3           # words before a record's page ids: kind, number of pages, what is above
    DEFAULT_ROOT = -1    # what is above where no page is: name k is -2 - k


cdef class TreeJournal:
    cdef readonly Py_ssize_t num_pages      # page ids are below it
    cdef readonly Py_ssize_t page_size
    cdef readonly Py_ssize_t max_bytes      # buffered at most
    cdef readonly Py_ssize_t num_words      # buffered now, int32
    cdef readonly bint lost                 # changes are missing: only a listing of the tree helps
    cdef readonly Py_ssize_t num_losses     # how often that came about
    cdef int32_t *records
    cdef Py_ssize_t capacity                # words
    cdef int32_t *spare                     # of a buffer that came back, for the next one
    cdef Py_ssize_t spare_capacity
    cdef Py_ssize_t last_removed            # where the last record stands if it is of removals, else -1
    cdef uint32_t *stamps                   # a page id's arrivals and departures: odd while it is in the tree
    cdef list names                         # of the namespaces in the buffer

    cdef void on_stored(self, NodeArena arena, node_t n, dict root_keys) noexcept
    cdef void on_removed(self, const page_t *pages, Py_ssize_t num_pages) noexcept nogil
    cdef void on_cleared(self) noexcept nogil
    cdef void turn(self, const page_t *pages, Py_ssize_t num_pages) noexcept nogil
    cdef void lose(self) noexcept nogil
    cdef int32_t *room(self, Py_ssize_t num_words) noexcept nogil
    cdef Py_ssize_t words_of(self, Py_ssize_t num_pages) noexcept nogil
    cdef int32_t *write_stored(
        self, int32_t *to, int32_t above, const page_t *pages, const token_t *tokens, Py_ssize_t num_pages
    ) noexcept nogil
    cdef void begin_anew(self, list names) noexcept
    cdef object take(self)


cdef class RecordMemory:
    cdef TreeJournal journal
    cdef int32_t *records
    cdef Py_ssize_t capacity


cdef int32_t above_of(NodeArena arena, node_t parent, dict root_keys, list names) except? 0
