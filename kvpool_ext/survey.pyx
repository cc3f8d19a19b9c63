"""TreeSurvey: the whole tree as NumPy columns, for pictures and sums; one pass over the nodes in C.

`RadixCache.nodes` copies each node out on its own. That is what a check wants, and too slow for a look at a tree of
half a million of them.
"""
from libc.stdint cimport int32_t, int64_t
from libc.string cimport memcpy

import numpy as np

cimport numpy as cnp

from kvpool_ext.arena cimport IS_DETACHED, IS_ROOT, Node, entry_of
from kvpool_ext.classes cimport DETACHED_RANK
from kvpool_ext.eviction cimport FIFO, EvictionOrder
from kvpool_ext.memory cimport free, malloc
from kvpool_ext.tree cimport RadixTree
from kvpool_ext.types cimport NO_NODE, node_t, page_t, token_t

from kvpool_ext.views import Namespace, TreeSurvey

cnp.import_array()


# Where the columns of a survey are, one entry a node.
ctypedef struct Columns:
    int64_t *handles
    int32_t *parents
    int32_t *namespace_ids
    int32_t *depths
    int32_t *subtree_ends
    int64_t *starts
    int32_t *num_pages
    int32_t *lock_refs
    int64_t *priorities
    cnp.npy_bool *detached
    int32_t *turns
    int64_t *entries           # when each entered its class, under fifo
    page_t *pages              # of all nodes, one after the other
    int64_t *root_handles      # of all roots, one a namespace


def survey_tree(RadixTree tree):
    """Every node of `tree` in pre-order, a child behind its parent; changes nothing.

    O(nodes + pages), with the GIL held.

    Returns
    -------
    TreeSurvey
        A copy.

    Raises
    ------
    RuntimeError
        Another thread is in the tree.
    """
    cdef EvictionOrder arena = tree.arena
    cdef Py_ssize_t num_nodes = -1, num_pages = -1, num_roots = -1
    cdef Columns to
    cdef int done
    tree.enter()
    # An allocation may run the collector, and with it a clean-up of the caller's that changes the tree.
    while (
        num_roots != tree.num_roots or num_nodes != arena.num_live - tree.num_roots
        or num_pages != tree.evictable_pages + tree.protected_pages
    ):
        num_roots = tree.num_roots
        num_nodes = arena.num_live - num_roots
        num_pages = tree.evictable_pages + tree.protected_pages
        columns = (
            np.empty(num_nodes, np.int64), np.empty(num_nodes, np.int32), np.empty(num_nodes, np.int32),
            np.empty(num_nodes, np.int32), np.empty(num_nodes, np.int32), np.empty(num_nodes, np.int64),
            np.empty(num_nodes, np.int32), np.empty(num_nodes, np.int32), np.empty(num_nodes, np.int64),
            np.empty(num_nodes, np.bool_), np.full(num_nodes, -1, np.int32), np.empty(num_pages, np.int32),
        )
        root_handles = np.empty(num_roots, np.int64)
        entries = np.empty(num_nodes if arena.policy == FIFO else 0, np.int64)
    to.handles = <int64_t *>data_of(columns[0])
    to.parents = <int32_t *>data_of(columns[1])
    to.namespace_ids = <int32_t *>data_of(columns[2])
    to.depths = <int32_t *>data_of(columns[3])
    to.subtree_ends = <int32_t *>data_of(columns[4])
    to.starts = <int64_t *>data_of(columns[5])
    to.num_pages = <int32_t *>data_of(columns[6])
    to.lock_refs = <int32_t *>data_of(columns[7])
    to.priorities = <int64_t *>data_of(columns[8])
    to.detached = <cnp.npy_bool *>data_of(columns[9])
    to.turns = <int32_t *>data_of(columns[10])
    to.pages = <page_t *>data_of(columns[11])
    to.entries = <int64_t *>data_of(entries)
    to.root_handles = <int64_t *>data_of(root_handles)
    done = fill(arena, tree.page_size, &to)
    if done < 0:
        raise MemoryError(f"no memory to look at {num_nodes} nodes")
    namespaces = [
        Namespace(handle, tree.root_keys.get(handle & 0xFFFFFFFF), handle & 0xFFFFFFFF not in tree.root_keys)
        for handle in root_handles.tolist()
    ]
    survey = TreeSurvey(tree.page_size, namespaces, *columns)
    if arena.policy == FIFO:
        number_by_entry(survey, entries)
    return survey


def number_by_entry(survey, entries):
    """Turns under fifo: a node goes by its entry, but not before the last of what is below it and in its class.

    It goes at once then, having entered before: so nodes go by the latest entry of their subtree, a child before its
    parent. Detached ones have their turns already.
    """
    going = np.flatnonzero((survey.lock_refs == 0) & ~survey.detached)
    order = np.lexsort((-survey.depths[going], entries[going], survey.priorities[going]))
    survey.turns[going[order]] = np.arange(going.size) + (survey.turns >= 0).sum()


def node_tokens(RadixTree tree, node, Py_ssize_t start, Py_ssize_t end):
    """Tokens ``[start, end)`` of one node, counted from its first, as a new int32 array.

    Parameters
    ----------
    tree : RadixCache
        Whose node it is.
    node : int
        Its handle; ValueError for a stale one.
    start, end : int
        Cut to the tokens that it has.
    """
    cdef node_t n
    cdef cnp.npy_intp num_tokens
    tree.enter()
    n = tree.arena.resolve(node)
    num_tokens = tree.arena.nodes[n].num_pages * tree.page_size
    start = min(max(0, start), num_tokens)
    num_tokens = max(0, min(end, num_tokens) - start)
    cdef cnp.ndarray out = cnp.PyArray_EMPTY(1, &num_tokens, cnp.NPY_INT32, 0)
    if num_tokens > 0:
        memcpy(cnp.PyArray_DATA(out), tree.arena.nodes[n].tokens + start, num_tokens * sizeof(token_t))
    return out


cdef void *data_of(cnp.ndarray array):
    return cnp.PyArray_DATA(array)


cdef int fill(EvictionOrder arena, Py_ssize_t page_size, Columns *to) noexcept:
    """Write all columns; -1 where there is no memory for the way through the tree."""
    cdef Py_ssize_t num_used = arena.num_used
    cdef node_t *first_child = <node_t *>malloc((2 * num_used + 1) * sizeof(node_t))
    cdef int32_t *column = <int32_t *>malloc((num_used + 1) * sizeof(int32_t))
    cdef int32_t i = 0, num_roots = 0, rank = DETACHED_RANK, turn = 0
    cdef Py_ssize_t num_copied = 0
    cdef Node *node
    cdef node_t *sibling
    cdef node_t n, root
    if first_child == NULL or column == NULL:
        free(first_child)
        free(column)
        return -1
    sibling = first_child + num_used
    for n in range(num_used):
        first_child[n] = NO_NODE
    # From the end, so that children stand in the order of the arena.
    for n in range(num_used - 1, -1, -1):
        node = &arena.nodes[n]
        if node.generation & 1 and not node.flags & IS_ROOT:
            sibling[n] = first_child[node.parent]
            first_child[node.parent] = n
    for root in range(num_used):
        if not arena.nodes[root].generation & 1 or not arena.nodes[root].flags & IS_ROOT:
            continue
        to.root_handles[num_roots] = arena.handle_of(root)
        num_roots += 1
        n = first_child[root]
        while n != NO_NODE:
            node = &arena.nodes[n]
            column[n] = i
            to.namespace_ids[i] = num_roots - 1
            to.parents[i] = -1 if node.parent == root else column[node.parent]
            to.depths[i] = 0
            to.starts[i] = 0
            if node.parent != root:
                to.depths[i] = to.depths[to.parents[i]] + 1
                to.starts[i] = to.starts[to.parents[i]] + to.num_pages[to.parents[i]] * page_size
            to.handles[i] = arena.handle_of(n)
            to.num_pages[i] = node.num_pages
            to.lock_refs[i] = node.lock_ref
            to.priorities[i] = arena.classes[node.rank].priority
            to.detached[i] = node.flags & IS_DETACHED != 0
            memcpy(to.pages + num_copied, node.pages, node.num_pages * sizeof(page_t))
            num_copied += node.num_pages
            i += 1
            if first_child[n] != NO_NODE:
                n = first_child[n]
                continue
            to.subtree_ends[column[n]] = i
            while sibling[n] == NO_NODE and arena.nodes[n].parent != root:
                n = arena.nodes[n].parent
                to.subtree_ends[column[n]] = i
            n = sibling[n]
    if arena.policy == FIFO:
        number_class(arena, DETACHED_RANK, column, 0, to.turns)
        for n in range(num_used):
            if arena.nodes[n].generation & 1 and not arena.nodes[n].flags & IS_ROOT:
                to.entries[column[n]] = entry_of(&arena.nodes[n])
        raise_to_children(to, i)
    else:
        while True:
            turn = number_class(arena, rank, column, turn, to.turns)
            rank = arena.classes[rank].next_rank
            if rank == DETACHED_RANK:
                break
    free(first_child)
    free(column)
    return 0


cdef int32_t number_class(
    EvictionOrder arena, int32_t rank, const int32_t *column, int32_t turn, int32_t *turns
) noexcept:
    """Number the nodes on the list of a class from `turn` on, the old end first; returns the next turn."""
    cdef node_t n = arena.classes[rank].oldest
    while n != NO_NODE:
        turns[column[n]] = turn
        turn += 1
        n = arena.nodes[n].newer
    return turn


cdef void raise_to_children(Columns *to, int32_t num_nodes) noexcept:
    """Raise each entry to the latest of what is below and goes by the same class."""
    cdef int32_t i, parent
    # From the end: children stand behind their parents.
    for i in range(num_nodes - 1, -1, -1):
        parent = to.parents[i]
        if parent >= 0 and to.priorities[parent] == to.priorities[i]:
            to.entries[parent] = max(to.entries[parent], to.entries[i])
