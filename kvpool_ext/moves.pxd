from libc.stdint cimport int16_t, int32_t, int64_t

from kvpool_ext.lease cimport PageLease
from kvpool_ext.lengths cimport LengthTable
from kvpool_ext.pages cimport PageAllocator
from kvpool_ext.radix cimport RadixCache
from kvpool_ext.tree cimport Walk
from kvpool_ext.types cimport node_t, page_t, token_t


cdef class LedgerMoves:
    cdef readonly PageAllocator allocator
    cdef readonly RadixCache tree
    cdef readonly Py_ssize_t page_size
    cdef readonly Py_ssize_t needed_pages   # private pages that the last short call wanted
    cdef readonly dict leases      # tag -> lease, in the order in which they were bound
    cdef readonly dict fetching    # taken page -> number of the prefetch that it waits for bytes of
    cdef readonly dict fetch_nodes  # number of a prefetch -> handle of the node that it has locked
    cdef readonly LengthTable lengths       # written lengths of the leases
    cdef readonly Py_ssize_t num_losses     # how often a lease ended or gave pages back: steps look here
    cdef readonly Py_ssize_t last_tag       # of the lease that was made last
    # Tokens since the ledger was made: of prompts bound with reuse, of these found, and newly cached by leases.
    cdef readonly int64_t prompt_tokens
    cdef readonly int64_t matched_tokens
    cdef readonly int64_t inserted_tokens
    cdef int32_t *holders          # leases that hold a page as shared, 0 for a single one; made at the first fork

    cdef int admit(self, PageLease lease, Py_ssize_t written) except -1
    cdef int enlist(self, PageLease lease) except -1
    cdef void start(self, PageLease lease, Py_ssize_t written) noexcept
    cdef void strike(self, PageLease lease) noexcept
    cdef int check_live(self, PageLease lease) except -1
    cdef int verify(self) except -1
    cdef void add_holder(self, page_t page) noexcept nogil
    cdef bint may_publish(self, PageLease lease) noexcept
    cdef Py_ssize_t free_or_evictable(self) noexcept nogil
    cdef Walk walk_prompt(self, object key, const token_t *tokens, Py_ssize_t num_tokens, bint reuse, page_t *out)
    cdef void claim(self, page_t *out, Py_ssize_t num_pages, int16_t cause, Py_ssize_t tag) noexcept
    cdef void drop_pages(self, PageLease lease, Py_ssize_t start, Py_ssize_t end) noexcept
    cdef int verify_tokens(self, PageLease lease, const token_t *tokens, Py_ssize_t num_tokens) except -1
    cdef int learn(self, PageLease lease, const token_t *tokens, Py_ssize_t num_tokens) except -1
    cdef node_t node_at(self, node_t n, Py_ssize_t *depth, Py_ssize_t num_pages) noexcept nogil
    cdef void let_go(self, PageLease lease) noexcept
