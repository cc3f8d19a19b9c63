"""Which pages eviction would take next, without taking them: for a thread that copies them ahead of it.

Under lru and lfu that is what stands on the lists of the classes. Under fifo eviction passes what cannot go yet and
comes back to it, which is played here beside the tree: what has gone in play, and what was passed in play.
"""
cimport numpy as cnp
from libc.stdint cimport int32_t, uint8_t
from libc.string cimport memcpy

from kvpool_ext.arena cimport IS_LINKED, IS_ROOT, IS_WAITING, Node
from kvpool_ext.classes cimport DETACHED_RANK
from kvpool_ext.eviction cimport FIFO, EvictionOrder
from kvpool_ext.memory cimport calloc, free, malloc
from kvpool_ext.quiet cimport Quiet
from kvpool_ext.tree cimport RadixTree
from kvpool_ext.types cimport NO_NODE, node_t, page_t

cnp.import_array()


# A game of eviction under fifo. Its tables are of all nodes, and touched only where it leads.
ctypedef struct Game:
    int32_t *num_gone     # children of each node that have gone
    uint8_t *is_passed    # off its list or out of the heap, in play
    node_t *waiting       # the heap, see `eviction.pyx`
    Py_ssize_t num_waiting


def next_victims(RadixTree tree not None, Py_ssize_t num_pages):
    """The next pages of `tree` that eviction would take if nothing else happened; changes nothing.

    O(num_pages), under fifo also O(nodes that are passed or wait). Keeps the GIL: any thread may call it at any time.

    Parameters
    ----------
    tree : RadixCache
        Whose pages.
    num_pages : int
        How many, at least 0.

    Returns
    -------
    ndarray
        int32 ``[min(num_pages, unlocked cached pages)]``, in the order of eviction. What a reset has detached is not
        among them: it is cached no longer.

    Raises
    ------
    ValueError
        A number below 0.
    MemoryError
        No memory for the tables of fifo.
    """
    cdef Quiet _quiet = Quiet()
    cdef EvictionOrder arena = tree.arena
    cdef cnp.npy_intp count
    cdef Py_ssize_t done = 0
    cdef int32_t rank
    cdef node_t n
    if num_pages < 0:
        raise ValueError(f"num_pages must be at least 0, got {num_pages}")
    count = min(num_pages, tree.evictable_pages - tree.orphan_pages)
    cdef cnp.ndarray out = cnp.PyArray_EMPTY(1, &count, cnp.NPY_INT32, 0)
    cdef page_t *pages = <page_t *>cnp.PyArray_DATA(out)
    if count == 0:
        return out
    if arena.policy == FIFO:
        done = play(arena, pages, count)
        if done < 0:
            raise MemoryError(f"no memory to look ahead over {arena.num_used} nodes")
    else:
        rank = arena.classes[DETACHED_RANK].next_rank
        while rank != DETACHED_RANK and done < count:
            n = arena.classes[rank].oldest
            while n != NO_NODE and done < count:
                done += copy_tail(&arena.nodes[n], pages + done, count - done)
                n = arena.nodes[n].newer
            rank = arena.classes[rank].next_rank
    if done < count:
        raise RuntimeError(f"the order of eviction is out of sync: {done} of {count} unlocked pages are in it")
    return out


cdef Py_ssize_t copy_tail(const Node *node, page_t *out, Py_ssize_t room) noexcept nogil:
    """The pages of a node, from its end on, as many as there is room for."""
    cdef Py_ssize_t count = min(room, <Py_ssize_t>node.num_pages), i
    for i in range(count):
        out[i] = node.pages[node.num_pages - 1 - i]
    return count


# ---- fifo

cdef Py_ssize_t play(EvictionOrder arena, page_t *out, Py_ssize_t count) noexcept:
    """Play eviction of `count` pages; how many there were, -1 without memory."""
    cdef Py_ssize_t done = 0
    cdef int32_t rank = arena.classes[DETACHED_RANK].next_rank
    cdef node_t following, n, parent
    cdef Game game
    game.num_gone = <int32_t *>calloc(arena.num_used, sizeof(int32_t))
    game.is_passed = <uint8_t *>calloc(arena.num_used, sizeof(uint8_t))
    game.waiting = <node_t *>malloc(arena.num_used * sizeof(node_t))
    game.num_waiting = arena.num_waiting
    cdef bint is_ready = game.num_gone != NULL and game.is_passed != NULL and game.waiting != NULL
    if is_ready and game.num_waiting > 0:
        memcpy(game.waiting, arena.waiting, game.num_waiting * sizeof(node_t))
    while is_ready and rank != DETACHED_RANK and done < count:
        following = arena.classes[rank].oldest
        while done < count:
            n = first_in_play(arena, &game, rank, &following)
            if n == NO_NODE:
                break
            done += copy_tail(&arena.nodes[n], out + done, count - done)
            parent = arena.nodes[n].parent
            game.num_gone[parent] += 1
            if can_go(arena, &game, parent) and (
                game.is_passed[parent] or not arena.nodes[parent].flags & (IS_LINKED | IS_WAITING)
            ):
                game.num_waiting += 1
                settle(arena, &game, game.num_waiting - 1, parent)
        rank = arena.classes[rank].next_rank
    free(game.num_gone)
    free(game.is_passed)
    free(game.waiting)
    return done if is_ready else -1


cdef bint can_go(EvictionOrder arena, Game *game, node_t n) noexcept nogil:
    cdef Node *node = &arena.nodes[n]
    return not node.flags & IS_ROOT and node.lock_ref == 0 and node.num_children == game.num_gone[n]


cdef node_t first_in_play(EvictionOrder arena, Game *game, int32_t rank, node_t *following) noexcept nogil:
    """As `EvictionOrder.pass_by`; `following` is the old end of the list of the class, in play."""
    cdef node_t n
    while game.num_waiting > 0 and arena.nodes[game.waiting[0]].rank == rank:
        n = game.waiting[0]
        game.num_waiting -= 1
        if game.num_waiting > 0:
            settle(arena, game, 0, game.waiting[game.num_waiting])
        if can_go(arena, game, n):
            return n
        game.is_passed[n] = True
    while following[0] != NO_NODE:
        n = following[0]
        following[0] = arena.nodes[n].newer
        if can_go(arena, game, n):
            return n
        game.is_passed[n] = True
    return NO_NODE


cdef void settle(EvictionOrder arena, Game *game, Py_ssize_t place, node_t n) noexcept nogil:
    """Put `n` into the heap in play, up or down from `place`, which is free."""
    cdef Py_ssize_t child
    while place > 0 and arena.goes_before(n, game.waiting[(place - 1) // 2]):
        game.waiting[place] = game.waiting[(place - 1) // 2]
        place = (place - 1) // 2
    while True:
        child = 2 * place + 1
        if child >= game.num_waiting:
            break
        if child + 1 < game.num_waiting and arena.goes_before(game.waiting[child + 1], game.waiting[child]):
            child += 1
        if not arena.goes_before(game.waiting[child], n):
            break
        game.waiting[place] = game.waiting[child]
        place = child
    game.waiting[place] = n
