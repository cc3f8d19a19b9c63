from libc.stdint cimport int32_t, int64_t, uint64_t

from kvpool_ext.pages cimport PageAllocator
from kvpool_ext.radix cimport RadixCache, Walk
from kvpool_ext.types cimport node_t, page_t, token_t


# The pages that one holder has over one token sequence, in order. Half-open, in pages:
#
#   [0, matched)           the tree's, found at bind; locked through `node`
#   [matched, tree)        the tree's since a checkpoint, but for the intervals in `duplicates`
#   [tree, shared)         held with forks of the same lineage, read-only
#   [tree or shared, num)  private
cdef class PageLease:
    cdef public object tag         # the caller's name for this lease, in errors and pictures
    cdef page_t *page_ids
    cdef readonly Py_ssize_t num_pages
    cdef readonly Py_ssize_t matched_pages
    cdef readonly Py_ssize_t tree_pages     # depth of `node`
    cdef readonly Py_ssize_t shared_pages   # pages before this one are read-only
    cdef public Py_ssize_t entered_pages    # pages before this one hold no stale bits
    cdef readonly Py_ssize_t num_shrinks    # steps look whether pages that they remember may have gone
    cdef readonly bint live
    cdef readonly object extra_key
    cdef readonly int64_t priority
    cdef bint publishes            # bound while reuse was on
    cdef uint64_t epoch            # of the tree at bind: after a reset nothing is inserted
    cdef node_t node               # deepest locked node, NO_NODE where nothing is the tree's
    cdef token_t *known            # tokens from `matched_pages` on that bind or checkpoint told
    cdef readonly Py_ssize_t known_len      # tokens known from position 0 on
    cdef list duplicates           # [(start, end)] in pages: private copies of what the tree has too
    cdef dict lineage              # leases that may share pages with this one, in order, or None

    cdef bint is_read_only(self, Py_ssize_t page) noexcept nogil


cdef class PageLedger:
    cdef readonly PageAllocator allocator
    cdef readonly RadixCache tree
    cdef readonly Py_ssize_t page_size
    cdef readonly Py_ssize_t needed_pages   # private pages that the last short call wanted
    cdef readonly set leases
    cdef int32_t *holders          # leases that hold a page as shared, 0 for a single one; made at the first fork

    cdef int verify(self) except -1
    cdef void add_holder(self, page_t page) noexcept nogil
    cdef bint may_publish(self, PageLease lease) noexcept
    cdef Py_ssize_t free_or_evictable(self) noexcept nogil
    cdef Walk walk_prompt(self, object key, const token_t *tokens, Py_ssize_t num_tokens, bint reuse, page_t *out)
    cdef int claim(self, page_t *out, Py_ssize_t num_pages) except -1
    cdef void drop_pages(self, PageLease lease, Py_ssize_t start, Py_ssize_t end) noexcept
    cdef int verify_tokens(self, PageLease lease, const token_t *tokens, Py_ssize_t num_tokens) except -1
    cdef Py_ssize_t publish(
        self, PageLease lease, const token_t *tokens, Py_ssize_t num_pages, Walk *walk
    ) except -1
    cdef int raise_path(self, PageLease lease, Py_ssize_t num_pages) except -1
    cdef node_t node_at(self, node_t n, Py_ssize_t *depth, Py_ssize_t num_pages) noexcept nogil
    cdef int follow(self, PageLease other, PageLease lease, Py_ssize_t num_pages, node_t deepest, Py_ssize_t cached) except -1
    cdef int let_go(self, PageLease lease) except -1
