"""RadixCache: the tree as callers see it. Checked arguments in, plain values out, one crossing a verb.

Which invariants hold, and why, is said in `tree.pyx`, where the work is done.
"""
from libc.stdint cimport int64_t
from libc.string cimport memcpy

import numpy as np

cimport numpy as cnp

from kvpool_ext.arena cimport IS_ROOT
from kvpool_ext.history cimport BY_CALL
from kvpool_ext.namespaces cimport namespace_key
from kvpool_ext.quiet cimport Quiet
from kvpool_ext.reading cimport TreeReading
from kvpool_ext.tokens cimport borrow_pages, borrow_tokens
from kvpool_ext.tree cimport Growth, NodeMemory, Walk, checked_priority
from kvpool_ext.types cimport NO_NODE, node_t, page_t, token_t

from kvpool_ext.views import InsertResult, MatchResult

cnp.import_array()

cdef class RadixCache(TreeReading):
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
        cdef Quiet _quiet = Quiet()
        cdef cnp.ndarray array = borrow_tokens(tokens)
        cdef node_t root = self.root_of(namespace_key(extra_key)), n
        cdef cnp.npy_intp max_pages = cnp.PyArray_DIM(array, 0) // self.page_size, num_pages
        cdef const token_t *data = <const token_t *>cnp.PyArray_DATA(array)
        cdef NodeMemory upper
        cdef int64_t handle
        cdef bint splits
        cdef Walk walk
        self.enter()
        if root == NO_NODE:
            max_pages = 0
            root = self.default_root
        self.busy = True
        with nogil:
            walk = self.walk(root, data, max_pages, NULL)
        self.busy = False
        num_pages = walk.num_pages
        # Neither of these runs the collector: the walk stays true.
        cdef cnp.ndarray pages = cnp.PyArray_EMPTY(1, &num_pages, cnp.NPY_INT32, 0)
        self.copy_path(&walk, <page_t *>cnp.PyArray_DATA(pages))
        if num_pages == 0:
            return plain_tuple(MatchResult, 0, pages, self.arena.handle_of(self.default_root))
        n = walk.node
        handle = self.arena.handle_of(n)
        splits = self.ends_inside(&walk)
        if splits:
            self.prepare_split(walk.node_pages, &upper)
            handle = self.arena.next_handle(0)
        try:
            result = plain_tuple(MatchResult, num_pages * self.page_size, pages, handle)
        except MemoryError:
            if splits:
                self.give_memory(&upper)
            raise
        if splits:
            n = self.split(n, walk.node_pages, &upper)
        self.arena.on_match(n)
        self.verify()
        return result

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
        cdef Quiet _quiet = Quiet()
        cdef cnp.ndarray array = borrow_tokens(tokens)
        cdef cnp.ndarray ids = borrow_pages(pages)
        cdef object key = namespace_key(extra_key)
        cdef int64_t rank_priority = checked_priority(priority)
        cdef Py_ssize_t num_pages = cnp.PyArray_DIM(array, 0) // self.page_size, bad
        cdef const token_t *data = <const token_t *>cnp.PyArray_DATA(array)
        cdef const page_t *page_data = <const page_t *>cnp.PyArray_DATA(ids)
        cdef Walk walk
        cdef Growth growth
        cdef node_t root
        self.enter()
        if cnp.PyArray_DIM(ids, 0) != num_pages:
            raise ValueError(
                f"{cnp.PyArray_DIM(array, 0)} tokens fill {num_pages} pages of {self.page_size}, "
                f"got {cnp.PyArray_DIM(ids, 0)} page ids"
            )
        if num_pages == 0:
            return plain_tuple(InsertResult, 0, self.arena.handle_of(self.default_root))
        is_new = self.root_of(key) == NO_NODE
        root = self.ensure_root(key)
        walk = self.walk(root, data, num_pages, NULL)
        page_data += walk.num_pages
        growth.rank = -1
        bad = -1
        if self.allocator is not None:
            bad = self.allocator.claim_marks(page_data, num_pages - walk.num_pages)
        try:
            if bad >= 0:
                raise ValueError(
                    f"page {page_data[bad]} at position {walk.num_pages + bad} was not taken by alloc, or stands "
                    "twice: insert accepts only pages that the caller took"
                )
            self.prepare_growth(&walk, num_pages - walk.num_pages, rank_priority, NULL, &growth)
            result = plain_tuple(
                InsertResult, walk.num_pages * self.page_size, self.handle_after(&walk, num_pages - walk.num_pages)
            )
        except (MemoryError, ValueError):
            if growth.rank >= 0:
                self.drop_growth(&growth)
            if is_new:
                self.forget_root(key)
            if self.allocator is not None and bad < 0:
                self.allocator.mark(page_data, num_pages - walk.num_pages)
            raise
        self.attach(
            &walk, data + walk.num_pages * self.page_size, page_data, num_pages - walk.num_pages, &growth
        )
        self.verify()
        return result

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
        cdef Quiet _quiet = Quiet()
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
        cdef Quiet _quiet = Quiet()
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
        cdef Quiet _quiet = Quiet()
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
        cdef Quiet _quiet = Quiet()
        self.enter()
        cdef list named_roots = self.named_roots()
        # After the list, which may run the collector; an array does not, so that this is what there will be.
        cdef cnp.npy_intp count = self.evictable_pages
        cdef cnp.ndarray out = cnp.PyArray_EMPTY(1, &count, cnp.NPY_INT32, 0)
        self.detach_all(<page_t *>cnp.PyArray_DATA(out), named_roots)
        if self.allocator is not None:
            self.allocator.mark(<page_t *>cnp.PyArray_DATA(out), count)
        self.verify()
        return out

    cdef void copy_path(self, Walk *walk, page_t *out) noexcept nogil:
        """Page ids of all that a walk from a root matched."""
        cdef Py_ssize_t end = walk.num_pages, count = walk.node_pages
        cdef node_t n = walk.node
        while end > 0:
            end -= count
            memcpy(out + end, self.arena.nodes[n].pages, count * sizeof(page_t))
            n = self.arena.nodes[n].parent
            count = self.arena.nodes[n].num_pages


cdef object plain_tuple(object named, first, second, third=None):
    """A named tuple of two or three values, made without a line of Python, which could change the tree meanwhile."""
    return tuple.__new__(named, (first, second) if third is None else (first, second, third))
