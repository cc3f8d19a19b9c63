"""The radix tree: which token prefixes are cached, in which pages, and which page goes next.

A node is a run of whole pages; below it stand nodes that differ in their first page. The tree speaks pages: a token
tail that fills no page is ignored. What holds after every verb, and what `check` verifies:

(I1) siblings differ in their first page; (I2) ``lock_ref(parent) >=`` the sum over its children, so an unlocked node
has only unlocked descendants; (I3) a root holds no page, is never locked and never evicted; (I4) a page id appears
once; (I5) ``evictable + protected`` is the number of pages held; (I6) a parent's class comes no earlier than its
children's, and in the lowest class that has an unlocked node the first one to go is an unlocked leaf: under lru and
lfu every unlocked node is on the list of its class, children before parents, so that it is the old end; under fifo
every node is on that list in order of entry until eviction has passed it, and waits ahead of it when it may go.

Why (I6) holds: a walk goes down, but accesses and unlocks are told to the order bottom up; a lock holds the whole path;
the upper half of a split is linked right behind its lower half; an insert raises all ancestors. Where a policy links a
node is a table in `eviction.pyx`. It belongs to pages: the unmatched rest of a split keeps its old place. The tree
allocates no page, knows no device and no request, and is not thread-safe (a second entry is refused). No verb
recurses: a tree may be 100,000 nodes deep.
"""
from libc.stdint cimport INT32_MAX, INT32_MIN, int32_t, int64_t, uint32_t
from libc.string cimport memcmp, memcpy, memmove, memset

import operator

import numpy as np

from kvpool_ext.arena cimport IS_DETACHED, IS_PENDING, IS_ROOT, Node
from kvpool_ext.classes cimport DETACHED_RANK
from kvpool_ext.eviction cimport EvictionOrder, name_of, policy_of
from kvpool_ext.gate cimport Gate
from kvpool_ext.history cimport EvictionHistory, pages_to_remember
from kvpool_ext.types cimport CHECKED, NO_NODE, node_t, page_t, token_t

cdef enum:
    COMPARE_BYTES = 8192    # compared at once; inside the first unequal piece, page by page


cdef Py_ssize_t common_pages(
    const token_t *a, const token_t *b, Py_ssize_t num_pages, Py_ssize_t page_size
) noexcept nogil:
    """Number of leading equal pages."""
    cdef Py_ssize_t page_bytes = page_size * <Py_ssize_t>sizeof(token_t)
    cdef Py_ssize_t step = max(1, COMPARE_BYTES // page_bytes), done = 0, piece
    while done < num_pages:
        piece = min(step, num_pages - done)
        if memcmp(a + done * page_size, b + done * page_size, piece * page_bytes) != 0:
            while done < num_pages and (
                memcmp(a + done * page_size, b + done * page_size, page_bytes) == 0
            ):
                done += 1
            return done
        done += piece
    return num_pages


cdef int64_t checked_priority(object priority) except? -1:
    if type(priority) is not int:
        if isinstance(priority, (bool, np.bool_)):
            raise TypeError("priority must be an int, got bool")
        try:
            priority = operator.index(priority)
        except TypeError:
            raise TypeError(f"priority must be an int, got {type(priority).__name__}") from None
    if not INT32_MIN <= priority <= INT32_MAX:
        raise ValueError(f"priority must be in {INT32_MIN} .. {INT32_MAX}, got {priority}")
    return priority


cdef class RadixTree:
    """Walk, split, attach, lock and evict; `RadixCache` adds the verbs that callers see."""

    def __cinit__(self, page_size=1, eviction="lru", num_pages=0, eviction_history=0):
        if isinstance(page_size, bool) or not isinstance(page_size, (int, np.integer)):
            raise TypeError(f"page_size must be an int, got {type(page_size).__name__}")
        if not 1 <= page_size <= 1 << 20:
            raise ValueError(f"page_size must be in 1 .. {1 << 20} tokens, got {page_size}")
        if isinstance(num_pages, bool) or not isinstance(num_pages, (int, np.integer)):
            raise TypeError(f"num_pages must be an int, got {type(num_pages).__name__}")
        if num_pages < 0:
            raise ValueError(f"num_pages must be at least 0, got {num_pages}")
        if num_pages > INT32_MAX:
            raise ValueError(f"num_pages must be in 0 .. {INT32_MAX}, got {num_pages}")
        self.eviction = name_of(policy_of(eviction))
        num_remembered = pages_to_remember(eviction_history, num_pages, page_size)
        self.page_size = page_size
        # `num_pages`: what a pool knows, a tree on its own does not.
        self.arena = EvictionOrder(
            self.page_size, int(num_pages) * self.page_size, num_remembered * self.page_size, self.eviction
        )
        if num_remembered > 0:
            self.history = EvictionHistory(self.arena.runs, page_size, num_remembered)
        self.gate = Gate(RuntimeError, "the radix tree")
        self.user_locks = {}
        self.pending_root = NO_NODE
        self.default_root = self.arena.new_node()
        self.arena.nodes[self.default_root].flags = IS_ROOT
        self.num_roots = 1
        self.roots = {None: self.default_root}
        self.root_keys = {self.default_root: None}

    cdef int verify(self) except -1:
        # The debug build looks after each change; large trees would make that quadratic.
        if CHECKED and self.arena.num_live <= 256:
            self.check()
        return 0

    cdef int enter(self) except -1:
        if self.busy:
            raise RuntimeError("the radix tree is in use by another thread: it serves one scheduler thread")
        return 0

    cdef node_t root_of(self, object extra_key) except? -2:
        if extra_key is None:
            return self.default_root
        root = self.roots.get(extra_key)
        return NO_NODE if root is None else <node_t>root

    cdef node_t ensure_root(self, object extra_key) except? -2:
        """The root of a namespace, made if there is none; MemoryError changes nothing."""
        cdef node_t root = self.root_of(extra_key)
        if root == NO_NODE:
            self.arena.reserve(1)
            root = self.arena.new_node()
            self.arena.nodes[root].flags = IS_ROOT
            self.num_roots += 1
            try:
                self.roots[extra_key] = root
                self.root_keys[root] = extra_key
            except MemoryError:
                self.roots.pop(extra_key, None)
                self.arena.drop_node(root)
                self.num_roots -= 1
                raise
        return root

    cdef void forget_root(self, object extra_key) noexcept:
        """Undo an `ensure_root` that made a root, which is still without children."""
        root = self.roots.pop(extra_key)
        del self.root_keys[root]
        self.arena.drop_node(<node_t>root)
        self.num_roots -= 1

    cdef Walk walk(
        self, node_t start, const token_t *tokens, Py_ssize_t max_pages, page_t *out
    ) noexcept nogil:
        """Follow `tokens` below `start` for at most `max_pages`, page ids to `out` (or NULL); changes nothing."""
        cdef Walk walk = Walk(start, self.arena.nodes[start].num_pages, 0, 0)
        cdef Py_ssize_t page_size = self.page_size, room, common
        cdef const token_t *rest
        cdef Node *node
        cdef node_t child
        while walk.num_pages < max_pages:
            rest = tokens + walk.num_pages * page_size
            child = self.arena.find_child(walk.node, rest)
            if child == NO_NODE:
                break
            node = &self.arena.nodes[child]
            room = min(<Py_ssize_t>node.num_pages, max_pages - walk.num_pages)
            # The look-up compared the first page already.
            common = 1 + common_pages(node.tokens + page_size, rest + page_size, room - 1, page_size)
            if out != NULL:
                memcpy(out + walk.num_pages, node.pages, common * sizeof(page_t))
            if node.lock_ref == 0:
                walk.unlocked_pages += common
            walk.node = child
            walk.node_pages = common
            walk.num_pages += common
            if common < node.num_pages:
                break
        return walk

    cdef bint ends_inside(self, Walk *walk) noexcept nogil:
        return walk.node_pages < self.arena.nodes[walk.node].num_pages

    # ---- growth: all that can fail comes first, and changes nothing

    cdef int take_memory(self, Py_ssize_t num_pages, NodeMemory *memory, bint for_tokens) except -1:
        """Runs for a node of `num_pages`; without `for_tokens` for its page ids only."""
        memory.tokens = self.arena.runs.take(num_pages * self.page_size) if for_tokens else NULL
        memory.pages = <page_t *>self.arena.id_runs.take(num_pages)
        if memory.pages == NULL or (for_tokens and memory.tokens == NULL):
            self.give_memory(memory)
            raise MemoryError(f"no memory for a node of {num_pages} pages")
        return 0

    cdef void give_memory(self, NodeMemory *memory) noexcept:
        """Give back what no node has got."""
        self.arena.runs.give(memory.tokens)
        self.arena.id_runs.give(<token_t *>memory.pages)
        memory.tokens = NULL
        memory.pages = NULL

    cdef int prepare_split(self, Py_ssize_t num_upper, NodeMemory *memory) except -1:
        """All that `split` after `num_upper` pages needs."""
        self.arena.reserve(1)
        return self.take_memory(num_upper, memory, True)

    cdef node_t split(self, node_t n, Py_ssize_t num_upper, NodeMemory *memory) noexcept:
        """Cut `n` after `num_upper` pages and return the new upper node, which gets `memory`.

        The lower half keeps the node, so every handle still means the same prefix and no child is rewritten.
        """
        cdef Py_ssize_t page_size = self.page_size, num_lower
        cdef EvictionOrder arena = self.arena
        cdef Node *low
        cdef Node *up
        cdef node_t upper
        arena.unindex_node(n)
        upper = arena.new_node()
        low = &arena.nodes[n]
        up = &arena.nodes[upper]
        num_lower = low.num_pages - num_upper
        memcpy(memory.tokens, low.tokens, num_upper * page_size * sizeof(token_t))
        memcpy(memory.pages, low.pages, num_upper * sizeof(page_t))
        up.tokens = memory.tokens
        up.pages = memory.pages
        memory.tokens = NULL
        memory.pages = NULL
        up.parent = low.parent
        up.num_pages = <int32_t>num_upper
        up.lock_ref = low.lock_ref
        up.num_children = 1
        up.key_hash = low.key_hash
        memmove(low.tokens, low.tokens + num_upper * page_size, num_lower * page_size * sizeof(token_t))
        memmove(low.pages, low.pages + num_upper, num_lower * sizeof(page_t))
        low.parent = upper
        low.num_pages = <int32_t>num_lower
        low.key_hash = arena.hash_page(upper, low.tokens)
        self.trim_runs(low)
        arena.index_node(upper)
        arena.index_node(n)
        arena.on_split(upper, n)
        return upper

    cdef int prepare_growth(
        self, Walk *walk, Py_ssize_t num_new, int64_t priority, token_t **own_run, Growth *growth
    ) except -1:
        """All that `attach` of `num_new` pages where `walk` ended needs; `drop_growth` gives it back."""
        memset(growth, 0, sizeof(Growth))
        growth.rank = -1
        growth.own_run = own_run
        self.arena.reserve(2)
        try:
            if num_new > 0:
                self.take_memory(num_new, &growth.leaf, own_run == NULL)
            if self.ends_inside(walk):
                self.take_memory(walk.node_pages, &growth.upper, True)
            growth.rank = self.arena.ensure_class(priority)
        except MemoryError:
            self.drop_growth(growth)
            raise
        return 0

    cdef void drop_growth(self, Growth *growth) noexcept:
        self.give_memory(&growth.leaf)
        self.give_memory(&growth.upper)
        if growth.rank >= 0:
            self.arena.release_class(growth.rank)
            growth.rank = -1

    cdef int64_t handle_after(self, Walk *walk, Py_ssize_t num_new) noexcept nogil:
        """The handle of what `attach` will answer."""
        cdef bint splits = self.ends_inside(walk)
        if splits or num_new > 0:
            return self.arena.next_handle(1 if splits and num_new > 0 else 0)
        return self.arena.handle_of(walk.node)

    cdef node_t attach(
        self, Walk *walk, const token_t *tokens, const page_t *pages, Py_ssize_t num_new, Growth *growth
    ) noexcept:
        """Grow the tree where `walk` ended by `num_new` pages and tell its order; returns the path's deepest node.

        With an own run, one that holds exactly these tokens (and more) already, it becomes the tree's and is set to
        NULL: no copy.
        """
        cdef EvictionOrder arena = self.arena
        cdef node_t n = walk.node, leaf
        cdef token_t *token_run
        cdef Node *node
        if self.ends_inside(walk):
            n = self.split(n, walk.node_pages, &growth.upper)
        if num_new > 0:
            leaf = arena.new_node()
            node = &arena.nodes[leaf]
            if growth.own_run == NULL:
                node.tokens = growth.leaf.tokens
                memcpy(node.tokens, tokens, num_new * self.page_size * sizeof(token_t))
            else:
                node.tokens = growth.own_run[0]
                growth.own_run[0] = NULL
                token_run = arena.runs.resize(node.tokens, num_new * self.page_size, num_new * self.page_size)
                node.tokens = token_run if token_run != NULL else node.tokens
            node.pages = growth.leaf.pages
            memcpy(node.pages, pages, num_new * sizeof(page_t))
            node.parent = n
            node.num_pages = <int32_t>num_new
            node.key_hash = arena.hash_page(n, node.tokens)
            arena.nodes[n].num_children += 1
            arena.join_class(leaf, growth.rank)
            arena.index_node(leaf)
            self.evictable_pages += num_new
            n = leaf
            if self.journal is not None:
                self.journal.on_stored(arena, n, self.root_keys)
        arena.on_insert(n, growth.rank, num_new > 0)
        arena.release_class(growth.rank)
        return n

    # ---- locks, and what goes

    cdef void lock_path(self, node_t n, node_t stop) noexcept nogil:
        """Count a holder on every node from `n` up to, and without, `stop` (or the root)."""
        cdef Node *node
        while n != stop and not self.arena.nodes[n].flags & IS_ROOT:
            node = &self.arena.nodes[n]
            if node.lock_ref == 0:
                self.arena.on_lock(n)
                self.evictable_pages -= node.num_pages
                self.protected_pages += node.num_pages
                if node.flags & IS_DETACHED:
                    self.orphan_pages -= node.num_pages
            node.lock_ref += 1
            n = node.parent

    cdef void unlock_path(self, node_t n) noexcept nogil:
        """Take one holder off the path, child first."""
        cdef Node *node
        while not self.arena.nodes[n].flags & IS_ROOT:
            node = &self.arena.nodes[n]
            node.lock_ref -= 1
            if node.lock_ref == 0:
                self.arena.on_unlock(n)
                self.evictable_pages += node.num_pages
                self.protected_pages -= node.num_pages
                if node.flags & IS_DETACHED:
                    self.orphan_pages += node.num_pages
            n = node.parent

    cdef Py_ssize_t evict_into(self, page_t *out, Py_ssize_t num_pages) noexcept nogil:
        """Move up to `num_pages` page ids to `out`, in the order of the policy, the tail of a node first."""
        cdef int32_t rank = DETACHED_RANK
        cdef Py_ssize_t done = 0, count, i
        cdef Node *node
        cdef node_t n
        while done < num_pages:
            n = self.arena.first_to_go(&rank)
            if n == NO_NODE:
                break
            node = &self.arena.nodes[n]
            self.arena.expect(node.newer)
            count = min(num_pages - done, <Py_ssize_t>node.num_pages)
            for i in range(count):
                out[done + i] = node.pages[node.num_pages - 1 - i]
            done += count
            if not node.flags & IS_DETACHED:
                if self.journal is not None:
                    self.journal.on_removed(out + done - count, count)
                if self.history is not None:
                    self.history.keep(self.arena, n, count)
            node.num_pages -= <int32_t>count
            if node.flags & IS_DETACHED:
                self.orphan_pages -= count
            if node.num_pages == 0:
                self.remove_leaf(n)
            else:
                self.trim_runs(node)
        self.evictable_pages -= done
        return done

    cdef void remove_leaf(self, node_t n) noexcept nogil:
        cdef Node *node = &self.arena.nodes[n]
        cdef Node *parent = &self.arena.nodes[node.parent]
        self.arena.on_remove(n)
        if not node.flags & IS_DETACHED:
            self.arena.unindex_node(n)
        parent.num_children -= 1
        if parent.num_children == 0:
            if not parent.flags & IS_ROOT:
                self.arena.on_childless(node.parent)
            elif not parent.flags & IS_PENDING and node.parent != self.default_root:
                parent.flags |= IS_PENDING
                parent.newer = self.pending_root
                self.pending_root = node.parent
        self.arena.drop_node(n)

    cdef list named_roots(self):
        """``[(extra_key, root)]`` of all namespaces but the default one."""
        return [(key, root) for key, root in self.roots.items() if key is not None]

    cdef Py_ssize_t detach_all(self, page_t *out, list named_roots) noexcept:
        """Empty the index: drop unlocked nodes, their pages to `out`, and leave locked ones to their holders.

        `named_roots` was made before `out` was looked up: an allocation may run the collector, and with it a caller's
        clean-up that gives pages back.
        """
        cdef EvictionOrder arena = self.arena
        cdef Py_ssize_t done = 0
        cdef Node *node
        cdef node_t n
        for n in range(arena.num_used):
            node = &arena.nodes[n]
            if not node.generation & 1 or node.flags & IS_ROOT:
                continue
            if self.journal is not None and not node.flags & IS_DETACHED:
                self.journal.turn(node.pages, node.num_pages)
            if node.lock_ref > 0:
                if not node.flags & IS_DETACHED:
                    arena.unindex_node(n)
                    arena.on_detach(n)
                continue
            memcpy(out + done, node.pages, node.num_pages * sizeof(page_t))
            done += node.num_pages
            self.remove_leaf(n)
        self.evictable_pages = 0
        self.orphan_pages = 0
        self.epoch += 1
        self.drop_pending_roots()
        for key, root in named_roots:
            if key in self.roots:
                arena.nodes[<node_t>root].flags |= IS_DETACHED
                del self.roots[key]
                del self.root_keys[root]
        if self.history is not None:
            self.history.reset()
        if self.journal is not None:
            self.journal.on_cleared()
        return done

    cdef void drop_pending_roots(self) noexcept:
        """Drop the roots that have lost their last child; one for whose end there is no memory waits for the next."""
        cdef node_t root
        while self.pending_root != NO_NODE:
            root = self.pending_root
            self.pending_root = self.arena.nodes[root].newer
            self.arena.nodes[root].newer = NO_NODE
            self.arena.nodes[root].flags &= ~<uint32_t>IS_PENDING
            if self.arena.nodes[root].num_children == 0 and not self.bury(root):
                self.arena.nodes[root].flags |= IS_PENDING
                self.arena.nodes[root].newer = self.pending_root
                self.pending_root = root
                return

    cdef bint bury(self, node_t root) noexcept:
        """Drop a root without children; False, and no change, without memory."""
        cdef int64_t handle = self.arena.handle_of(root)
        try:
            number = root
            key = self.root_keys.get(number)
            if key is not None and self.history is not None:
                self.history.bury_root(handle, key)
        except MemoryError:
            return False
        # These allocations may have run the collector, and with it a clean-up that uses or drops the root.
        if self.arena.handle_of(root) != handle or self.arena.nodes[root].num_children > 0 or (
            self.arena.nodes[root].flags & IS_PENDING
        ):
            return True
        # Without a key it was detached, and struck off then.
        if key is not None:
            del self.roots[key]
            del self.root_keys[number]
        self.arena.drop_node(root)
        self.num_roots -= 1
        return True

    cdef void free_orphans(self) noexcept:
        """Give the pages of unlocked detached nodes to the pool's allocator."""
        cdef Py_ssize_t count = self.orphan_pages
        if count > 0:
            self.evict_into(self.allocator.stack + self.allocator.stack_size, count)
            self.allocator.stack_size += count
            self.drop_pending_roots()

    cdef void trim_runs(self, Node *node) noexcept nogil:
        """Give back the memory behind a node's last page; O(1) in the slab, where it never moves a run."""
        cdef Py_ssize_t n = node.num_pages, num_tokens = n * self.page_size
        cdef token_t *tokens
        cdef page_t *pages
        # Outside of the slab only at powers of two, so that page by page stays O(1) there too.
        if n & (n - 1) == 0 or self.arena.runs.is_inside(node.tokens):
            tokens = self.arena.runs.resize(node.tokens, num_tokens, num_tokens)
            node.tokens = tokens if tokens != NULL else node.tokens
        if n & (n - 1) == 0 or self.arena.id_runs.is_inside(node.pages):
            pages = <page_t *>self.arena.id_runs.resize(<token_t *>node.pages, n, n)
            node.pages = pages if pages != NULL else node.pages
