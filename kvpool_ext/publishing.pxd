from kvpool_ext.lease cimport PageLease
from kvpool_ext.moves cimport LedgerMoves
from kvpool_ext.tree cimport Growth, NodeMemory, Walk
from kvpool_ext.types cimport node_t, page_t, token_t


# What another holder of a lineage gets when one of them publishes.
ctypedef struct Share:
    void *lease
    Py_ssize_t end             # of its pages that are the tree's then
    page_t *duplicates         # that replace its own; NULL if they stay
    NodeMemory upper           # for the split at `end`, if there is to be one


# A publication that only needs to be carried out: nothing of it can fail any more.
ctypedef struct Publication:
    Walk walk                  # from the lease's node along its tokens
    Py_ssize_t num_pages       # of the lease that will be the tree's
    Py_ssize_t cached          # of these, up to where the tree has its own
    Growth growth
    bint made_root
    page_t *duplicates         # that replace the lease's own; NULL if they stay
    Share *shares
    Py_ssize_t num_shares


cdef class LedgerPublishing(LedgerMoves):
    cdef object prepare(
        self, PageLease lease, const token_t *tokens, Py_ssize_t num_pages, bint ends, Publication *plan
    )
    cdef int prepare_shares(self, PageLease lease, Publication *plan) except -1
    cdef void drop(self, PageLease lease, Publication *plan) noexcept
    cdef void publish(self, PageLease lease, const token_t *tokens, Publication *plan) noexcept
    cdef void publish_shares(self, PageLease lease, Publication *plan) noexcept
    cdef int raise_path(self, PageLease lease, Py_ssize_t num_pages) except -1
