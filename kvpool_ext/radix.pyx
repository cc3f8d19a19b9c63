"""RadixCache: the tree as callers see it. Checked arguments in, plain values out, one crossing a verb.

Which invariants hold, and why, is said in `tree.pyx`, where the work is done.
"""
from libc.stdint cimport int32_t, int64_t
from libc.string cimport memcpy

import numpy as np

cimport numpy as cnp

from kvpool_ext.arena cimport IS_DETACHED, IS_LINKED, IS_ROOT, IS_WAITING, Node, entry_of
from kvpool_ext.classes cimport DETACHED_RANK, EvictionClass
from kvpool_ext.history cimport BY_CALL
from kvpool_ext.tokens cimport borrow_pages, borrow_tokens
from kvpool_ext.tree cimport RadixTree, Walk, checked_priority, namespace_key
from kvpool_ext.types cimport NO_NODE, node_t, page_t, token_t

from kvpool_ext.audit import check_tree
from kvpool_ext.outline import format_tree
from kvpool_ext.survey import survey_tree
from kvpool_ext.views import InsertResult, MatchResult, NodeView

cnp.import_array()


cdef class RadixCache(RadixTree):
    """A page-granular radix tree over token prefixes with exact eviction.

    Values are page ids, lengths are tokens, and only whole pages are matched and inserted.

    Parameters
    ----------
    page_size : int
        Tokens per page.
    eviction : str
        Which unlocked page of the lowest priority goes first, of `EVICTION_POLICIES`. ``"lru"``: the one whose last
        match, insert or unlock is longest ago. ``"fifo"``: the one that came, or rose to its priority, first; nothing
        refreshes it. ``"lfu"``: the one that the fewest look-ups found, `match_prefix` and binds; among equals as
        ``"lru"``. Always from the end of a prefix: a page goes before the ones that it continues. O(1) a page.
    num_pages : int
        Pages that it will hold at most, for whose tokens memory is touched at once. More is legal;
        0, the default, takes memory as the tree grows.
    eviction_history : int
        Evicted tokens to remember, for `kvpool.KVCachePool.explain`: 4 bytes each, and a record of 88 bytes for each
        run of pages that went at once. 0, the default, remembers nothing; None: as many as `num_pages` hold,
        of more than 65,536 a sixteenth.
    """

    # ---- verbs, in the order a prompt meets them

    def match_prefix(self, tokens, extra_key=None):
        """Find the longest cached prefix of `tokens`, in whole pages.

        Modifies the tree: the match is an access (see `eviction`), and a node that matches in part is split.
        O(tokens compared); the compare runs without the GIL.

        Parameters
        ----------
        tokens : sequence of int
            ``[n]``; an int32 array is read in place.
        extra_key : str, bytes, int or None
            Namespace; nothing is shared across namespaces.

        Returns
        -------
        MatchResult
            ``(length, pages, node)``. The pages are the tree's: lock the node to keep them.
        """
        try:
            self.gate.c_enter()
            return self.c_match_prefix(tokens, extra_key)
        finally:
            self.gate.c_leave()

    cdef object c_match_prefix(self, tokens, extra_key):
        cdef cnp.ndarray array = borrow_tokens(tokens)
        cdef node_t root = self.root_of(namespace_key(extra_key)), n
        cdef cnp.npy_intp max_pages = cnp.PyArray_DIM(array, 0) // self.page_size
        cdef const token_t *data = <const token_t *>cnp.PyArray_DATA(array)
        cdef Walk walk
        self.enter()
        if root == NO_NODE:
            max_pages = 0
            root = self.default_root
        cdef cnp.ndarray pages = cnp.PyArray_EMPTY(1, &max_pages, cnp.NPY_INT32, 0)
        cdef page_t *out = <page_t *>cnp.PyArray_DATA(pages)
        self.busy = True
        with nogil:
            walk = self.walk(root, data, max_pages, out)
        self.busy = False
        if walk.num_pages == 0:
            return MatchResult(0, pages[:0], self.arena.handle_of(self.default_root))
        n = walk.node
        if self.ends_inside(&walk):
            n = self.split(n, walk.node_pages)
        self.arena.on_match(n)
        self.verify()
        if walk.num_pages < max_pages:
            pages = pages[: walk.num_pages]
        return MatchResult(walk.num_pages * self.page_size, pages, self.arena.handle_of(n))

    def insert(self, tokens, pages, extra_key=None, priority=0):
        """Cache the whole pages of `tokens` under `pages`; what is cached already keeps its own pages.

        Modifies the tree. The ids of ``pages[prefix_len / page_size:]`` belong to the tree afterwards (on a pool they
        must have been taken by `alloc`), the ids before them stay the caller's.

        Parameters
        ----------
        tokens : sequence of int
            ``[n]``; a tail that fills no page is ignored.
        pages : sequence of int
            ``[n // page_size]``, one page id per whole page.
        extra_key : str, bytes, int or None
            Namespace.
        priority : int
            Lower is evicted first. Ancestors are raised to it for good.

        Returns
        -------
        InsertResult
            ``(prefix_len, node)``: tokens that were cached before.

        Raises
        ------
        ValueError
            Another number of pages than whole pages of tokens; on a pool also a page that `alloc` did not hand out.
        """
        try:
            self.gate.c_enter()
            return self.c_insert(tokens, pages, extra_key, priority)
        finally:
            self.gate.c_leave()

    cdef object c_insert(self, tokens, pages, extra_key, priority):
        cdef cnp.ndarray array = borrow_tokens(tokens)
        cdef cnp.ndarray ids = borrow_pages(pages)
        cdef object key = namespace_key(extra_key)
        cdef int64_t rank_priority = checked_priority(priority)
        cdef Py_ssize_t num_pages = cnp.PyArray_DIM(array, 0) // self.page_size, bad
        cdef const token_t *data = <const token_t *>cnp.PyArray_DATA(array)
        cdef const page_t *page_data = <const page_t *>cnp.PyArray_DATA(ids)
        cdef Walk walk
        cdef node_t n, root
        self.enter()
        if cnp.PyArray_DIM(ids, 0) != num_pages:
            raise ValueError(
                f"{cnp.PyArray_DIM(array, 0)} tokens fill {num_pages} pages of {self.page_size}, "
                f"got {cnp.PyArray_DIM(ids, 0)} page ids"
            )
        if num_pages == 0:
            return InsertResult(0, self.arena.handle_of(self.default_root))
        root = self.root_of(key)
        if root == NO_NODE:
            walk = Walk(NO_NODE, 0, 0, 0)
        else:
            walk = self.walk(root, data, num_pages, NULL)
        if self.allocator is not None:
            bad = self.allocator.claim_marks(page_data + walk.num_pages, num_pages - walk.num_pages)
            if bad >= 0:
                raise ValueError(
                    f"page {page_data[walk.num_pages + bad]} at position {walk.num_pages + bad} was not taken "
                    "by alloc, or stands twice: insert accepts only pages that the caller took"
                )
        try:
            if root == NO_NODE:
                walk.node = self.ensure_root(key)
            n = self.attach(
                &walk, data + walk.num_pages * self.page_size, page_data + walk.num_pages,
                num_pages - walk.num_pages, rank_priority, NULL,
            )
        except MemoryError:
            if self.allocator is not None:
                self.allocator.mark(page_data + walk.num_pages, num_pages - walk.num_pages)
            raise
        self.verify()
        return InsertResult(walk.num_pages * self.page_size, self.arena.handle_of(n))

    def evict(self, num_tokens):
        """Take ``ceil(num_tokens / page_size)`` pages out of the tree, or all it can; int32, in eviction order.

        Modifies the tree. The pages are the caller's afterwards (on a pool: taken, for `pool.free`). O(1) a page.
        """
        try:
            self.gate.c_enter()
            return self.c_evict(num_tokens)
        finally:
            self.gate.c_leave()

    cdef object c_evict(self, num_tokens):
        if isinstance(num_tokens, bool) or not isinstance(num_tokens, (int, np.integer)):
            raise TypeError(f"num_tokens must be an int, got {type(num_tokens).__name__}")
        num_tokens = int(num_tokens)
        if num_tokens < 0:
            raise ValueError(f"num_tokens must be >= 0, got {num_tokens}")
        self.enter()
        cdef cnp.npy_intp count = min(-(-num_tokens // self.page_size), self.evictable_pages)
        cdef cnp.ndarray out = cnp.PyArray_EMPTY(1, &count, cnp.NPY_INT32, 0)
        if self.history is not None:
            self.history.begin(BY_CALL, 0)
        self.evicted_pages += self.evict_into(<page_t *>cnp.PyArray_DATA(out), count)
        self.drop_pending_roots()
        if self.allocator is not None:
            self.allocator.mark(<page_t *>cnp.PyArray_DATA(out), count)
        self.verify()
        return out

    def inc_lock_ref(self, node):
        """Protect `node` and its ancestors from eviction; the root may be locked, a no-op."""
        try:
            self.gate.c_enter()
            return self.c_inc_lock_ref(node)
        finally:
            self.gate.c_leave()

    cdef object c_inc_lock_ref(self, node):
        self.enter()
        cdef node_t n = self.arena.resolve(node)
        if self.arena.nodes[n].flags & IS_ROOT:
            return
        self.user_locks[n] = self.user_locks.get(n, 0) + 1
        self.lock_path(n, NO_NODE)

    def dec_lock_ref(self, node):
        """Undo one `inc_lock_ref` of this node; the last unlock of a page is an access (see `eviction`).

        Raises
        ------
        ValueError
            No lock of the caller's is left on `node`, or the handle is stale.
        """
        try:
            self.gate.c_enter()
            return self.c_dec_lock_ref(node)
        finally:
            self.gate.c_leave()

    cdef object c_dec_lock_ref(self, node):
        self.enter()
        cdef node_t n = self.arena.resolve(node)
        if self.arena.nodes[n].flags & IS_ROOT:
            return
        held = self.user_locks.get(n, 0)
        if held == 0:
            raise ValueError(f"node {node} holds no lock of inc_lock_ref: lock_ref cannot go below zero")
        if held == 1:
            del self.user_locks[n]
        else:
            self.user_locks[n] = held - 1
        self.unlock_path(n)
        if self.allocator is not None:
            self.free_orphans()
        self.verify()

    def reset(self):
        """Forget everything: nothing that is cached now will ever match again.

        Unlocked nodes go, and their pages are returned as int32 (on a pool: taken, for `pool.free`). Locked nodes
        leave the index at once and count as protected until their last unlock; then a pool frees them, while a tree on
        its own hands them out by the next `evict`, before any other page.
        """
        try:
            self.gate.c_enter()
            return self.c_reset()
        finally:
            self.gate.c_leave()

    cdef object c_reset(self):
        self.enter()
        # Room for all: what is locked now may be unlocked by a clean-up that these allocations set off.
        cdef cnp.npy_intp count = self.evictable_pages + self.protected_pages
        cdef cnp.ndarray out = cnp.PyArray_EMPTY(1, &count, cnp.NPY_INT32, 0)
        cdef list named_roots = self.named_roots()
        out = out[:self.detach_all(<page_t *>cnp.PyArray_DATA(out), named_roots)].copy()
        if self.allocator is not None:
            self.allocator.mark(<page_t *>cnp.PyArray_DATA(out), cnp.PyArray_SIZE(out))
        self.verify()
        return out

    # ---- sizes

    @property
    def evictable_size(self):
        """Tokens that eviction could take now."""
        return self.evictable_pages * self.page_size

    @property
    def protected_size(self):
        """Tokens on locked paths."""
        return self.protected_pages * self.page_size

    @property
    def total_size(self):
        """Tokens held."""
        return (self.evictable_pages + self.protected_pages) * self.page_size

    @property
    def num_nodes(self):
        """Nodes that hold pages; roots do not count."""
        return self.arena.num_live - self.num_roots

    @property
    def namespaces(self):
        """The extra keys that have cached pages (None is always there)."""
        return list(self.roots)

    # ---- for people and tests

    def nodes(self):
        """Yield every node as a plain read-only `NodeView`, in arena order; the tree must not change meanwhile."""
        cdef node_t n
        self.gate.check()
        starts, keys = self._paths()
        for n in range(self.arena.num_used):
            self.gate.check()
            if self.holds_pages(n):
                yield self._view(n, starts[n], keys[n])

    def survey(self):
        """All nodes at once as a `TreeSurvey` of NumPy columns; O(nodes + pages), for pictures and sums."""
        try:
            self.gate.c_enter()
            return survey_tree(self)
        finally:
            self.gate.c_leave()

    def format_tree(self, *, max_nodes=100, max_depth=16, tokens=6):
        """The tree as text, one node a line; what the limits cut is summed up in a line of its own.

        A node shows its token range, its pages, locks and priority, and its place among the victims of eviction (#1
        goes first). The largest subtrees are shown, larger before smaller.

        Parameters
        ----------
        max_nodes, max_depth : int or None
            Nodes to show in all, and levels under a namespace; None for no limit.
        tokens : int or None
            Tokens to show of a node: half of them its first, half its last. None for all.

        Raises
        ------
        ValueError, TypeError
            A limit that is no number, or below 0 (`max_depth`: below 1).
        """
        try:
            self.gate.c_enter()
            return format_tree(self, max_nodes, max_depth, tokens)
        finally:
            self.gate.c_leave()

    def memory(self):
        """Bytes that the tree has for tokens and page ids, as a dict.

        ``slab_bytes`` were touched when it was made; ``runs_in_use_bytes`` of them, and of ``outside_bytes`` beside
        them, hold something: on a pool also for bound requests. ``node_bytes``: headers, hash index, and the classes
        and the heap of their order. ``history_bytes`` of the same memory hold evicted prefixes,
        ``history_record_bytes`` say where they stood.
        """
        runs, ids = self.arena.runs, self.arena.id_runs
        records, remembered = (0, 0) if self.history is None else self.history.memory()
        return {
            "slab_bytes": runs.slab_bytes + ids.slab_bytes,
            "outside_bytes": runs.bytes_outside + ids.bytes_outside,
            "runs_in_use_bytes": (
                runs.slab_bytes_in_use + runs.bytes_outside + ids.slab_bytes_in_use + ids.bytes_outside - remembered
            ),
            "history_bytes": remembered,
            "history_record_bytes": records,
            "node_bytes": (
                self.arena.capacity * (sizeof(Node) + sizeof(node_t))
                + self.arena.class_capacity * sizeof(EvictionClass) + self.arena.waiting_capacity * sizeof(node_t)
            ),
        }

    def check(self):
        """Verify (I1) to (I6) over the whole tree, O(pages); RuntimeError says what is out of sync."""
        try:
            self.gate.c_enter()
            self.arena.runs.check()
            self.arena.id_runs.check()
            if self.history is not None:
                self.history.check()
            check_tree(self._snapshot())
        finally:
            self.gate.c_leave()

    def _paths(self):
        """First token position and namespace of each node, by node index."""
        cdef node_t n, parent
        starts, keys = {}, {}
        for n in range(self.arena.num_used):
            if not self.holds_pages(n):
                continue
            chain = []
            parent = n
            while parent not in starts and not self.arena.nodes[parent].flags & IS_ROOT:
                chain.append(parent)
                parent = self.arena.nodes[parent].parent
            if self.arena.nodes[parent].flags & IS_ROOT:
                start, key = 0, self.root_keys.get(parent)
            else:
                start = starts[parent] + self.arena.nodes[parent].num_pages * self.page_size
                key = keys[parent]
            for link in reversed(chain):
                starts[link], keys[link] = start, key
                start += self.arena.nodes[<node_t>link].num_pages * self.page_size
        return starts, keys

    def _view(self, node_t n, start, key):
        cdef Node *node = &self.arena.nodes[n]
        cdef cnp.npy_intp num_pages = node.num_pages, num_tokens = node.num_pages * self.page_size
        cdef cnp.ndarray tokens = cnp.PyArray_EMPTY(1, &num_tokens, cnp.NPY_INT32, 0)
        cdef cnp.ndarray pages = cnp.PyArray_EMPTY(1, &num_pages, cnp.NPY_INT32, 0)
        memcpy(cnp.PyArray_DATA(tokens), node.tokens, num_tokens * sizeof(token_t))
        memcpy(cnp.PyArray_DATA(pages), node.pages, num_pages * sizeof(page_t))
        return NodeView(
            self.arena.handle_of(n), self.arena.handle_of(node.parent), key, start, tokens, pages,
            node.lock_ref, self.arena.classes[node.rank].priority, node.num_children,
            bool(node.flags & IS_DETACHED),
        )

    def _snapshot(self):
        """Everything that `check_tree` compares, as plain Python values."""
        cdef node_t n
        cdef int32_t rank = DETACHED_RANK
        cdef EvictionClass *cls
        cdef Node *node
        nodes = {}
        for n in range(self.arena.num_used):
            node = &self.arena.nodes[n]
            if not node.generation & 1:
                continue
            is_root = bool(node.flags & IS_ROOT)
            detached = bool(node.flags & IS_DETACHED)
            found = None
            if not is_root and not detached and node.num_pages > 0:
                found = self.arena.find_child(node.parent, node.tokens)
            nodes[n] = dict(
                parent=node.parent, is_root=is_root, detached=detached,
                linked=bool(node.flags & IS_LINKED), waiting=bool(node.flags & IS_WAITING), lock_ref=node.lock_ref,
                rank=node.rank, entry=entry_of(node), num_children=node.num_children, found=found,
                pages=[node.pages[i] for i in range(node.num_pages)],
            )
        classes = []
        while True:
            cls = &self.arena.classes[rank]
            members, n, before = [], cls.oldest, NO_NODE
            while n != NO_NODE:
                members.append((n, self.arena.nodes[n].older == before))
                before, n = n, self.arena.nodes[n].newer
            classes.append(dict(
                rank=rank, priority=cls.priority, uses=cls.uses, head=cls.head, num_nodes=cls.num_nodes, members=members,
                linked_back=self.arena.classes[cls.next_rank].prev_rank == rank,
                next_head=cls.next_head, prev_head=cls.prev_head,
            ))
            rank = cls.next_rank
            if rank == DETACHED_RANK:
                break
        return dict(
            nodes=nodes, classes=classes, policy=self.eviction,
            waiting=[(self.arena.waiting[i], self.arena.nodes[self.arena.waiting[i]].older)
                     for i in range(self.arena.num_waiting)],
            evictable=self.evictable_pages, protected=self.protected_pages,
            orphans=self.orphan_pages, num_live=self.arena.num_live, roots=dict(self.roots),
            user_locks=dict(self.user_locks),
        )
