"""Who begins to follow a tree, or has lost count, has it listed; and takes the changes from there on.

The functions here run without a line of Python and keep the GIL, so that any thread may call them at any time: the
moves of the tree keep it as well, and none of them stands half done where another thread gets it.
"""
cimport numpy as cnp
from libc.stdint cimport int32_t, uint8_t

from kvpool_ext.arena cimport IS_DETACHED, IS_ROOT, NodeArena
from kvpool_ext.journal cimport CLEARED, DEFAULT_ROOT, HEADER, TreeJournal, above_of
from kvpool_ext.memory cimport calloc, free, malloc
from kvpool_ext.moves cimport LedgerMoves
from kvpool_ext.quiet cimport Quiet
from kvpool_ext.tree cimport RadixTree
from kvpool_ext.types cimport node_t

cnp.import_array()


def follow_tree(LedgerMoves ledger not None, Py_ssize_t max_bytes):
    """Have the tree of `ledger` keep a journal from now on.

    Parameters
    ----------
    ledger : PageLedger
        Whose tree.
    max_bytes : int
        Limit of what the journal buffers.

    Returns
    -------
    TreeJournal
        The first `take_changes` lists what is there.

    Raises
    ------
    ValueError
        The tree is followed already, or a limit that no record fits in.
    MemoryError
        No memory for 4 bytes a page.
    """
    cdef Quiet _quiet = Quiet()
    cdef RadixTree tree = ledger.tree
    cdef NodeArena arena = tree.arena
    cdef TreeJournal journal
    cdef node_t n
    if tree.journal is not None:
        raise ValueError("the tree is followed already: a pool has one follower, with many subscribers")
    journal = TreeJournal(ledger.allocator.num_pages, tree.page_size, max_bytes)
    for n in range(arena.num_used):
        if is_cached(arena, n):
            journal.turn(arena.nodes[n].pages, arena.nodes[n].num_pages)
    tree.journal = journal
    return journal


def unfollow_tree(RadixTree tree not None, TreeJournal journal not None):
    """Have `tree` keep `journal` no longer; another one that it may have by now stays."""
    if tree.journal is journal:
        tree.journal = None


def take_changes(RadixTree tree not None, bint whole=False):
    """The changes of `tree` since the last call, and with `whole` also all that is there after them.

    Parameters
    ----------
    tree : RadixCache
        One that is followed.
    whole : bool
        List the tree as well, at the same moment.

    Returns
    -------
    tuple
        ``(records, names, listing, listing_names)``: int32 arrays of records (see `journal.pyx`) and the namespaces
        that they name. Where changes were lost, the records are a listing: one of CLEARED, and then all that is
        there, a parent before its children. Without `whole` the last two are None.

    Raises
    ------
    MemoryError
        No change is forgotten: the next call tells it, or lists the tree.
    RuntimeError
        Nobody follows the tree, or no longer.
    """
    cdef Quiet _quiet = Quiet()
    cdef TreeJournal journal = tree.journal
    if journal is None:
        raise RuntimeError("the tree is not followed any more")
    listing, listing_names = list_tree(tree, journal) if whole or journal.lost else (None, None)
    if journal.lost:
        answer = listing, listing_names, listing, listing_names
        journal.begin_anew([])
        return answer
    records, names = journal.take()
    try:
        return records, names, listing, listing_names
    except MemoryError:
        journal.lose()
        raise


cdef tuple list_tree(RadixTree tree, TreeJournal journal):
    """All that is in the tree now as ``(records, names)``, behind one record of CLEARED."""
    cdef NodeArena arena = tree.arena
    cdef cnp.npy_intp num_words = HEADER
    cdef Py_ssize_t num_above
    cdef uint8_t *listed = <uint8_t *>calloc(arena.num_used + 1, sizeof(uint8_t))
    cdef node_t *path = <node_t *>malloc((arena.num_used + 1) * sizeof(node_t))
    cdef int32_t *to
    cdef node_t n, above
    names = []
    try:
        if listed == NULL or path == NULL:
            raise MemoryError(f"no memory to list {arena.num_used} nodes")
        for n in range(arena.num_used):
            if is_cached(arena, n):
                num_words += journal.words_of(arena.nodes[n].num_pages)
        records = cnp.PyArray_EMPTY(1, &num_words, cnp.NPY_INT32, 0)
        to = <int32_t *>cnp.PyArray_DATA(records)
        to[0] = CLEARED
        to[1] = 0
        to[2] = DEFAULT_ROOT
        to += HEADER
        for n in range(arena.num_used):
            if not is_cached(arena, n):
                continue
            # Down to `n` from the first on its path that is not there yet.
            num_above = 0
            above = n
            while not arena.nodes[above].flags & IS_ROOT and not listed[above]:
                path[num_above] = above
                num_above += 1
                above = arena.nodes[above].parent
            while num_above > 0:
                num_above -= 1
                above = path[num_above]
                listed[above] = True
                to = journal.write_stored(
                    to, above_of(arena, arena.nodes[above].parent, tree.root_keys, names),
                    arena.nodes[above].pages, arena.nodes[above].tokens, arena.nodes[above].num_pages,
                )
        return records, names
    finally:
        free(listed)
        free(path)


cdef bint is_cached(NodeArena arena, node_t n) noexcept nogil:
    """Whether a node holds pages that can match."""
    return arena.nodes[n].generation & 1 and not arena.nodes[n].flags & (IS_ROOT | IS_DETACHED)
