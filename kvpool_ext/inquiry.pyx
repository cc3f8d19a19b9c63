"""What a ledger knows of one prompt: where it stands in the tree, beside what, and what went since.

Nothing is changed, not even recency. O(prompt + nodes + namespaces + bound requests + evicted runs): these are the
questions of a person, and the tree keeps no lists of children for them.
"""
cimport numpy as cnp
from libc.stdint cimport int32_t

from kvpool_ext.arena cimport IS_DETACHED, IS_ROOT, Node, NodeArena
from kvpool_ext.lease cimport PageLease
from kvpool_ext.memory cimport free, malloc
from kvpool_ext.moves cimport LedgerMoves
from kvpool_ext.namespaces cimport namespace_key
from kvpool_ext.radix cimport RadixCache
from kvpool_ext.tokens cimport borrow_tokens
from kvpool_ext.tree cimport Walk
from kvpool_ext.types cimport NO_NODE, node_t, token_t

from kvpool_ext.views import Inquiry, Nearest

cnp.import_array()

cdef enum:
    SHOWN = 4    # tokens of the nearest sequence
    UNKNOWN = -1
    ELSEWHERE = -2


def inquire(LedgerMoves ledger, tokens, extra_key):
    """Look for `tokens` in tree, history and leases.

    Parameters
    ----------
    ledger : LedgerMoves
        Whose pages.
    tokens : sequence of int
        The prompt ``[n]``.
    extra_key : str, bytes, int or None
        The namespace.

    Returns
    -------
    Inquiry
        As if prefix reuse were on.

    Raises
    ------
    ValueError
        The prompt is empty.
    """
    cdef cnp.ndarray array = borrow_tokens(tokens)
    cdef object key = namespace_key(extra_key)
    cdef const token_t *data = <const token_t *>cnp.PyArray_DATA(array)
    cdef Py_ssize_t num_tokens = cnp.PyArray_DIM(array, 0), limit
    cdef RadixCache tree = ledger.tree
    cdef node_t root
    cdef Walk walk = Walk(NO_NODE, 0, 0, 0)
    tree.enter()
    if num_tokens == 0:
        raise ValueError("the prompt is empty, expected at least one token")
    limit = (num_tokens - 1) // tree.page_size
    root = tree.root_of(key)
    # Before the walk: what Python makes may run the collector, and with it a caller's clean-up.
    ends, shown, nearest, evicted = {}, [], None, []
    if root != NO_NODE:
        walk = tree.walk(root, data, limit, NULL)
        add_ends(tree, walk, ends)
    if root != NO_NODE and (walk.num_pages < limit or limit == 0):
        nearest = find_nearest(tree, &walk, data, num_tokens, shown)
    if tree.history is not None and walk.num_pages < limit:
        evicted = tree.history.trace(array, walk.num_pages, limit, ends, key)
    return Inquiry(
        key, limit * tree.page_size, walk.num_pages * tree.page_size, nearest, evicted,
        find_other(tree, root, data, walk.num_pages, limit),
        find_bound(ledger, key, ends, data, num_tokens, walk.num_pages),
    )


cdef int add_ends(RadixCache tree, Walk walk, dict ends) except -1:
    """Handle -> pages down to its end, of each node that a walk passed as a whole, the root too."""
    cdef NodeArena arena = tree.arena
    cdef node_t n = walk.node
    cdef Py_ssize_t depth = walk.num_pages
    if tree.ends_inside(&walk):
        depth -= walk.node_pages
        n = arena.nodes[n].parent
    while n != NO_NODE:
        ends[arena.handle_of(n)] = depth
        depth -= arena.nodes[n].num_pages
        n = arena.nodes[n].parent
    return 0


cdef Py_ssize_t common_tokens(const token_t *a, const token_t *b, Py_ssize_t num_tokens) noexcept nogil:
    cdef Py_ssize_t i = 0
    while i < num_tokens and a[i] == b[i]:
        i += 1
    return i


cdef object find_nearest(
    RadixCache tree, Walk *walk, const token_t *tokens, Py_ssize_t num_tokens, list shown
):
    """What the tree has where a walk of `tokens` left it, or None; `shown` is an empty list for it."""
    cdef NodeArena arena = tree.arena
    cdef Py_ssize_t start = walk.num_pages * tree.page_size, common, best = -1, num_branches = 0, offset = 0, end, i
    cdef Py_ssize_t room = min(num_tokens - start, tree.page_size)
    cdef const token_t *rest = tokens + start
    cdef node_t n, found = NO_NODE
    cdef Node *node
    cdef int32_t lock_ref
    if tree.ends_inside(walk):
        found, num_branches = walk.node, 1
        offset = walk.node_pages * tree.page_size
        best = common_tokens(arena.nodes[found].tokens + offset, rest, room)
    else:
        for n in range(arena.num_used):
            node = &arena.nodes[n]
            if node.parent != walk.node or not node.generation & 1 or node.flags & (IS_ROOT | IS_DETACHED):
                continue
            num_branches += 1
            common = common_tokens(node.tokens, rest, room)
            if common > best:
                best, found = common, n
    if found == NO_NODE:
        return None
    node = &arena.nodes[found]
    end = start - offset + (node.num_pages + pages_below(arena, found)) * tree.page_size
    lock_ref = node.lock_ref
    offset += best
    room = min(<Py_ssize_t>SHOWN, node.num_pages * tree.page_size - offset)
    for i in range(room):
        shown.append(node.tokens[offset + i])
    return Nearest(start + best, tuple(shown), end, num_branches, lock_ref)


cdef Py_ssize_t pages_below(NodeArena arena, node_t top) except -1:
    """Pages on the longest path below `top`; O(nodes), for each is measured once."""
    cdef int32_t *below = <int32_t *>malloc(arena.num_used * sizeof(int32_t))
    cdef Py_ssize_t longest = 0
    cdef int32_t total
    cdef node_t n, m
    if below == NULL:
        raise MemoryError(f"no memory to measure {arena.num_used} nodes")
    for n in range(arena.num_used):
        below[n] = UNKNOWN
    below[top] = 0
    for n in range(arena.num_used):
        if not arena.nodes[n].generation & 1:
            continue
        # Up to what is known, then once more to write it down.
        total, m = 0, n
        while below[m] == UNKNOWN and arena.nodes[m].parent != NO_NODE:
            total += arena.nodes[m].num_pages
            m = arena.nodes[m].parent
        if below[m] < 0:
            total = ELSEWHERE
        else:
            total += below[m]
            longest = max(longest, <Py_ssize_t>total)
        m = n
        while below[m] == UNKNOWN:
            below[m] = total
            if total != ELSEWHERE:
                total -= arena.nodes[m].num_pages
            if arena.nodes[m].parent == NO_NODE:
                break
            m = arena.nodes[m].parent
    free(below)
    return longest


cdef object find_other(RadixCache tree, node_t own, const token_t *tokens, Py_ssize_t num_pages, Py_ssize_t limit):
    """The namespace but `own` that has most of `tokens`, if that is more than `num_pages`."""
    cdef Py_ssize_t best = num_pages, found
    cdef node_t root
    answer = None
    if num_pages == limit:
        return answer
    # A copy, for the same reason, and each is looked up again.
    for key in list(tree.roots):
        root = tree.root_of(key)
        if root == own or root == NO_NODE:
            continue
        found = tree.walk(root, tokens, limit, NULL).num_pages
        if found > best:
            best, answer = found, (key, found * tree.page_size)
    return answer


cdef object find_bound(
    LedgerMoves ledger, object key, dict ends, const token_t *tokens, Py_ssize_t num_tokens, Py_ssize_t num_pages
):
    """The lease that would match most of `tokens` once it is cached, if that is more than `num_pages`."""
    cdef Py_ssize_t best = num_pages, page_size = ledger.page_size, matched, depth, found
    cdef RadixCache tree = ledger.tree
    cdef PageLease lease
    cdef node_t n
    answer = None
    for each in list(ledger.leases.values()):
        lease = each
        if not lease.live or lease.known == NULL or lease.extra_key != key or not ledger.may_publish(lease):
            continue
        matched = lease.matched_pages
        if matched > 0:
            depth = lease.tree_pages
            n = ledger.node_at(lease.node, &depth, matched)
            if ends.get(tree.arena.handle_of(n)) != matched:
                continue
        matched *= page_size
        found = matched + common_tokens(
            lease.known, tokens + matched, min(lease.known_len, num_tokens - 1) - matched
        )
        if found // page_size > best:
            best, answer = found // page_size, (lease.tag, found // page_size * page_size)
    return answer
