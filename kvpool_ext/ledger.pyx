"""The page ledger: where the free list, the tree and the holders of pages meet.

Each page is in exactly one state: free, taken (by `take`), the tree's, or private to a lease (held by several leases
of one lineage it still counts once). ``free + taken + tree + private == num_pages`` after every verb. No owner is
written on an internal move: it follows from where the page id stands, and `check` and `locate` look there.

Every verb that needs pages decides first and moves then: a refused one has changed nothing, no split and no recency.
Shortage is an answer (None or False, `needed_pages` says how many were wanted); bad input is an exception.
"""
cimport numpy as cnp
from libc.stdint cimport INT32_MAX, int32_t, int64_t
from libc.string cimport memcpy

from kvpool_ext.arena cimport IS_ROOT
from kvpool_ext.binding cimport LedgerBinding
from kvpool_ext.history cimport BY_ALLOC, BY_EXTEND, BY_FORK
from kvpool_ext.lease cimport PageLease, new_lease
from kvpool_ext.memory cimport calloc
from kvpool_ext.publishing cimport Publication
from kvpool_ext.quiet cimport Quiet
from kvpool_ext.tokens cimport borrow_tokens
from kvpool_ext.types cimport NO_NODE, node_t, page_t, token_t

from kvpool_ext.audit import check_ledger, locate

cnp.import_array()


cdef class PageLedger(LedgerBinding):
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
        """Pages by state, requests bound and what is counted of them, now, as `KVCachePool.stats` names them."""
        cdef Quiet _quiet = Quiet()
        cdef Py_ssize_t num_free = self.allocator.c_num_free(), num_taken = self.allocator.num_taken
        cdef Py_ssize_t evictable = self.tree.evictable_pages, cached = evictable + self.tree.protected_pages
        return {
            "pages_free": num_free,
            "pages_private": self.allocator.num_pages - num_free - num_taken - cached,
            "pages_tree": cached,
            "pages_evictable": evictable,
            "pages_taken": num_taken,
            "pages_fetching": len(self.fetching),
            "requests_bound": len(self.leases),
            "prefix_prompt_tokens": self.prompt_tokens,
            "prefix_match_tokens": self.matched_tokens,
            "prefix_insert_tokens": self.inserted_tokens,
            "evicted_pages": self.tree.evicted_pages,
        }

    # ---- while bound

    def extend(self, PageLease lease, Py_ssize_t num_pages):
        """Grow `lease` to `num_pages`, all or nothing; False (and no change) when they cannot be had."""
        cdef Quiet _quiet = Quiet()
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
        cdef Quiet _quiet = Quiet()
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
        cdef Quiet _quiet = Quiet()
        cdef Py_ssize_t need = num_pages - num_shared, i, k, num_known
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
        if num_known > 0:  # else there may be no run: C forbids to copy even nothing from NULL
            memcpy(child.known, lease.known, num_known * sizeof(token_t))
        memcpy(child.page_ids, lease.page_ids, num_shared * sizeof(page_t))
        if lease.num_duplicates > 0:
            child.duplicates = <page_t *>lease.id_runs.take(2 * lease.num_duplicates)
            if child.duplicates == NULL:
                raise MemoryError(f"no memory for {lease.num_duplicates} intervals of duplicate pages")
            memcpy(child.duplicates, lease.duplicates, 2 * lease.num_duplicates * sizeof(page_t))
            child.num_duplicates = lease.num_duplicates
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
        lineage = {lease: None} if lease.lineage is None else lease.lineage
        lineage[child] = None
        try:
            self.admit(child, valid_len)
        except MemoryError:
            del lineage[child]
            raise
        lease.lineage = lineage
        child.lineage = lineage
        for i in range(lease.num_duplicates):
            for k in range(lease.duplicates[2 * i], lease.duplicates[2 * i + 1]):
                self.add_holder(lease.page_ids[k])
        for i in range(lease.tree_pages, num_shared):
            self.add_holder(lease.page_ids[i])
        lease.shared_pages = max(lease.shared_pages, num_shared)
        child.shared_pages = num_shared
        if child.node != NO_NODE:
            self.tree.lock_path(child.node, NO_NODE)
        self.claim(child.page_ids + num_shared, need, BY_FORK, self.last_tag)
        self.verify()
        return child

    def unfork(self, PageLease lease, PageLease child, Py_ssize_t shared_pages):
        """Undo a fork of `lease`, which had `shared_pages` before; what was evicted for it stays evicted."""
        cdef Quiet _quiet = Quiet()
        self.check_live(child)
        self.drop_pages(child, child.tree_pages, child.num_pages)
        self.let_go(child)
        # Others may have forked or ended it meanwhile.
        if lease.live and lease.lineage is not None and len(lease.lineage) == 1:
            lease.lineage = None
            lease.shared_pages = max(shared_pages, lease.tree_pages)
        # Nobody has seen its number.
        if child.tag == self.last_tag:
            self.last_tag -= 1
        self.verify()

    # ---- into the tree, and back

    def checkpoint(self, PageLease lease, tokens, bint reuse):
        """Publish the whole written pages of `tokens` and keep the lease; returns new tokens cached.

        Page ids of the lease stay. Pages that the tree got meanwhile from another lease stay private duplicates here.
        """
        cdef Quiet _quiet = Quiet()
        cdef cnp.ndarray array = borrow_tokens(tokens)
        cdef const token_t *data = <const token_t *>cnp.PyArray_DATA(array)
        cdef Py_ssize_t num_tokens = cnp.PyArray_DIM(array, 0), num_pages, num_known
        cdef Publication plan
        self.tree.enter()
        self.check_live(lease)
        self.verify_tokens(lease, data, num_tokens)
        num_pages = min(num_tokens, self.lengths.minimum(lease.row)) // self.page_size
        if not reuse or not self.may_publish(lease):
            return 0
        num_known = max(num_pages * self.page_size, lease.known_len)
        self.learn(lease, data, num_known)
        if num_pages <= lease.tree_pages:
            # A fork may have brought them there: told they are all the same.
            self.raise_path(lease, num_pages)
            lease.known_len = num_known
            return 0
        inserted = self.prepare(lease, data, num_pages, False, &plan)
        self.publish(lease, data, &plan)
        lease.known_len = num_known
        self.tree.lock_path(plan.walk.node, lease.node)
        lease.node = plan.walk.node
        lease.tree_pages = num_pages
        lease.shared_pages = max(lease.shared_pages, num_pages)
        self.verify()
        return inserted

    def finish(self, PageLease lease, tokens, bint reuse):
        """Publish the whole written pages of `tokens`, then release; returns new tokens cached.

        Raises
        ------
        ValueError
            `tokens` contradict what bind or a checkpoint told; nothing has changed then.
        """
        cdef Quiet _quiet = Quiet()
        cdef cnp.ndarray array = borrow_tokens(tokens)
        cdef const token_t *data = <const token_t *>cnp.PyArray_DATA(array)
        cdef Py_ssize_t num_tokens = cnp.PyArray_DIM(array, 0), num_pages, tree_pages
        cdef Publication plan
        inserted = 0
        self.tree.enter()
        self.check_live(lease)
        self.verify_tokens(lease, data, num_tokens)
        num_pages = min(num_tokens, self.lengths.minimum(lease.row)) // self.page_size
        tree_pages = lease.tree_pages
        if reuse and self.may_publish(lease) and num_pages <= tree_pages:
            self.raise_path(lease, num_pages)
        if reuse and self.may_publish(lease) and num_pages > tree_pages:
            inserted = self.prepare(lease, data, num_pages, True, &plan)
            self.publish(lease, data, &plan)
            self.drop_pages(lease, tree_pages, plan.cached)
            self.drop_pages(lease, num_pages, lease.num_pages)
        else:
            self.drop_pages(lease, tree_pages, lease.num_pages)
        self.let_go(lease)
        self.verify()
        return inserted

    def release(self, PageLease lease):
        """Give back everything that `lease` holds; nothing is published."""
        cdef Quiet _quiet = Quiet()
        self.tree.enter()
        self.check_live(lease)
        self.drop_pages(lease, lease.tree_pages, lease.num_pages)
        self.let_go(lease)
        self.verify()

    # ---- raw pages

    def take(self, Py_ssize_t num_pages):
        """`num_pages` pages for the caller, int32, evicting where it must; None when they cannot be had."""
        cdef Quiet _quiet = Quiet()
        cdef cnp.npy_intp count = num_pages
        self.tree.enter()
        self.needed_pages = num_pages
        if num_pages > self.free_or_evictable():
            return None
        cdef cnp.ndarray out = cnp.PyArray_EMPTY(1, &count, cnp.NPY_INT32, 0)
        self.take_into(<page_t *>cnp.PyArray_DATA(out), num_pages)
        self.verify()
        return out

    def take_slots(self, Py_ssize_t num_pages):
        """As `take`, but all slots of the pages, int64 ``[num_pages * page_size]``."""
        cdef Quiet _quiet = Quiet()
        cdef cnp.npy_intp count = num_pages * self.page_size
        cdef Py_ssize_t i, k
        cdef int64_t *slots
        cdef page_t page
        self.tree.enter()
        self.needed_pages = num_pages
        if num_pages > self.free_or_evictable():
            return None
        cdef cnp.ndarray out = cnp.PyArray_EMPTY(1, &count, cnp.NPY_INT64, 0)
        slots = <int64_t *>cnp.PyArray_DATA(out)
        # The ids come to the front of the array, and become slots from the last one on: nothing is left that can fail.
        self.take_into(<page_t *>slots, num_pages)
        for i in range(num_pages - 1, -1, -1):
            memcpy(&page, <char *>slots + i * sizeof(page_t), sizeof(page_t))
            for k in range(self.page_size):
                slots[i * self.page_size + k] = <int64_t>page * self.page_size + k
        self.verify()
        return out

    cdef void take_into(self, page_t *out, Py_ssize_t num_pages) noexcept:
        self.claim(out, num_pages, BY_ALLOC, 0)
        self.allocator.mark(out, num_pages)

    def give(self, pages):
        """Take back `pages` (int32), each taken and each once; answers -1, or the position of the first bad one.

        A page of `fetching` is a bad one: only the prefetch that it belongs to strikes it off there, and gives it.
        """
        cdef Quiet _quiet = Quiet()
        cdef cnp.ndarray array = borrow_tokens(pages)
        cdef const page_t *data = <const page_t *>cnp.PyArray_DATA(array)
        cdef Py_ssize_t n = cnp.PyArray_DIM(array, 0), bad
        self.tree.enter()
        if self.fetching:
            for bad in range(n):
                if data[bad] in self.fetching:
                    return bad
        bad = self.allocator.claim_marks(data, n)
        if bad < 0:
            self.allocator.push(data, n)
            self.verify()
        return bad

    def reset(self):
        """Nothing that is cached now matches again; frees what is unlocked and returns its tokens."""
        cdef Quiet _quiet = Quiet()
        cdef Py_ssize_t count
        self.tree.enter()
        named_roots = self.tree.named_roots()
        # After the list, which may run the collector; an int does not.
        num_tokens = self.tree.evictable_pages * self.page_size
        count = self.tree.detach_all(self.allocator.stack + self.allocator.stack_size, named_roots)
        self.allocator.stack_size += count
        self.verify()
        return num_tokens

    # ---- for people, errors and tests

    def locate(self, Py_ssize_t page):
        """Who has `page`: ``(state, holder, position)``.

        The state is ``"free"``, ``"taken"``, ``"private"`` (holder: the lease, position: its page index) or ``"tree"``
        (holder: the `NodeView`). Walks everything.
        """
        cdef Quiet _quiet = Quiet()
        return locate(self, page)

    def check(self):
        """Verify that every page has exactly one owner, and every lock a holder; O(pages).

        Raises
        ------
        RuntimeError
            Naming the page and its claimants, or the node whose locks do not add up.
        """
        cdef Quiet _quiet = Quiet()
        self.allocator.check()
        self.tree.check()
        check_ledger(self)

    def holders_of(self, Py_ssize_t page):
        """Leases that the ledger counts for a private page."""
        return max(1, self.holders[page] if self.holders != NULL else 0)

    def lock_counts(self):
        """``[(handle, lock_ref, holders)]`` of each node that holds pages: counted, and found by walking all paths."""
        cdef Quiet _quiet = Quiet()
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
