from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t

from kvpool_ext.runs cimport TokenRuns
from kvpool_ext.types cimport node_t, page_t, token_t


# One run of whole pages. A cache line, so that a walk takes one miss a node before it compares tokens.
ctypedef struct Node:
    token_t *tokens        # owned run, num_pages * page_size tokens
    page_t *pages          # owned ids, num_pages of them
    node_t parent          # NO_NODE for a root
    int32_t num_pages      # 0 for a root
    int32_t lock_ref       # holders whose path passes through here
    int32_t num_children
    node_t older           # neighbours on the list of its class (also: place in the heap of the waiting)
    node_t newer           # (also: next pending root)
    node_t next_in_bucket  # next node with the same hash bucket (also: next free node)
    uint32_t key_hash      # of (parent, first page)
    int32_t rank           # index of its class
    uint32_t generation    # of the handle; odd while the node lives
    uint32_t entry_low     # when it entered its class, under fifo, as `entry_of` says it: 48 bits never run out
    uint32_t flags         # of NodeFlag; the upper half is the upper part of its entry


cdef enum NodeFlag:
    IS_ROOT = 1      # stands for a namespace: no pages, never locked, never evicted
    IS_DETACHED = 2  # out of the index since a reset, lives until its last unlock
    IS_LINKED = 4    # on the list of its class
    IS_PENDING = 8   # a root without children that waits to be dropped
    IS_WAITING = 16  # fifo: eviction passed it when it could not go yet, and takes it first now


cdef inline uint64_t entry_of(const Node *node) noexcept nogil:
    return <uint64_t>(node.flags >> 16) << 32 | node.entry_low


cdef inline void set_entry(Node *node, uint64_t entry) noexcept nogil:
    node.flags = node.flags & 0xFFFF | <uint32_t>(entry >> 32) << 16
    node.entry_low = <uint32_t>entry


cdef class NodeArena:
    cdef Py_ssize_t page_size
    cdef Node *nodes
    cdef node_t capacity
    cdef node_t num_used           # nodes ever handed out
    cdef node_t first_free
    cdef readonly Py_ssize_t num_live
    cdef TokenRuns runs            # where the tokens of the nodes are
    cdef TokenRuns id_runs         # where their page ids are: short runs, that would lie between the long ones
    cdef readonly bytes hash_key   # random, drawn with the arena
    cdef const uint64_t *fold_keys  # its first three words of 64 bits
    cdef const uint32_t *word_keys  # the rest of it, page_size + 2 words of 32 bits
    cdef node_t *buckets
    cdef uint32_t bucket_mask

    cdef int reserve(self, Py_ssize_t extra) except -1
    cdef node_t new_node(self) noexcept nogil
    cdef void drop_node(self, node_t n) noexcept nogil
    cdef int64_t handle_of(self, node_t n) noexcept nogil
    cdef int64_t next_handle(self, Py_ssize_t k) noexcept nogil
    cdef node_t resolve(self, object handle) except? -2

    cdef uint32_t hash_page(self, node_t parent, const token_t *tokens) noexcept nogil
    cdef node_t find_child(self, node_t parent, const token_t *tokens) noexcept nogil
    cdef void index_node(self, node_t n) noexcept nogil
    cdef void unindex_node(self, node_t n) noexcept nogil
    cdef void clear_index(self) noexcept nogil

    cdef void expect(self, node_t n) noexcept nogil
