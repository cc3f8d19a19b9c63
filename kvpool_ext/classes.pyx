"""Classes of nodes: which of them goes before which, as far as priorities and counts decide it.

A class is a list of nodes that share a priority and, under a policy that counts, the number of their uses. The classes
in use form one ring in rising order, that of the detached nodes first; the heads, one a priority, form a ring of their
own. So a class is found in O(priorities), the one of one use more in O(1), and both are left in O(1). What stands
where within a list is `eviction.pyx`'s part.
"""
cimport cython
from libc.stdint cimport INT32_MAX, int32_t, int64_t

from kvpool_ext.arena cimport NodeArena
from kvpool_ext.memory cimport free, realloc
from kvpool_ext.types cimport NO_NODE, node_t


@cython.no_gc
cdef class ClassRing(NodeArena):
    """The classes of one arena's nodes, and who is in which."""

    def __cinit__(self, *_):
        self.first_free_class = -1
        self.reserve_classes(4)
        # Comes before every priority and never dies, which also closes both rings.
        self.num_classes = 1
        self.classes[DETACHED_RANK] = EvictionClass(
            0, 1, DETACHED_RANK, NO_NODE, NO_NODE, 0, DETACHED_RANK, DETACHED_RANK, DETACHED_RANK, DETACHED_RANK
        )

    def __dealloc__(self):
        free(self.classes)

    cdef int reserve_classes(self, Py_ssize_t capacity) except -1:
        """Make room for `capacity` classes in all; MemoryError changes nothing."""
        cdef Py_ssize_t grown = max(capacity, 2 * <Py_ssize_t>self.class_capacity)
        cdef EvictionClass *classes = NULL
        if capacity <= self.class_capacity:
            return 0
        if grown <= INT32_MAX:
            classes = <EvictionClass *>realloc(self.classes, grown * sizeof(EvictionClass))
        if classes == NULL:
            raise MemoryError(f"no memory for {grown} lists of nodes")
        self.classes = classes
        self.class_capacity = <int32_t>grown
        return 0

    cdef int32_t ensure_class(self, int64_t priority) except -1:
        """The head of `priority`, made if there is none; it is dropped with the last node of its priority."""
        cdef int32_t rank = self.classes[DETACHED_RANK].next_head
        while rank != DETACHED_RANK and self.classes[rank].priority < priority:
            rank = self.classes[rank].next_head
        if rank != DETACHED_RANK and self.classes[rank].priority == priority:
            return rank
        if self.first_free_class < 0:
            self.reserve_classes(self.num_classes + 1)
        return self.add_class(self.classes[rank].prev_rank, priority, 1, -1)

    cdef int32_t class_with(self, int32_t rank, int32_t uses) noexcept nogil:
        """The class of the priority of `rank` that has `uses`, not fewer than `rank` has; made if there is none.

        O(classes between the two). There is room: a policy that counts reserved it.
        """
        cdef int32_t head = self.classes[rank].head, following
        while self.classes[rank].uses != uses:
            following = self.classes[rank].next_rank
            if self.classes[following].head != head or self.classes[following].uses > uses:
                return self.add_class(rank, self.classes[rank].priority, uses, head)
            rank = following
        return rank

    cdef int32_t add_class(self, int32_t before, int64_t priority, int32_t uses, int32_t head) noexcept nogil:
        """A class right behind `before` in the ring; with a `head` of -1 it is one itself."""
        cdef int32_t rank = self.first_free_class, after = self.classes[before].next_rank, last_head
        cdef EvictionClass *cls
        if rank >= 0:
            self.first_free_class = self.classes[rank].prev_rank
        else:
            rank = self.num_classes
            self.num_classes += 1
        cls = &self.classes[rank]
        cls[0] = EvictionClass(
            priority, uses, rank if head < 0 else head, NO_NODE, NO_NODE, 0, after, before, -1, -1
        )
        self.classes[before].next_rank = rank
        self.classes[after].prev_rank = rank
        if head < 0:
            last_head = self.classes[before].head
            cls.prev_head = last_head
            cls.next_head = self.classes[last_head].next_head
            self.classes[cls.next_head].prev_head = rank
            self.classes[last_head].next_head = rank
        return rank

    cdef void join_class(self, node_t n, int32_t rank) noexcept nogil:
        self.nodes[n].rank = rank
        self.classes[rank].num_nodes += 1

    cdef void move_class(self, node_t n, int32_t rank) noexcept nogil:
        """Out of one class and into another, which may be the same; on no list meanwhile."""
        self.classes[rank].num_nodes += 1
        self.leave_class(n)
        self.nodes[n].rank = rank

    cdef void leave_class(self, node_t n) noexcept nogil:
        cdef int32_t rank = self.nodes[n].rank
        self.classes[rank].num_nodes -= 1
        if self.classes[rank].num_nodes == 0:
            self.release_class(rank)

    cdef void release_class(self, int32_t rank) noexcept nogil:
        """Drop a class that has no node; a head stays until its priority has none.

        The entry keeps its `next_rank`: an eviction may stand on it.
        """
        cdef EvictionClass *cls = &self.classes[rank]
        cdef int32_t head = cls.head
        if cls.num_nodes > 0 or rank == DETACHED_RANK:
            return
        if head == rank:
            if self.classes[cls.next_rank].head == rank:
                return
            self.classes[cls.prev_head].next_head = cls.next_head
            self.classes[cls.next_head].prev_head = cls.prev_head
        self.classes[cls.prev_rank].next_rank = cls.next_rank
        self.classes[cls.next_rank].prev_rank = cls.prev_rank
        cls.prev_rank = self.first_free_class
        self.first_free_class = rank
        if head != rank:
            self.release_class(head)
