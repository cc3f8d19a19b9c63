"""The page ledger: where the free list, the tree and the holders of pages meet.

Each page is in exactly one state: free, taken (by `take`), the tree's, or private to a lease (held by several leases
of one lineage it still counts once). ``free + taken + tree + private == num_pages`` after every verb. No owner is
written on an internal move: it follows from where the page id stands, and `check` and `locate` look there.

Every verb that needs pages decides first and moves then: a refused one has changed nothing, no split and no recency.
Shortage is an answer (None or False, `needed_pages` says how many were wanted); bad input is an exception.
"""
from libc.stdint cimport INT32_MAX, int32_t, int64_t
from libc.stdlib cimport calloc
from libc.string cimport memcpy

import numpy as np

cimport numpy as cnp

from kvpool_ext.arena cimport IS_ROOT
from kvpool_ext.history cimport BY_ALLOC, BY_BIND, BY_EXTEND, BY_FORK
from kvpool_ext.lease cimport PageLease, new_lease
from kvpool_ext.moves cimport LedgerMoves
from kvpool_ext.tokens cimport borrow_tokens
from kvpool_ext.tree cimport Walk, checked_priority, namespace_key
from kvpool_ext.types cimport NO_NODE, node_t, page_t, token_t

from kvpool_ext.audit import check_ledger, locate

cnp.import_array()


cdef class PageLedger(LedgerMoves):
    """Free list, tree and leases of one pool.

    Parameters
    ----------
    num_pages : int
        Pages of the pool.
    page_size : int
        Tokens per page.
    num_columns : int
        Columns of the written lengths (layers of the pool).
    eviction : str
        Policy of the tree, as `RadixCache` takes it.
    eviction_history : int, optional
        Evicted tokens to remember, 0: none; unless told, as many as the pool holds, of more than 65,536 a sixteenth.
    tree_class : type
        `RadixCache`, or a subclass that follows what callers do to the tree.
    """

    @property
    def private_pages(self):
        """Pages held by leases, shared ones once."""
        return (
            self.allocator.num_pages - self.allocator.c_num_free() - self.allocator.num_taken
            - self.tree.evictable_pages - self.tree.protected_pages
        )

    @property
    def evictable_pages(self):
        """Pages that eviction could take now."""
        return self.tree.evictable_pages

    def gauges(self):
        """Pages by state and requests bound, now, as `KVCachePool.stats` names them."""
        cdef Py_ssize_t num_free = self.allocator.c_num_free(), num_taken = self.allocator.num_taken
        cdef Py_ssize_t evictable = self.tree.evictable_pages, cached = evictable + self.tree.protected_pages
        return {
            "pages_free": num_free,
            "pages_private": self.allocator.num_pages - num_free - num_taken - cached,
            "pages_tree": cached,
            "pages_evictable": evictable,
            "pages_taken": num_taken,
            "requests_bound": len(self.leases),
        }

    # ---- bind

    def bind(self, tokens, capacity, extra_key, priority, bint reuse):
        """Match `tokens`, lock the match, and take private pages up to `capacity` tokens: all or nothing.

        At most ``len(tokens) - 1`` tokens match, for a model must compute one position to get logits.

        Returns
        -------
        PageLease or None
            None when ``needed_pages`` private pages cannot be had now; nothing has changed then.
        """
        cdef cnp.ndarray array = borrow_tokens(tokens)
        cdef object key = namespace_key(extra_key)
        cdef int64_t rank_priority = checked_priority(priority)
        cdef const token_t *data = <const token_t *>cnp.PyArray_DATA(array)
        cdef Py_ssize_t num_tokens = cnp.PyArray_DIM(array, 0)
        cdef Py_ssize_t num_pages = self.pages_for(num_tokens, capacity), need
        cdef PageLease lease
        cdef node_t n
        cdef Walk walk
        self.tree.enter()
        if num_pages > self.allocator.num_pages:
            walk = self.walk_prompt(key, data, num_tokens, reuse, NULL)
            self.needed_pages = num_pages - walk.num_pages
            return None
        lease = new_lease(num_pages, self.tree.arena.runs, self.tree.arena.id_runs)
        walk = self.walk_prompt(key, data, num_tokens, reuse, lease.page_ids)
        need = num_pages - walk.num_pages
        self.needed_pages = need
        if need > self.free_or_evictable() - walk.unlocked_pages:
            return None
        lease.prompt_len = num_tokens
        lease.extra_key = key
        lease.priority = rank_priority
        lease.publishes = reuse
        lease.epoch = self.tree.epoch
        if walk.num_pages > 0:
            n = walk.node
            if self.tree.ends_inside(&walk):
                n = self.tree.split(n, walk.node_pages)
            lease.node = n
            lease.matched_pages = walk.num_pages
            lease.tree_pages = walk.num_pages
            lease.shared_pages = walk.num_pages
            lease.entered_pages = walk.num_pages
        self.admit(lease, walk.num_pages * self.page_size)
        if lease.node != NO_NODE:
            self.tree.arena.on_bind(lease.node)
            self.tree.lock_path(lease.node, NO_NODE)
        self.claim(lease.page_ids + walk.num_pages, need, BY_BIND, self.last_tag)
        # After the eviction, for its memory; and for all tokens to come, so that finish need not copy them. Without
        # memory the lease only knows fewer tokens, and finish compares fewer.
        lease.known_len = walk.num_pages * self.page_size
        lease.known = lease.runs.take(need * self.page_size)
        if lease.known != NULL:
            memcpy(lease.known, data + lease.known_len, (num_tokens - lease.known_len) * sizeof(token_t))
            lease.known_len = num_tokens
        self.verify()
        return lease

    def bind_blank(self, Py_ssize_t num_pages, extra_key, bint publishes):
        """A lease over `num_pages` private pages and no known tokens, or None."""
        cdef object key = namespace_key(extra_key)
        cdef PageLease lease
        self.tree.enter()
        self.needed_pages = num_pages
        if num_pages > self.free_or_evictable():
            return None
        lease = new_lease(num_pages, self.tree.arena.runs, self.tree.arena.id_runs)
        lease.extra_key = key
        lease.publishes = publishes
        lease.epoch = self.tree.epoch
        self.admit(lease, 0)
        self.claim(lease.page_ids, num_pages, BY_BIND, self.last_tag)
        self.verify()
        return lease

    def would_fit(self, tokens, capacity, extra_key, bint reuse):
        """Whether `bind` would succeed now; changes nothing, not even recency."""
        cdef cnp.ndarray array = borrow_tokens(tokens)
        cdef object key = namespace_key(extra_key)
        cdef Py_ssize_t num_tokens = cnp.PyArray_DIM(array, 0)
        cdef Py_ssize_t num_pages = self.pages_for(num_tokens, capacity)
        cdef Walk walk
        self.tree.enter()
        if num_pages > self.allocator.num_pages:
            return False
        walk = self.walk_prompt(key, <const token_t *>cnp.PyArray_DATA(array), num_tokens, reuse, NULL)
        return num_pages - walk.num_pages <= self.free_or_evictable() - walk.unlocked_pages

    def room_if_alone(self, tokens, extra_key, bint reuse):
        """Pages that `tokens` would match, and private pages to be had, once every lease is released.

        Pages that stay out of reach: taken ones, and those locked through `RadixCache.inc_lock_ref`.
        """
        cdef cnp.ndarray array = borrow_tokens(tokens)
        cdef object key = namespace_key(extra_key)
        cdef Py_ssize_t kept = 0
        cdef node_t n
        cdef Walk walk
        self.tree.enter()
        walk = self.walk_prompt(
            key, <const token_t *>cnp.PyArray_DATA(array), cnp.PyArray_DIM(array, 0), reuse, NULL
        )
        locked = set()
        for n in self.tree.user_locks:
            while n not in locked and not self.tree.arena.nodes[n].flags & IS_ROOT:
                locked.add(n)
                kept += self.tree.arena.nodes[n].num_pages
                n = self.tree.arena.nodes[n].parent
        if walk.num_pages > 0:
            n = walk.node
            while not self.tree.arena.nodes[n].flags & IS_ROOT:
                if n not in locked:
                    kept += walk.node_pages if n == walk.node else self.tree.arena.nodes[n].num_pages
                n = self.tree.arena.nodes[n].parent
        return walk.num_pages, self.allocator.num_pages - self.allocator.num_taken - kept

    def pages_for(self, Py_ssize_t num_tokens, capacity):
        """Pages for `capacity` tokens; ValueError for an empty prompt or one longer than that."""
        if num_tokens == 0:
            raise ValueError("the prompt is empty, expected at least one token")
        if type(capacity) is not int:
            if isinstance(capacity, bool) or not isinstance(capacity, (int, np.integer)):
                raise TypeError(f"total_capacity must be an int, got {type(capacity).__name__}")
        # A NumPy scalar would wrap in the sums below.
        capacity = int(capacity)
        if capacity < num_tokens:
            raise ValueError(f"total_capacity is {capacity} tokens, the prompt alone has {num_tokens}")
        return min((capacity + self.page_size - 1) // self.page_size, 1 << 62)

    # ---- while bound

    def extend(self, PageLease lease, Py_ssize_t num_pages):
        """Grow `lease` to `num_pages`, all or nothing; False (and no change) when they cannot be had."""
        cdef Py_ssize_t need = num_pages - lease.num_pages
        cdef page_t *page_ids
        self.tree.enter()
        self.check_live(lease)
        self.needed_pages = max(0, need)
        if need <= 0:
            return True
        if need > self.free_or_evictable():
            return False
        page_ids = <page_t *>lease.id_runs.resize(lease.page_ids, lease.num_pages, num_pages)
        if page_ids == NULL:
            raise MemoryError(f"no memory for {num_pages} page ids")
        lease.page_ids = page_ids
        self.claim(page_ids + lease.num_pages, need, BY_EXTEND, lease.tag)
        lease.num_pages = num_pages
        self.verify()
        return True

    def shrink(self, PageLease lease, Py_ssize_t num_pages):
        """Give back the pages of `lease` from `num_pages` on; they are private and unwritten, the caller says."""
        self.tree.enter()
        self.check_live(lease)
        if num_pages < max(lease.shared_pages, lease.entered_pages):
            raise ValueError(
                f"cannot shrink to {num_pages} pages: {max(lease.shared_pages, lease.entered_pages)} are in use"
            )
        if num_pages < lease.num_pages:
            self.drop_pages(lease, num_pages, lease.num_pages)
            lease.num_pages = num_pages
            lease.num_shrinks += 1
            self.num_losses += 1
        self.verify()

    def mark(self, PageLease lease, length):
        """Declare the first `length` tokens written in every column; False, and no change, past the lease's pages."""
        cdef Py_ssize_t num_tokens
        self.check_live(lease)
        # As a Python number: it may be beyond any of C's.
        if length > lease.num_pages * self.page_size:
            return False
        if length > INT32_MAX:
            raise ValueError(f"a request has at most {INT32_MAX} written tokens, got {length}")
        num_tokens = length
        self.lengths.raise_to(lease.row, num_tokens)
        lease.entered_pages = max(lease.entered_pages, (num_tokens + self.page_size - 1) // self.page_size)
        return True

    def fork(self, PageLease lease, Py_ssize_t num_shared, Py_ssize_t num_pages, Py_ssize_t valid_len):
        """A second lease over the first `num_shared` pages of `lease`, with private pages up to `num_pages`.

        The shared pages become read-only for both and count once; what of them is not the tree's goes to the tree with
        the first holder that publishes, or back to the free list with the last that lets go. None when short. The
        child starts with `valid_len` written tokens.
        """
        cdef Py_ssize_t need = num_pages - num_shared, i, num_known
        cdef PageLease child
        self.tree.enter()
        self.check_live(lease)
        self.needed_pages = need
        if need > self.free_or_evictable():
            return None
        if self.holders == NULL:
            self.holders = <int32_t *>calloc(self.allocator.num_pages + 1, sizeof(int32_t))
            if self.holders == NULL:
                raise MemoryError(f"no memory for the holders of {self.allocator.num_pages} pages")
        child = new_lease(num_pages, lease.runs, lease.id_runs)
        num_known = lease.known_len - lease.matched_pages * self.page_size
        child.known = lease.runs.take(num_known)
        if child.known == NULL:
            raise MemoryError(f"no memory for a prompt of {lease.known_len} tokens")
        memcpy(child.known, lease.known, num_known * sizeof(token_t))
        memcpy(child.page_ids, lease.page_ids, num_shared * sizeof(page_t))
        child.known_len = lease.known_len
        child.prompt_len = lease.prompt_len
        child.matched_pages = lease.matched_pages
        child.tree_pages = lease.tree_pages
        child.entered_pages = num_shared
        child.extra_key = lease.extra_key
        child.priority = lease.priority
        child.publishes = lease.publishes
        child.epoch = lease.epoch
        child.node = lease.node
        child.duplicates = None if lease.duplicates is None else list(lease.duplicates)
        self.admit(child, valid_len)
        if lease.lineage is None:
            lease.lineage = {lease: None}
        child.lineage = lease.lineage
        lease.lineage[child] = None
        for start, end in lease.duplicates or ():
            for i in range(start, end):
                self.add_holder(lease.page_ids[i])
        for i in range(lease.tree_pages, num_shared):
            self.add_holder(lease.page_ids[i])
        lease.shared_pages = max(lease.shared_pages, num_shared)
        child.shared_pages = num_shared
        if child.node != NO_NODE:
            self.tree.lock_path(child.node, NO_NODE)
        self.claim(child.page_ids + num_shared, need, BY_FORK, self.last_tag)
        self.verify()
        return child

    # ---- into the tree, and back

    def checkpoint(self, PageLease lease, tokens, bint reuse):
        """Publish the whole written pages of `tokens` and keep the lease; returns new tokens cached.

        Page ids of the lease stay. Pages that the tree got meanwhile from another lease stay private duplicates here.
        """
        cdef cnp.ndarray array = borrow_tokens(tokens)
        cdef const token_t *data = <const token_t *>cnp.PyArray_DATA(array)
        cdef Py_ssize_t num_tokens = cnp.PyArray_DIM(array, 0), inserted, num_pages, num_known
        cdef Walk walk
        self.tree.enter()
        self.check_live(lease)
        self.verify_tokens(lease, data, num_tokens)
        num_pages = min(num_tokens, self.lengths.minimum(lease.row)) // self.page_size
        if not reuse or not self.may_publish(lease):
            return 0
        if num_pages <= lease.tree_pages:
            self.raise_path(lease, num_pages)
            return 0
        num_known = max(num_pages * self.page_size, lease.known_len)
        self.learn(lease, data, num_known)
        inserted = self.publish(lease, data, num_pages, False, &walk)
        lease.known_len = num_known
        if walk.num_pages > 0:
            if lease.duplicates is None:
                lease.duplicates = []
            lease.duplicates.append((lease.tree_pages, lease.tree_pages + walk.num_pages))
        self.tree.lock_path(walk.node, lease.node)
        lease.node = walk.node
        lease.tree_pages = num_pages
        lease.shared_pages = max(lease.shared_pages, num_pages)
        self.verify()
        return inserted * self.page_size

    def finish(self, PageLease lease, tokens, bint reuse):
        """Publish the whole written pages of `tokens`, then release; returns new tokens cached.

        Raises
        ------
        ValueError
            `tokens` contradict what bind or a checkpoint told; nothing has changed then.
        """
        cdef cnp.ndarray array = borrow_tokens(tokens)
        cdef const token_t *data = <const token_t *>cnp.PyArray_DATA(array)
        cdef Py_ssize_t num_tokens = cnp.PyArray_DIM(array, 0), inserted = 0, num_pages, cached, tree_pages
        cdef Walk walk
        self.tree.enter()
        self.check_live(lease)
        self.verify_tokens(lease, data, num_tokens)
        num_pages = min(num_tokens, self.lengths.minimum(lease.row)) // self.page_size
        tree_pages = lease.tree_pages
        if reuse and self.may_publish(lease) and num_pages <= tree_pages:
            self.raise_path(lease, num_pages)
        if reuse and self.may_publish(lease) and num_pages > tree_pages:
            inserted = self.publish(lease, data, num_pages, True, &walk)
            cached = tree_pages + walk.num_pages
            self.drop_pages(lease, tree_pages, cached)
            self.drop_pages(lease, num_pages, lease.num_pages)
        else:
            self.drop_pages(lease, tree_pages, lease.num_pages)
        self.let_go(lease)
        self.verify()
        return inserted * self.page_size

    def release(self, PageLease lease):
        """Give back everything that `lease` holds; nothing is published."""
        self.tree.enter()
        self.check_live(lease)
        self.drop_pages(lease, lease.tree_pages, lease.num_pages)
        self.let_go(lease)
        self.verify()

    # ---- raw pages

    def take(self, Py_ssize_t num_pages):
        """`num_pages` pages for the caller, int32, evicting where it must; None when they cannot be had."""
        cdef cnp.npy_intp count = num_pages
        self.tree.enter()
        self.needed_pages = num_pages
        if num_pages > self.free_or_evictable():
            return None
        cdef cnp.ndarray out = cnp.PyArray_EMPTY(1, &count, cnp.NPY_INT32, 0)
        self.claim(<page_t *>cnp.PyArray_DATA(out), num_pages, BY_ALLOC, 0)
        self.allocator.mark(<page_t *>cnp.PyArray_DATA(out), num_pages)
        self.verify()
        return out

    def give(self, pages):
        """Take back `pages` (int32), each taken and each once; answers -1, or the position of the first bad one."""
        cdef cnp.ndarray array = borrow_tokens(pages)
        cdef const page_t *data = <const page_t *>cnp.PyArray_DATA(array)
        cdef Py_ssize_t n = cnp.PyArray_DIM(array, 0), bad
        self.tree.enter()
        bad = self.allocator.claim_marks(data, n)
        if bad < 0:
            self.allocator.push(data, n)
            self.verify()
        return bad

    def reset(self):
        """Nothing that is cached now matches again; frees what is unlocked and returns its tokens."""
        cdef Py_ssize_t count
        self.tree.enter()
        named_roots = self.tree.named_roots()
        count = self.tree.detach_all(self.allocator.stack + self.allocator.stack_size, named_roots)
        self.allocator.stack_size += count
        self.verify()
        return count * self.page_size

    # ---- for people, errors and tests

    def locate(self, Py_ssize_t page):
        """Who has `page`: ``(state, holder, position)``.

        The state is ``"free"``, ``"taken"``, ``"private"`` (holder: the lease, position: its page index) or ``"tree"``
        (holder: the `NodeView`). Walks everything.
        """
        return locate(self, page)

    def check(self):
        """Verify that every page has exactly one owner, and every lock a holder; O(pages).

        Raises
        ------
        RuntimeError
            Naming the page and its claimants, or the node whose locks do not add up.
        """
        self.allocator.check()
        self.tree.check()
        check_ledger(self)

    def holders_of(self, Py_ssize_t page):
        """Leases that the ledger counts for a private page."""
        return max(1, self.holders[page] if self.holders != NULL else 0)

    def lock_counts(self):
        """``[(handle, lock_ref, holders)]`` of each node that holds pages: counted, and found by walking all paths."""
        cdef node_t n
        cdef PageLease lease
        starts = dict(self.tree.user_locks)
        for lease in self.leases.values():
            if lease.node != NO_NODE:
                starts[lease.node] = starts.get(lease.node, 0) + 1
        found = {}
        for start, count in starts.items():
            n = start
            while not self.tree.arena.nodes[n].flags & IS_ROOT:
                found[n] = found.get(n, 0) + count
                n = self.tree.arena.nodes[n].parent
        return [
            (self.tree.arena.handle_of(<node_t>n), self.tree.arena.nodes[n].lock_ref, found.get(n, 0))
            for n in range(self.tree.arena.num_used) if self.tree.holds_pages(n)
        ]
