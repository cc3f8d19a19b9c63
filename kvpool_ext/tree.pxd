from libc.stdint cimport int32_t, int64_t, uint64_t

from kvpool_ext.arena cimport Node
from kvpool_ext.eviction cimport EvictionOrder
from kvpool_ext.gate cimport Gate
from kvpool_ext.history cimport EvictionHistory
from kvpool_ext.journal cimport TreeJournal
from kvpool_ext.pages cimport PageAllocator
from kvpool_ext.types cimport node_t, page_t, token_t


# Where a walk down the tree ended.
ctypedef struct Walk:
    node_t node                # deepest node that matched, at least its first page (or the start)
    Py_ssize_t node_pages      # how many of its pages match
    Py_ssize_t num_pages       # matched below the start, in all
    Py_ssize_t unlocked_pages  # of these, evictable now


# Memory for one node, taken ahead of it.
ctypedef struct NodeMemory:
    token_t *tokens
    page_t *pages


# What an attach needs, taken ahead of it.
ctypedef struct Growth:
    NodeMemory leaf            # for the new pages
    NodeMemory upper           # for the upper half of the node that the walk ended inside of
    token_t **own_run          # of the caller, holds the new tokens already; or NULL
    int32_t rank               # of the class, -1 for none


cdef class RadixTree:
    cdef readonly Py_ssize_t page_size
    cdef readonly str eviction
    cdef EvictionOrder arena       # the nodes, and in which order they go
    cdef readonly EvictionHistory history     # None: nothing is remembered
    cdef readonly TreeJournal journal         # None: nobody follows
    cdef readonly Gate gate        # of the pool that owns this tree, or its own: `RadixCache` passes through it
    cdef PageAllocator allocator   # of the pool that owns this tree, None for a tree on its own
    cdef dict roots                # extra_key -> root
    cdef dict root_keys            # root -> extra_key
    cdef dict user_locks           # node -> locks taken by inc_lock_ref
    cdef Py_ssize_t num_roots
    cdef node_t default_root
    cdef node_t pending_root       # roots that lost their last child, chained by `newer`
    cdef Py_ssize_t evictable_pages
    cdef Py_ssize_t protected_pages
    cdef Py_ssize_t orphan_pages   # evictable pages of detached nodes
    cdef readonly Py_ssize_t evicted_pages    # pages that eviction took so far
    cdef readonly uint64_t epoch   # number of resets
    cdef bint busy                 # a verb runs without the GIL

    cdef int enter(self) except -1
    cdef int verify(self) except -1
    cdef node_t root_of(self, object extra_key) except? -2
    cdef node_t ensure_root(self, object extra_key) except? -2
    cdef void forget_root(self, object extra_key) noexcept
    cdef Walk walk(self, node_t start, const token_t *tokens, Py_ssize_t max_pages, page_t *out) noexcept nogil
    cdef bint ends_inside(self, Walk *walk) noexcept nogil
    cdef int take_memory(self, Py_ssize_t num_pages, NodeMemory *memory, bint for_tokens) except -1
    cdef void give_memory(self, NodeMemory *memory) noexcept
    cdef int prepare_split(self, Py_ssize_t num_upper, NodeMemory *memory) except -1
    cdef node_t split(self, node_t n, Py_ssize_t num_upper, NodeMemory *memory) noexcept
    cdef int prepare_growth(
        self, Walk *walk, Py_ssize_t num_new, int64_t priority, token_t **own_run, Growth *growth
    ) except -1
    cdef void drop_growth(self, Growth *growth) noexcept
    cdef int64_t handle_after(self, Walk *walk, Py_ssize_t num_new) noexcept nogil
    cdef node_t attach(
        self, Walk *walk, const token_t *tokens, const page_t *pages, Py_ssize_t num_new, Growth *growth
    ) noexcept
    cdef void lock_path(self, node_t n, node_t stop) noexcept nogil
    cdef void unlock_path(self, node_t n) noexcept nogil
    cdef Py_ssize_t evict_into(self, page_t *out, Py_ssize_t num_pages) noexcept nogil
    cdef void remove_leaf(self, node_t n) noexcept nogil
    cdef list named_roots(self)
    cdef Py_ssize_t detach_all(self, page_t *out, list named_roots) noexcept
    cdef void drop_pending_roots(self) noexcept
    cdef bint bury(self, node_t root) noexcept
    cdef void free_orphans(self) noexcept
    cdef void trim_runs(self, Node *node) noexcept nogil


cdef int64_t checked_priority(object priority) except? -1
