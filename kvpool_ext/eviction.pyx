"""Eviction policies: where a node is linked when something happens to it, and which node goes next.

The tree tells what happens (`on_match`, `on_insert`, ...) and asks one thing (`first_to_go`). What a policy decides is
this table, in words of the list of the node's class; a class is a priority and, under lfu, a number of uses.

====================  ==========================  ==========================  ==========================
a node                lru                         fifo                        lfu
====================  ==========================  ==========================  ==========================
is new                newest                      newest                      newest, of one use
rises in priority     newest                      newest                      newest, uses kept
is matched, bound     newest                      stays                       newest, of one use more
is inserted again     newest                      stays                       newest
is locked first       off the list                stays                       off the list
is unlocked last      newest                      stays                       newest
is split              upper half right behind the lower one, with all that it has
====================  ==========================  ==========================  ==========================

Every access covers a path from the root, which is linked bottom up, so under lru and lfu children stand before their
parents: the old end of the lowest class is an unlocked leaf, and nothing is ever searched.

A *use* is a look-up: `match_prefix`, or the match of a bind. An insert is none, for it follows the look-up of the same
prompt and starts where that ended. As look-ups start at the root, a node has at least the uses of its children. Counts
never fade, and stop at 65,535.

Under fifo a node keeps its place, also while it cannot go, locked or with children. Eviction that meets such a node at
the old end *passes* it: off the list. Once it can go, it waits in a heap by order of entry, ahead of the list of its
class, where everything came later. So a lock costs nothing, an evicted page O(1) amortised (a node is passed once for
each time that it was linked or waited), and a node that was passed O(log w) more when it can go, w being those that
wait already: leaves that were let go after eviction had passed them, and have not gone yet.

Nodes that a reset detached are no longer cached: they go first, in the order of their last unlocks, by any policy.
"""
cimport cython
from libc.stdint cimport int32_t, uint32_t

from kvpool_ext.arena cimport (
    IS_DETACHED,
    IS_LINKED,
    IS_ROOT,
    IS_WAITING,
    Node,
    NodeArena,
    entry_of,
    set_entry,
)
from kvpool_ext.classes cimport (
    DETACHED_RANK,
    ClassRing,
    link_newer_than,
    link_newest,
    unlink,
)
from kvpool_ext.memory cimport free, realloc
from kvpool_ext.types cimport NO_NODE, node_t

EVICTION_POLICIES = ("lru", "fifo", "lfu")


def check_eviction(eviction):
    """`eviction` if it names a policy; else ValueError with those that there are, or TypeError."""
    return name_of(policy_of(eviction))


cdef str name_of(Policy policy):
    return EVICTION_POLICIES[<int>policy]


cdef Policy policy_of(object eviction) except *:
    if not isinstance(eviction, str):
        raise TypeError(f"eviction must be a str, got {type(eviction).__name__}")
    if eviction not in EVICTION_POLICIES:
        names = ", ".join(map(repr, EVICTION_POLICIES))
        raise ValueError(f"eviction must be one of {names}, got {eviction!r}")
    return <Policy><int>EVICTION_POLICIES.index(eviction)


@cython.final  # so that its methods call each other directly
@cython.no_gc
cdef class EvictionOrder(ClassRing):
    """The nodes of one tree, and in which order they go; used by `RadixCache` only."""

    def __cinit__(self, page_size, num_tokens=0, num_remembered=0, eviction="lru"):
        self.policy = policy_of(eviction)
        self.reserve(0)

    def __dealloc__(self):
        free(self.waiting)

    cdef int reserve(self, Py_ssize_t extra) except -1:
        """As `NodeArena.reserve`, and memory for what a policy needs where nothing may fail."""
        cdef node_t *waiting
        NodeArena.reserve(self, extra)
        if self.policy == LFU:
            # Each node in a class of its own, each class with a head of its own, the detached, and one to move to.
            # Address space, mostly: what no class ever used is never touched.
            self.reserve_classes(2 * <Py_ssize_t>self.capacity + 2)
        elif self.policy == FIFO and self.waiting_capacity < self.capacity:
            waiting = <node_t *>realloc(self.waiting, self.capacity * sizeof(node_t))
            if waiting == NULL:
                raise MemoryError(f"no memory for {self.capacity} nodes that wait for eviction")
            self.waiting = waiting
            self.waiting_capacity = self.capacity
        return 0

    # ---- what happens to a path

    cdef void on_match(self, node_t n) noexcept nogil:
        """A look-up found the path to `n`."""
        if self.policy == LRU:
            self.refresh(n, -1)
        elif self.policy == LFU:
            self.count_use(n)

    cdef void on_bind(self, node_t n) noexcept nogil:
        """As `on_match`, for a path that is locked next: where it stands is decided at its unlock."""
        if self.policy == LFU:
            self.count_use(n)

    cdef void on_insert(self, node_t n, int32_t rank, bint is_new) noexcept nogil:
        """The path to `n` was inserted in the class `rank`, a head; with `is_new`, `n` is in it already, on no list."""
        if self.policy != FIFO:
            self.refresh(n, rank)
            return
        if is_new:
            self.enter(n)
            n = self.nodes[n].parent
        # What does not rise has only ancestors that do not.
        while not self.nodes[n].flags & IS_ROOT and self.rises_to(n, rank):
            self.take_off(n)
            self.move_to(n, rank)
            self.enter(n)
            n = self.nodes[n].parent

    # ---- what happens to a node

    cdef void on_lock(self, node_t n) noexcept nogil:
        """`n` has its first holder."""
        if self.policy != FIFO or self.nodes[n].flags & IS_DETACHED:
            unlink(self.nodes, self.classes, n)

    cdef void on_unlock(self, node_t n) noexcept nogil:
        """`n` has no holder any more; its child on the path was told before."""
        if self.policy != FIFO or self.nodes[n].flags & IS_DETACHED:
            link_newest(self.nodes, self.classes, n)
        elif self.nodes[n].num_children == 0 and not self.nodes[n].flags & (IS_LINKED | IS_WAITING):
            self.wait(n)

    cdef void on_split(self, node_t upper, node_t n) noexcept nogil:
        """`upper` has the head of what `n` had, and is its parent now."""
        self.join_class(upper, self.nodes[n].rank)
        set_entry(&self.nodes[upper], entry_of(&self.nodes[n]))
        # Where `n` was passed, `upper` was as well: it has a child.
        if self.nodes[n].flags & IS_LINKED:
            link_newer_than(self.nodes, self.classes, upper, n)

    cdef void on_detach(self, node_t n) noexcept nogil:
        """`n`, which somebody holds, has left the index."""
        self.take_off(n)
        self.leave_class(n)
        self.join_class(n, DETACHED_RANK)
        self.nodes[n].flags |= IS_DETACHED

    cdef void on_remove(self, node_t n) noexcept nogil:
        """`n` is about to go."""
        self.take_off(n)
        self.leave_class(n)

    cdef void on_childless(self, node_t n) noexcept nogil:
        """The last child of `n` is gone. A reset removes parents too, and then tells of the dead."""
        cdef Node *node = &self.nodes[n]
        if (
            self.policy == FIFO
            and node.lock_ref == 0
            and node.generation & 1
            and not node.flags & (IS_LINKED | IS_WAITING | IS_DETACHED | IS_ROOT)
        ):
            self.wait(n)

    # ---- which goes next

    cdef node_t first_to_go(self, int32_t *rank) noexcept nogil:
        """The node whose tail page goes next, or NO_NODE; `rank` moves from DETACHED_RANK to its class.

        Besides, O(classes whose nodes are all locked) a call.
        """
        cdef node_t n
        while True:
            n = self.classes[rank[0]].oldest if self.policy != FIFO else self.pass_by(rank[0])
            if n != NO_NODE:
                return n
            rank[0] = self.classes[rank[0]].next_rank
            if rank[0] == DETACHED_RANK:
                return NO_NODE

    # ---- lru and lfu

    cdef void refresh(self, node_t n, int32_t rank) noexcept nogil:
        """Make the path to `n` the most recent, child before parent, and raise it to the head `rank` (-1: leave)."""
        cdef Node *node
        cdef bint rises
        while not self.nodes[n].flags & IS_ROOT:
            node = &self.nodes[n]
            rises = rank >= 0 and self.rises_to(n, rank)
            if node.lock_ref > 0:
                # All further ancestors are locked too, and at least as important as this node.
                if not rises:
                    return
                rank = self.move_to(n, rank)
            else:
                if node.flags & IS_LINKED:
                    unlink(self.nodes, self.classes, n)
                if rises:
                    rank = self.move_to(n, rank)
                link_newest(self.nodes, self.classes, n)
            n = node.parent

    cdef void count_use(self, node_t n) noexcept nogil:
        """Move the path to `n` to the classes of one use more, child before parent."""
        cdef Node *node
        cdef int32_t uses
        cdef bint was_linked
        while not self.nodes[n].flags & IS_ROOT:
            node = &self.nodes[n]
            was_linked = node.flags & IS_LINKED
            if was_linked:
                unlink(self.nodes, self.classes, n)
            uses = self.classes[node.rank].uses
            if uses < MOST_USES:
                self.move_class(n, self.class_with(node.rank, uses + 1))
            if was_linked:
                link_newest(self.nodes, self.classes, n)
            n = node.parent

    cdef bint rises_to(self, node_t n, int32_t rank) noexcept nogil:
        return self.classes[self.nodes[n].rank].priority < self.classes[rank].priority

    cdef int32_t move_to(self, node_t n, int32_t rank) noexcept nogil:
        """Raise `n`, off its list, to the priority of `rank` with the uses that it has; returns its class.

        Up a path the uses do not fall, so that the class of a node is found behind that of its child.
        """
        rank = self.class_with(rank, self.classes[self.nodes[n].rank].uses)
        self.move_class(n, rank)
        return rank

    # ---- fifo

    cdef void enter(self, node_t n) noexcept nogil:
        """Link `n`, on no list, as what came last."""
        self.num_entries += 1
        set_entry(&self.nodes[n], self.num_entries)
        link_newest(self.nodes, self.classes, n)

    cdef node_t pass_by(self, int32_t rank) noexcept nogil:
        """The first node of a class that can go, or NO_NODE; passes those before it."""
        cdef node_t n
        while self.num_waiting > 0:
            n = self.waiting[0]
            if self.nodes[n].rank != rank:
                break
            if self.nodes[n].lock_ref == 0 and self.nodes[n].num_children == 0:
                return n
            self.stop_waiting(n)
        n = self.classes[rank].oldest
        while n != NO_NODE and (self.nodes[n].lock_ref > 0 or self.nodes[n].num_children > 0):
            unlink(self.nodes, self.classes, n)
            n = self.classes[rank].oldest
        return n

    cdef void take_off(self, node_t n) noexcept nogil:
        """Off its list, or out of the heap, if it is there."""
        if self.nodes[n].flags & IS_LINKED:
            unlink(self.nodes, self.classes, n)
        elif self.nodes[n].flags & IS_WAITING:
            self.stop_waiting(n)

    cdef bint goes_before(self, node_t a, node_t b) noexcept nogil:
        if self.nodes[a].rank != self.nodes[b].rank:
            return self.classes[self.nodes[a].rank].priority < self.classes[self.nodes[b].rank].priority
        return entry_of(&self.nodes[a]) < entry_of(&self.nodes[b])

    cdef void wait(self, node_t n) noexcept nogil:
        """Put a node that was passed, and can go now, into the heap."""
        self.nodes[n].flags |= IS_WAITING
        self.num_waiting += 1
        self.settle(self.num_waiting - 1, n)

    cdef void stop_waiting(self, node_t n) noexcept nogil:
        cdef Py_ssize_t place = self.nodes[n].older
        self.nodes[n].flags &= ~<uint32_t>IS_WAITING
        self.num_waiting -= 1
        if place < self.num_waiting:
            self.settle(place, self.waiting[self.num_waiting])

    cdef void settle(self, Py_ssize_t place, node_t n) noexcept nogil:
        """Put `n` into the heap where it belongs, up or down from `place`, which is free."""
        cdef Py_ssize_t child
        cdef node_t other
        while place > 0 and self.goes_before(n, self.waiting[(place - 1) // 2]):
            other = self.waiting[(place - 1) // 2]
            self.waiting[place] = other
            self.nodes[other].older = <node_t>place
            place = (place - 1) // 2
        while True:
            child = 2 * place + 1
            if child >= self.num_waiting:
                break
            if child + 1 < self.num_waiting and self.goes_before(self.waiting[child + 1], self.waiting[child]):
                child += 1
            other = self.waiting[child]
            if not self.goes_before(other, n):
                break
            self.waiting[place] = other
            self.nodes[other].older = <node_t>place
            place = child
        self.waiting[place] = n
        self.nodes[n].older = <node_t>place
