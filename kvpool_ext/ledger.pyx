"""The page ledger: where the free list, the tree and the holders of pages meet.

Each page is in exactly one state: free, taken (by `take`), the tree's, or private to a lease (held by several leases
of one lineage it still counts once). ``free + taken + tree + private == num_pages`` after every verb. No owner is
written on an internal move: it follows from where the page id stands, and `check` and `locate` look there.

Every verb that needs pages decides first and moves then: a refused one has changed nothing, no split and no recency.
Shortage is an answer (None or False, `needed_pages` says how many were wanted); bad input is an exception.
"""
from libc.stdint cimport int32_t, int64_t
from libc.stdlib cimport calloc, free, malloc, realloc
from libc.string cimport memcmp, memcpy

import numpy as np

cimport numpy as cnp

from kvpool_ext.arena cimport IS_ROOT, Node
from kvpool_ext.pages cimport PageAllocator
from kvpool_ext.radix cimport RadixCache, Walk, checked_priority, namespace_key
from kvpool_ext.tokens cimport borrow_tokens
from kvpool_ext.types cimport CHECKED, NO_NODE, node_t, page_t, token_t

cnp.import_array()

cdef enum:
    # Compares longer than this many tokens run without the GIL. Shorter ones keep it: giving it up lets another
    # thread hold the scheduler for a switch interval, a thousand times the compare.
    LONG_COMPARE = 16384


cdef class PageLease:
    """The pages that one holder has over one token sequence; made by `PageLedger` only."""

    def __dealloc__(self):
        free(self.page_ids)
        free(self.known)

    def pages(self):
        """Page ids in order, a new int32 array ``[num_pages]``."""
        cdef cnp.npy_intp n = self.num_pages
        cdef cnp.ndarray out = cnp.PyArray_EMPTY(1, &n, cnp.NPY_INT32, 0)
        memcpy(cnp.PyArray_DATA(out), self.page_ids, n * sizeof(page_t))
        return out

    def private_pages(self):
        """Ids of the pages that are not the tree's, int32; a page shared with forks is among them."""
        pages = self.pages()
        parts = [pages[start:end] for start, end in self.duplicates or ()]
        return np.concatenate([*parts, pages[self.tree_pages:]])

    cdef bint is_read_only(self, Py_ssize_t page) noexcept nogil:
        return page < self.shared_pages


cdef class PageLedger:
    """Free list, tree and leases of one pool.

    Parameters
    ----------
    num_pages : int
        Pages of the pool.
    page_size : int
        Tokens per page.
    """

    def __cinit__(self, num_pages, page_size):
        self.allocator = PageAllocator(num_pages)
        self.tree = RadixCache(page_size)
        self.tree.allocator = self.allocator
        self.page_size = self.tree.page_size
        self.leases = set()

    def __dealloc__(self):
        free(self.holders)

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
        cdef Py_ssize_t num_pages = self.pages_for(num_tokens, capacity), need, num_known
        cdef PageLease lease
        cdef node_t n
        cdef Walk walk
        self.tree.enter()
        if num_pages > self.allocator.num_pages:
            walk = self.walk_prompt(key, data, num_tokens, reuse, NULL)
            self.needed_pages = num_pages - walk.num_pages
            return None
        lease = new_lease(num_pages)
        walk = self.walk_prompt(key, data, num_tokens, reuse, lease.page_ids)
        need = num_pages - walk.num_pages
        self.needed_pages = need
        if need > self.free_or_evictable() - walk.unlocked_pages:
            return None
        lease.known_len = num_tokens
        num_known = num_tokens - walk.num_pages * self.page_size
        lease.known = <token_t *>malloc(num_known * sizeof(token_t))
        if lease.known == NULL:
            raise MemoryError(f"no memory for a prompt of {num_tokens} tokens")
        memcpy(lease.known, data + walk.num_pages * self.page_size, num_known * sizeof(token_t))
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
        self.leases.add(lease)
        if lease.node != NO_NODE:
            self.tree.lock_path(lease.node, NO_NODE)
        self.claim(lease.page_ids + walk.num_pages, need)
        self.verify()
        return lease

    def bind_blank(self, Py_ssize_t num_pages, bint publishes):
        """A lease over `num_pages` private pages and no known tokens, or None."""
        cdef PageLease lease
        self.tree.enter()
        self.needed_pages = num_pages
        if num_pages > self.free_or_evictable():
            return None
        lease = new_lease(num_pages)
        lease.publishes = publishes
        lease.epoch = self.tree.epoch
        self.leases.add(lease)
        self.claim(lease.page_ids, num_pages)
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
        if capacity < num_tokens:
            raise ValueError(f"total_capacity is {capacity} tokens, the prompt alone has {num_tokens}")
        return min((capacity + self.page_size - 1) // self.page_size, 1 << 62)

    # ---- while bound

    def extend(self, PageLease lease, Py_ssize_t num_pages):
        """Grow `lease` to `num_pages`, all or nothing; False (and no change) when they cannot be had."""
        cdef Py_ssize_t need = num_pages - lease.num_pages
        cdef page_t *page_ids
        self.tree.enter()
        self.needed_pages = max(0, need)
        if need <= 0:
            return True
        if need > self.free_or_evictable():
            return False
        page_ids = <page_t *>realloc(lease.page_ids, num_pages * sizeof(page_t))
        if page_ids == NULL:
            raise MemoryError(f"no memory for {num_pages} page ids")
        lease.page_ids = page_ids
        self.claim(page_ids + lease.num_pages, need)
        lease.num_pages = num_pages
        self.verify()
        return True

    def shrink(self, PageLease lease, Py_ssize_t num_pages):
        """Give back the pages of `lease` from `num_pages` on; they are private and unwritten, the caller says."""
        self.tree.enter()
        if num_pages < max(lease.shared_pages, lease.entered_pages):
            raise ValueError(
                f"cannot shrink to {num_pages} pages: {max(lease.shared_pages, lease.entered_pages)} are in use"
            )
        if num_pages < lease.num_pages:
            self.drop_pages(lease, num_pages, lease.num_pages)
            lease.num_pages = num_pages
            lease.num_shrinks += 1
        self.verify()

    def fork(self, PageLease lease, Py_ssize_t num_shared, Py_ssize_t num_pages):
        """A second lease over the first `num_shared` pages of `lease`, with private pages up to `num_pages`.

        The shared pages become read-only for both and count once; what of them is not the tree's goes to the tree with
        the first holder that publishes, or back to the free list with the last that lets go. None when short.
        """
        cdef Py_ssize_t need = num_pages - num_shared, i, num_known
        cdef PageLease child
        self.tree.enter()
        self.needed_pages = need
        if need > self.free_or_evictable():
            return None
        if self.holders == NULL:
            self.holders = <int32_t *>calloc(self.allocator.num_pages + 1, sizeof(int32_t))
            if self.holders == NULL:
                raise MemoryError(f"no memory for the holders of {self.allocator.num_pages} pages")
        child = new_lease(num_pages)
        num_known = lease.known_len - lease.matched_pages * self.page_size
        child.known = <token_t *>malloc(max(1, num_known) * sizeof(token_t))
        if child.known == NULL:
            raise MemoryError(f"no memory for a prompt of {lease.known_len} tokens")
        memcpy(child.known, lease.known, num_known * sizeof(token_t))
        memcpy(child.page_ids, lease.page_ids, num_shared * sizeof(page_t))
        child.known_len = lease.known_len
        child.matched_pages = lease.matched_pages
        child.tree_pages = lease.tree_pages
        child.entered_pages = num_shared
        child.extra_key = lease.extra_key
        child.priority = lease.priority
        child.publishes = lease.publishes
        child.epoch = lease.epoch
        child.node = lease.node
        child.duplicates = None if lease.duplicates is None else list(lease.duplicates)
        if lease.lineage is None:
            lease.lineage = {lease: None}
        child.lineage = lease.lineage
        lease.lineage[child] = None
        self.leases.add(child)
        for start, end in lease.duplicates or ():
            for i in range(start, end):
                self.add_holder(lease.page_ids[i])
        for i in range(lease.tree_pages, num_shared):
            self.add_holder(lease.page_ids[i])
        lease.shared_pages = max(lease.shared_pages, num_shared)
        child.shared_pages = num_shared
        if child.node != NO_NODE:
            self.tree.lock_path(child.node, NO_NODE)
        self.claim(child.page_ids + num_shared, need)
        self.verify()
        return child

    cdef void add_holder(self, page_t page) noexcept nogil:
        self.holders[page] = max(1, self.holders[page]) + 1

    # ---- into the tree, and back

    def checkpoint(self, PageLease lease, tokens, Py_ssize_t valid_len, bint reuse):
        """Publish the whole pages of the first `valid_len` tokens and keep the lease; returns new tokens cached.

        Page ids of the lease stay. Pages that the tree got meanwhile from another lease stay private duplicates here.
        """
        cdef cnp.ndarray array = borrow_tokens(tokens)
        cdef const token_t *data = <const token_t *>cnp.PyArray_DATA(array)
        cdef Py_ssize_t num_tokens = cnp.PyArray_DIM(array, 0), inserted, num_pages, num_known
        cdef Py_ssize_t start = lease.matched_pages * self.page_size
        cdef token_t *known
        cdef Walk walk
        self.tree.enter()
        self.verify_tokens(lease, data, num_tokens)
        num_pages = min(num_tokens, valid_len) // self.page_size
        if not reuse or not self.may_publish(lease):
            return 0
        if num_pages <= lease.tree_pages:
            self.raise_path(lease, num_pages)
            return 0
        if num_pages * self.page_size > lease.known_len:
            num_known = num_pages * self.page_size - start
            known = <token_t *>realloc(lease.known, num_known * sizeof(token_t))
            if known == NULL:
                raise MemoryError(f"no memory for {num_tokens} tokens")
            lease.known = known
            memcpy(
                known + (lease.known_len - start), data + lease.known_len,
                (num_pages * self.page_size - lease.known_len) * sizeof(token_t),
            )
        inserted = self.publish(lease, data, num_pages, &walk)
        if num_pages * self.page_size > lease.known_len:
            lease.known_len = num_pages * self.page_size
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

    def finish(self, PageLease lease, tokens, Py_ssize_t valid_len, bint reuse):
        """Publish the whole pages of the first `valid_len` tokens, then release; returns new tokens cached.

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
        self.verify_tokens(lease, data, num_tokens)
        num_pages = min(num_tokens, valid_len) // self.page_size
        tree_pages = lease.tree_pages
        if reuse and self.may_publish(lease) and num_pages <= tree_pages:
            self.raise_path(lease, num_pages)
        if reuse and self.may_publish(lease) and num_pages > tree_pages:
            inserted = self.publish(lease, data, num_pages, &walk)
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
        self.drop_pages(lease, lease.tree_pages, lease.num_pages)
        self.let_go(lease)
        self.verify()

    cdef bint may_publish(self, PageLease lease) noexcept:
        return lease.publishes and lease.epoch == self.tree.epoch

    cdef Py_ssize_t publish(
        self, PageLease lease, const token_t *tokens, Py_ssize_t num_pages, Walk *walk
    ) except -1:
        """Grow the tree from the lease's node to `num_pages`; returns the pages that were new.

        ``walk.num_pages`` says how many pages beyond ``tree_pages`` were cached already (duplicates of the lease's
        own), ``walk.node`` becomes the deepest node. The walk starts at the handle: what bind matched is not compared
        again.
        """
        cdef Py_ssize_t start = lease.tree_pages, cached, i
        cdef node_t root = lease.node
        if root == NO_NODE:
            root = self.tree.ensure_root(lease.extra_key)
        walk[0] = self.tree.walk(root, tokens + start * self.page_size, num_pages - start, NULL)
        cached = start + walk.num_pages
        walk.node = self.tree.attach(
            walk, tokens + cached * self.page_size, lease.page_ids + cached, num_pages - cached, lease.priority
        )
        if lease.lineage is not None:
            for other in lease.lineage:
                if other is not lease:
                    self.follow(other, lease, num_pages, walk.node, cached)
            for i in range(cached, num_pages):
                self.holders[lease.page_ids[i]] = 0
        return num_pages - cached

    cdef int raise_path(self, PageLease lease, Py_ssize_t num_pages) except -1:
        """An insert that adds no page still raises the priority of the first `num_pages` of the lease's path."""
        cdef node_t n = lease.node
        cdef Py_ssize_t depth = lease.tree_pages
        cdef int32_t rank
        if num_pages == 0:
            return 0
        n = self.node_at(n, &depth, num_pages)
        if self.tree.arena.classes[self.tree.arena.nodes[n].rank].priority >= lease.priority:
            return 0
        rank = self.tree.arena.ensure_class(lease.priority)
        if depth > num_pages:
            n = self.tree.split(n, self.tree.arena.nodes[n].num_pages - (depth - num_pages))
        self.tree.touch(n, rank)
        return 0

    cdef node_t node_at(self, node_t n, Py_ssize_t *depth, Py_ssize_t num_pages) noexcept nogil:
        """The node on the path of `n` that holds page ``num_pages - 1``; `depth` becomes its end."""
        while depth[0] - self.tree.arena.nodes[n].num_pages >= num_pages:
            depth[0] -= self.tree.arena.nodes[n].num_pages
            n = self.tree.arena.nodes[n].parent
        return n

    cdef int follow(
        self, PageLease other, PageLease lease, Py_ssize_t num_pages, node_t deepest, Py_ssize_t cached
    ) except -1:
        """`lease` brought pages to the tree that `other` holds too: lock them there for `other`."""
        cdef Py_ssize_t common = other.tree_pages, depth = num_pages, limit = min(num_pages, other.num_pages)
        cdef node_t n
        while common < limit and other.page_ids[common] == lease.page_ids[common]:
            common += 1
        if common == other.tree_pages:
            return 0
        n = self.node_at(deepest, &depth, common)
        if depth > common:
            n = self.tree.split(n, self.tree.arena.nodes[n].num_pages - (depth - common))
        if cached > other.tree_pages:
            if other.duplicates is None:
                other.duplicates = []
            other.duplicates.append((other.tree_pages, min(common, cached)))
        self.tree.lock_path(n, other.node)
        other.node = n
        other.tree_pages = common
        return 0

    cdef int let_go(self, PageLease lease) except -1:
        """Drop the duplicates and the lock of a lease whose other pages are settled, and end it."""
        for start, end in lease.duplicates or ():
            self.drop_pages(lease, start, end)
        if lease.node != NO_NODE:
            self.tree.unlock_path(lease.node)
            self.tree.free_orphans()
        if lease.lineage is not None:
            del lease.lineage[lease]
            lease.lineage = None
        self.leases.discard(lease)
        lease.live = False
        return 0

    # ---- raw pages

    def take(self, Py_ssize_t num_pages):
        """`num_pages` pages for the caller, int32, evicting where it must; None when they cannot be had."""
        cdef cnp.npy_intp count = num_pages
        self.tree.enter()
        self.needed_pages = num_pages
        if num_pages > self.free_or_evictable():
            return None
        cdef cnp.ndarray out = cnp.PyArray_EMPTY(1, &count, cnp.NPY_INT32, 0)
        self.claim(<page_t *>cnp.PyArray_DATA(out), num_pages)
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
        count = self.tree.detach_all(self.allocator.stack + self.allocator.stack_size)
        self.allocator.stack_size += count
        self.verify()
        return count * self.page_size

    # ---- for people, errors and tests

    def locate(self, Py_ssize_t page):
        """Who has `page`: ``(state, holder, position)``.

        The state is ``"free"``, ``"taken"``, ``"private"`` (holder: the lease, position: its page index) or ``"tree"``
        (holder: the `NodeView`). Walks everything.
        """
        if not 0 <= page < self.allocator.num_pages:
            raise ValueError(f"page {page} is not one of the {self.allocator.num_pages} pages of this pool")
        if self.allocator.taken[page]:
            return "taken", None, 0
        if self.allocator.is_free(page):
            return "free", None, 0
        for view in self.tree.nodes():
            found = np.flatnonzero(view.pages == page)
            if found.size:
                return "tree", view, int(found[0])
        for lease in sorted(self.leases, key=lambda lease: lease.tag or 0):
            found = np.flatnonzero(lease.pages() == page)
            if found.size:
                return "private", lease, int(found[0])
        raise RuntimeError(f"the ledger is out of sync: page {page} has no owner")

    def check(self):
        """Verify that every page has exactly one owner, and every lock a holder; O(pages).

        Raises
        ------
        RuntimeError
            Naming the page and its claimants, or the node whose locks do not add up.
        """
        cdef PageLease lease
        self.allocator.check()
        self.tree.check()
        total = self.allocator.num_pages
        claims = np.zeros(total, np.int64)
        shared = np.zeros(total, np.int64)
        tree_pages = [view.pages for view in self.tree.nodes()]
        groups = [self.allocator.free_pages(), self.allocator.taken_pages(), *tree_pages]
        for group in groups:
            np.add.at(claims, group, 1)
        locks = dict(self.tree.user_locks)
        for lease in self.leases:
            np.add.at(shared, lease.private_pages(), 1)
            if lease.node != NO_NODE:
                locks[lease.node] = locks.get(lease.node, 0) + 1
        claims += shared > 0
        if (claims != 1).any():
            page = int(np.argmax(claims != 1))
            raise RuntimeError(f"the ledger is out of sync: page {page} has {claims[page]} owners: {self.claimants(page)}")
        for page in np.flatnonzero(shared > 0):
            if max(1, self.holders[<Py_ssize_t>page] if self.holders != NULL else 0) != shared[page]:
                raise RuntimeError(
                    f"the ledger is out of sync: page {page} counts {self.holders[<Py_ssize_t>page]} holders, "
                    f"has {shared[page]}"
                )
        self.check_locks(locks)

    def check_locks(self, locks):
        cdef node_t n
        expected = {}
        for handle, count in locks.items():
            n = handle
            while not self.tree.arena.nodes[n].flags & IS_ROOT:
                expected[n] = expected.get(n, 0) + count
                n = self.tree.arena.nodes[n].parent
        for n in range(self.tree.arena.num_used):
            if self.tree.holds_pages(n) and self.tree.arena.nodes[n].lock_ref != expected.get(n, 0):
                raise RuntimeError(
                    f"the ledger is out of sync: node {n} has lock_ref {self.tree.arena.nodes[n].lock_ref}, "
                    f"its holders are {expected.get(n, 0)}"
                )

    def claimants(self, page):
        """Everybody who lists `page`, in words, for the error of `check`."""
        found = []
        if page in self.allocator.free_pages():
            found.append("free list")
        if self.allocator.taken[<Py_ssize_t>page]:
            found.append("taken")
        found += [f"tree node {view.node}" for view in self.tree.nodes() if page in view.pages]
        found += [f"lease {lease.tag}" for lease in self.leases if page in lease.private_pages()]
        return ", ".join(found) or "nobody"

    # ---- inside

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

    cdef int claim(self, page_t *out, Py_ssize_t num_pages) except -1:
        """Move `num_pages` to `out`, free ones first, and evict exactly as many as are short."""
        cdef Py_ssize_t num_free = min(num_pages, self.allocator.c_num_free())
        self.allocator.pop(out, num_free)
        if num_free < num_pages:
            self.tree.evicted_pages += self.tree.evict_into(out + num_free, num_pages - num_free)
            self.tree.drop_pending_roots()
        return 0

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


cdef object contradiction(Py_ssize_t position, token_t got, token_t expected):
    return ValueError(
        f"token {got} at position {position} contradicts token {expected} told at bind or checkpoint: "
        "these are the tokens of another request"
    )


cdef PageLease new_lease(Py_ssize_t num_pages):
    cdef PageLease lease = PageLease.__new__(PageLease)
    lease.page_ids = <page_t *>malloc(max(1, num_pages) * sizeof(page_t))
    if lease.page_ids == NULL:
        raise MemoryError(f"no memory for {num_pages} page ids")
    lease.num_pages = num_pages
    lease.node = NO_NODE
    lease.live = True
    return lease
