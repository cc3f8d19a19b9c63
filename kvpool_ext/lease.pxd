from libc.stdint cimport int64_t, uint64_t

from kvpool_ext.runs cimport TokenRuns
from kvpool_ext.types cimport node_t, page_t, token_t


# The pages that one holder has over one token sequence, in order. Half-open, in pages:
#
#   [0, matched)           the tree's, found at bind; locked through `node`
#   [matched, tree)        the tree's since a checkpoint, but for the intervals in `duplicates`
#   [tree, shared)         held with forks of the same lineage, read-only
#   [tree or shared, num)  private
cdef class PageLease:
    cdef readonly object tag       # its number in the ledger, from 1 up and never used twice
    cdef readonly Py_ssize_t row   # of the ledger's `lengths`, while it is live
    cdef readonly object matched_len        # tokens found at an exclusive bind, None for others
    cdef readonly int64_t serial   # no two leases of a process have the same
    cdef TokenRuns runs            # where `known` is
    cdef TokenRuns id_runs         # where `page_ids` is
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
    cdef readonly Py_ssize_t prompt_len     # tokens told at bind, 0 for a blank lease
    # [num_duplicates, 2], start and end in pages: private copies of what the tree has too
    cdef page_t *duplicates
    cdef Py_ssize_t num_duplicates
    cdef dict lineage              # leases that may share pages with this one, in order, or None


cdef PageLease new_lease(Py_ssize_t num_pages, TokenRuns runs, TokenRuns id_runs)
