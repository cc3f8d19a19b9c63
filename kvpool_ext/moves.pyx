"""The moves of the page ledger: between free list, tree and leases, without a check of arguments.

Nothing here decides whether a call may go on; `ledger.pyx` does, before it moves anything.
"""
from libc.stdint cimport int16_t
from libc.string cimport memcmp, memcpy

from kvpool_ext.arena cimport IS_ROOT, Node
from kvpool_ext.gate cimport Gate
from kvpool_ext.lease cimport PageLease
from kvpool_ext.lengths cimport LengthTable
from kvpool_ext.memory cimport free
from kvpool_ext.pages cimport PageAllocator
from kvpool_ext.radix cimport RadixCache
from kvpool_ext.tree cimport Walk
from kvpool_ext.types cimport CHECKED, NO_NODE, node_t, page_t, token_t

cdef enum:
    # Compares longer than this many tokens run without the GIL. Shorter ones keep it: giving it up lets another
    # thread hold the scheduler for a switch interval, a thousand times the compare.
    LONG_COMPARE = 16384


cdef class LedgerMoves:
    """State and moves of a page ledger; `PageLedger` adds the verbs."""

    def __cinit__(
        self, num_pages, page_size, num_columns=1, eviction="lru", eviction_history=None, *, tree_class=RadixCache
    ):
        self.allocator = PageAllocator(num_pages)
        self.tree = tree_class(page_size, eviction, num_pages, eviction_history)
        self.tree.allocator = self.allocator
        self.page_size = self.tree.page_size
        self.leases = {}
        self.fetching = {}
        self.fetch_nodes = {}
        self.lengths = LengthTable(num_columns)

    def __dealloc__(self):
        free(self.holders)

    def guard_by(self, Gate gate):
        """Let the verbs of the tree that callers have pass through the gate of a pool."""
        self.tree.gate = gate

    cdef int admit(self, PageLease lease, Py_ssize_t written) except -1:
        """Enter a lease, with its written length, in the books; MemoryError changes nothing."""
        self.lengths.reserve(1)
        self.enlist(lease)
        self.start(lease, written)
        return 0

    cdef int enlist(self, PageLease lease) except -1:
        """Give a lease its number and its place among the others; the part of `admit` that can fail."""
        lease.tag = self.last_tag + 1
        self.leases[lease.tag] = lease
        self.last_tag += 1
        return 0

    cdef void start(self, PageLease lease, Py_ssize_t written) noexcept:
        """Let an enlisted lease live; `LengthTable.reserve` came before."""
        lease.row = self.lengths.take(written)
        lease.live = True

    cdef void strike(self, PageLease lease) noexcept:
        """Undo what `admit` or `enlist` did for the latest lease, which holds nothing yet."""
        del self.leases[lease.tag]
        self.last_tag -= 1
        if lease.live:
            self.lengths.remove(lease.row)
            lease.live = False

    cdef int check_live(self, PageLease lease) except -1:
        if not lease.live:
            raise RuntimeError(f"lease {lease.tag} has ended: its pages are given back already")
        return 0

    cdef int verify(self) except -1:
        if CHECKED and self.tree.arena.num_live + self.allocator.num_pages <= 512:
            self.check()
        return 0

    cdef Py_ssize_t free_or_evictable(self) noexcept nogil:
        return self.allocator.c_num_free() + self.tree.evictable_pages

    cdef Walk walk_prompt(
        self, object key, const token_t *tokens, Py_ssize_t num_tokens, bint reuse, page_t *out
    ):
        cdef Walk walk = Walk(NO_NODE, 0, 0, 0)
        cdef Py_ssize_t max_pages = (num_tokens - 1) // self.page_size if num_tokens > 0 else 0
        cdef node_t root = self.tree.root_of(key) if reuse and max_pages > 0 else NO_NODE
        cdef RadixCache tree = self.tree
        if root == NO_NODE:
            return walk
        if num_tokens < LONG_COMPARE:
            return tree.walk(root, tokens, max_pages, out)
        tree.busy = True
        with nogil:
            walk = tree.walk(root, tokens, max_pages, out)
        tree.busy = False
        return walk

    cdef void claim(self, page_t *out, Py_ssize_t num_pages, int16_t cause, Py_ssize_t tag) noexcept:
        """Move `num_pages` to `out`, free ones first, and evict exactly as many as are short, on account of `tag`."""
        cdef Py_ssize_t num_free = min(num_pages, self.allocator.c_num_free())
        self.allocator.pop(out, num_free)
        if num_free < num_pages:
            if self.tree.history is not None:
                self.tree.history.begin(cause, tag)
            self.tree.evicted_pages += self.tree.evict_into(out + num_free, num_pages - num_free)
            self.tree.drop_pending_roots()

    cdef void drop_pages(self, PageLease lease, Py_ssize_t start, Py_ssize_t end) noexcept:
        """Free the non-tree pages ``[start, end)`` of a lease, but for those that a fork still holds."""
        cdef Py_ssize_t i
        cdef page_t page
        if lease.lineage is None:
            self.allocator.push(lease.page_ids + start, end - start)
            return
        for i in range(start, end):
            page = lease.page_ids[i]
            if self.holders[page] > 1:
                self.holders[page] -= 1
            else:
                self.holders[page] = 0
                self.allocator.push(&lease.page_ids[i], 1)

    cdef int verify_tokens(self, PageLease lease, const token_t *tokens, Py_ssize_t num_tokens) except -1:
        """Compare `tokens` with those that bind or a checkpoint told; ValueError at the first difference."""
        cdef Py_ssize_t limit = min(num_tokens, lease.known_len), matched = lease.matched_pages * self.page_size
        cdef Py_ssize_t end = lease.tree_pages * self.page_size, start, stop, i
        cdef node_t n = lease.node
        cdef Node *node
        if limit > matched and memcmp(
            tokens + matched, lease.known, (limit - matched) * sizeof(token_t)
        ) != 0:
            i = 0
            while tokens[matched + i] == lease.known[i]:
                i += 1
            raise contradiction(matched + i, tokens[matched + i], lease.known[i])
        # The matched part is compared with the locked nodes, from the deepest up.
        while n != NO_NODE and not self.tree.arena.nodes[n].flags & IS_ROOT:
            node = &self.tree.arena.nodes[n]
            start = end - node.num_pages * self.page_size
            stop = min(min(end, matched), limit)
            if start < stop and memcmp(tokens + start, node.tokens, (stop - start) * sizeof(token_t)) != 0:
                i = 0
                while tokens[start + i] == node.tokens[i]:
                    i += 1
                raise contradiction(start + i, tokens[start + i], node.tokens[i])
            end = start
            n = node.parent
        return 0

    # ---- into the tree, and out of it

    cdef void add_holder(self, page_t page) noexcept nogil:
        self.holders[page] = max(1, self.holders[page]) + 1

    cdef bint may_publish(self, PageLease lease) noexcept:
        return lease.publishes and lease.epoch == self.tree.epoch

    cdef int learn(self, PageLease lease, const token_t *tokens, Py_ssize_t num_tokens) except -1:
        """Copy `tokens` up to `num_tokens` behind those that the lease knows; ``known_len`` is left to the caller."""
        cdef Py_ssize_t matched_len = lease.matched_pages * self.page_size, known_len = lease.known_len
        cdef token_t *known = lease.known
        if num_tokens <= known_len:
            return 0
        if known == NULL:
            known = lease.runs.take(num_tokens - matched_len)
        elif not lease.runs.has_room(known, num_tokens - matched_len):
            known = lease.runs.resize(known, known_len - matched_len, num_tokens - matched_len)
        if known == NULL:
            raise MemoryError(f"no memory for {num_tokens} tokens")
        lease.known = known
        memcpy(known + (known_len - matched_len), tokens + known_len, (num_tokens - known_len) * sizeof(token_t))
        return 0

    cdef node_t node_at(self, node_t n, Py_ssize_t *depth, Py_ssize_t num_pages) noexcept nogil:
        """The node on the path of `n` that holds page ``num_pages - 1``; `depth` becomes its end."""
        while depth[0] - self.tree.arena.nodes[n].num_pages >= num_pages:
            depth[0] -= self.tree.arena.nodes[n].num_pages
            n = self.tree.arena.nodes[n].parent
        return n

    cdef void let_go(self, PageLease lease) noexcept:
        """Drop the duplicates and the lock of a lease whose other pages are settled, and end it."""
        cdef Py_ssize_t i
        for i in range(lease.num_duplicates):
            self.drop_pages(lease, lease.duplicates[2 * i], lease.duplicates[2 * i + 1])
        if lease.node != NO_NODE:
            self.tree.unlock_path(lease.node)
            self.tree.free_orphans()
        if lease.lineage is not None:
            del lease.lineage[lease]
            lease.lineage = None
        del self.leases[lease.tag]
        self.lengths.remove(lease.row)
        self.num_losses += 1
        lease.live = False
        # Now, not with the object, which a step may keep.
        lease.runs.give(lease.known)
        lease.known = NULL
        lease.known_len = lease.matched_pages * self.page_size


cdef object contradiction(Py_ssize_t position, token_t got, token_t expected):
    return ValueError(
        f"token {got} at position {position} contradicts token {expected} told at bind or checkpoint: "
        "these are the tokens of another request"
    )
