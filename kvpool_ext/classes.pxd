from libc.stdint cimport int32_t, int64_t, uint32_t

from kvpool_ext.arena cimport IS_LINKED, Node, NodeArena
from kvpool_ext.types cimport NO_NODE, node_t


# The nodes of one priority and, where uses are counted, of one count: a list, the old end first.
ctypedef struct EvictionClass:
    int64_t priority
    int32_t uses           # of each node here; 1 where nobody counts
    int32_t head           # rank of the class of this priority that has one use
    node_t oldest
    node_t newest
    int32_t num_nodes      # members, on the list or not
    int32_t next_rank      # ring of all classes in use, by (priority, uses), from DETACHED_RANK to it
    int32_t prev_rank      # (also: next free entry)
    int32_t next_head      # ring of the heads alone
    int32_t prev_head


cdef enum:
    DETACHED_RANK = 0      # nodes that left the index: always the first to go


cdef class ClassRing(NodeArena):
    cdef EvictionClass *classes
    cdef int32_t class_capacity
    cdef int32_t num_classes       # entries ever handed out
    cdef int32_t first_free_class

    cdef int reserve_classes(self, Py_ssize_t capacity) except -1
    cdef int32_t ensure_class(self, int64_t priority) except -1
    cdef int32_t class_with(self, int32_t rank, int32_t uses) noexcept nogil
    cdef int32_t add_class(self, int32_t before, int64_t priority, int32_t uses, int32_t head) noexcept nogil
    cdef void join_class(self, node_t n, int32_t rank) noexcept nogil
    cdef void move_class(self, node_t n, int32_t rank) noexcept nogil
    cdef void leave_class(self, node_t n) noexcept nogil
    cdef void release_class(self, int32_t rank) noexcept nogil


# Inline, for they are most of what a lock or a match costs on a short path.

cdef inline void link_newest(Node *nodes, EvictionClass *classes, node_t n) noexcept nogil:
    cdef Node *node = &nodes[n]
    cdef EvictionClass *cls = &classes[node.rank]
    node.older = cls.newest
    node.newer = NO_NODE
    if cls.newest != NO_NODE:
        nodes[cls.newest].newer = n
    else:
        cls.oldest = n
    cls.newest = n
    node.flags |= IS_LINKED


cdef inline void link_newer_than(Node *nodes, EvictionClass *classes, node_t n, node_t child) noexcept nogil:
    cdef Node *node = &nodes[n]
    cdef EvictionClass *cls = &classes[node.rank]
    node.older = child
    node.newer = nodes[child].newer
    nodes[child].newer = n
    if node.newer != NO_NODE:
        nodes[node.newer].older = n
    else:
        cls.newest = n
    node.flags |= IS_LINKED


cdef inline void unlink(Node *nodes, EvictionClass *classes, node_t n) noexcept nogil:
    cdef Node *node = &nodes[n]
    cdef EvictionClass *cls = &classes[node.rank]
    if node.older != NO_NODE:
        nodes[node.older].newer = node.newer
    else:
        cls.oldest = node.newer
    if node.newer != NO_NODE:
        nodes[node.newer].older = node.older
    else:
        cls.newest = node.older
    node.flags &= ~<uint32_t>IS_LINKED
