"""How prompts come into the ledger: what a bind matches, whether it fits, and what it takes.

Each verb first does all that can fail, the memory of a split and the place in the books above all, and then changes
the tree and the free list by moves that cannot. So a bind that fails, for whatever reason, has changed nothing.
"""
from libc.stdint cimport int64_t
from libc.string cimport memcpy

import numpy as np

cimport numpy as cnp

from kvpool_ext.arena cimport IS_ROOT
from kvpool_ext.history cimport BY_BIND
from kvpool_ext.lease cimport PageLease, new_lease
from kvpool_ext.namespaces cimport namespace_key
from kvpool_ext.publishing cimport LedgerPublishing
from kvpool_ext.quiet cimport Quiet
from kvpool_ext.tokens cimport borrow_tokens
from kvpool_ext.tree cimport NodeMemory, Walk, checked_priority
from kvpool_ext.types cimport NO_NODE, node_t, token_t

cnp.import_array()


cdef class LedgerBinding(LedgerPublishing):
    """The verbs of binding; `PageLedger` adds the others."""

    # ---- bind

    def bind(self, tokens, capacity, extra_key, priority, bint reuse):
        """Match `tokens`, lock the match, and take private pages up to `capacity` tokens: all or nothing.

        At most ``len(tokens) - 1`` tokens match, for a model must compute one position to get logits.

        Returns
        -------
        PageLease or None
            None when ``needed_pages`` private pages cannot be had now; nothing has changed then.
        """
        cdef Quiet _quiet = Quiet()
        cdef cnp.ndarray array = borrow_tokens(tokens)
        cdef object key = namespace_key(extra_key)
        cdef int64_t rank_priority = checked_priority(priority)
        cdef const token_t *data = <const token_t *>cnp.PyArray_DATA(array)
        cdef Py_ssize_t num_tokens = cnp.PyArray_DIM(array, 0)
        cdef Py_ssize_t num_pages = self.pages_for(num_tokens, capacity), need
        cdef NodeMemory upper
        cdef PageLease lease
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
        self.admit(lease, walk.num_pages * self.page_size)
        if walk.num_pages > 0 and self.tree.ends_inside(&walk):
            try:
                self.tree.prepare_split(walk.node_pages, &upper)
            except MemoryError:
                self.strike(lease)
                raise
        self.hold(lease, &walk, &upper, data)
        self.verify()
        return lease

    cdef void hold(self, PageLease lease, Walk *walk, NodeMemory *upper, const token_t *tokens) noexcept:
        """Lock what a prompt matched, take the lease's other pages, and remember the prompt; nothing can fail now.

        The pages are there, the caller knows, and `upper` is for the split where the walk ended inside of a node.
        """
        cdef Py_ssize_t need = lease.num_pages - walk.num_pages, num_tokens = lease.prompt_len
        cdef node_t n = walk.node
        if walk.num_pages > 0:
            if self.tree.ends_inside(walk):
                n = self.tree.split(n, walk.node_pages, upper)
            lease.node = n
            lease.matched_pages = walk.num_pages
            lease.tree_pages = walk.num_pages
            lease.shared_pages = walk.num_pages
            lease.entered_pages = walk.num_pages
            self.tree.arena.on_bind(n)
            self.tree.lock_path(n, NO_NODE)
        self.claim(lease.page_ids + walk.num_pages, need, BY_BIND, self.last_tag)
        # After the eviction, for its memory; and for all tokens to come, so that finish need not copy them. Without
        # memory the lease only knows fewer tokens, and finish compares fewer.
        lease.known_len = walk.num_pages * self.page_size
        lease.known = lease.runs.take(need * self.page_size)
        if lease.known != NULL:
            memcpy(lease.known, tokens + lease.known_len, (num_tokens - lease.known_len) * sizeof(token_t))
            lease.known_len = num_tokens
        if lease.publishes:
            self.prompt_tokens += num_tokens
            self.matched_tokens += walk.num_pages * self.page_size

    def take_back(self, PageLease lease):
        """End a lease that its caller has not come to know of: its prompt counts for nothing.

        What was evicted for it stays evicted, its match was an access, and its number is used up.
        """
        cdef Quiet _quiet = Quiet()
        self.check_live(lease)
        if lease.publishes and lease.prompt_len > 0:
            self.prompt_tokens -= lease.prompt_len
            self.matched_tokens -= lease.matched_pages * self.page_size
        self.drop_pages(lease, lease.tree_pages, lease.num_pages)
        self.let_go(lease)
        self.verify()

    # ---- bind, and release every other lease

    def bind_alone(self, tokens, capacity, extra_key, bint reuse):
        """Release every lease, and `bind` one; None, and no change, if not even that makes room for it.

        ``lease.matched_len`` says the match in tokens.
        """
        cdef Quiet _quiet = Quiet()
        cdef cnp.ndarray array = borrow_tokens(tokens)
        cdef object key = namespace_key(extra_key)
        cdef const token_t *data = <const token_t *>cnp.PyArray_DATA(array)
        cdef Py_ssize_t num_tokens = cnp.PyArray_DIM(array, 0)
        cdef Py_ssize_t num_pages = self.pages_for(num_tokens, capacity)
        cdef NodeMemory upper
        cdef PageLease lease
        cdef Walk walk
        _, room = self.room_if_alone(array, key, reuse)
        if num_pages > self.allocator.num_pages:
            return None
        others = list(self.leases.values())
        lease = new_lease(num_pages, self.tree.arena.runs, self.tree.arena.id_runs)
        walk = self.walk_prompt(key, data, num_tokens, reuse, lease.page_ids)
        if num_pages - walk.num_pages > room:
            return None
        lease.prompt_len = num_tokens
        lease.extra_key = key
        lease.publishes = reuse
        lease.epoch = self.tree.epoch
        lease.matched_len = walk.num_pages * self.page_size
        self.lengths.reserve(1)
        self.enlist(lease)
        if walk.num_pages > 0 and self.tree.ends_inside(&walk):
            try:
                self.tree.prepare_split(walk.node_pages, &upper)
            except MemoryError:
                self.strike(lease)
                raise
        self.release_all(others)
        self.start(lease, walk.num_pages * self.page_size)
        self.hold(lease, &walk, &upper, data)
        self.verify()
        return lease

    def bind_equal(self, Py_ssize_t batch_size, Py_ssize_t num_pages, extra_key, bint publishes):
        """Release every lease, and make `batch_size` new ones over `num_pages` private pages each, without tokens.

        Returns
        -------
        tuple or None
            The leases and their tags, two lists; None, and no change, if releasing all does not make room for them.
        """
        cdef Quiet _quiet = Quiet()
        cdef object key = namespace_key(extra_key)
        cdef PageLease lease
        _, room = self.room_if_alone((), None, False)
        if batch_size * num_pages > room:
            return None
        others, leases = list(self.leases.values()), []
        for _ in range(batch_size):
            lease = new_lease(num_pages, self.tree.arena.runs, self.tree.arena.id_runs)
            lease.extra_key = key
            lease.publishes = publishes
            lease.epoch = self.tree.epoch
            leases.append(lease)
        tags = list(range(self.last_tag + 1, self.last_tag + 1 + batch_size))
        answer = (leases, tags)
        self.lengths.reserve(batch_size)
        try:
            for each in leases:
                self.enlist(each)
        except MemoryError:
            for each in reversed(leases):
                lease = each
                if lease.tag is not None and lease.tag in self.leases:
                    self.strike(lease)
            raise
        self.release_all(others)
        for each in leases:
            lease = each
            self.start(lease, 0)
            self.claim(lease.page_ids, num_pages, BY_BIND, lease.tag)
        self.verify()
        return answer

    cdef void release_all(self, list others) noexcept:
        cdef PageLease lease
        for each in others:
            lease = each
            if lease.live:
                self.drop_pages(lease, lease.tree_pages, lease.num_pages)
                self.let_go(lease)

    def bind_blank(self, Py_ssize_t num_pages, extra_key, bint publishes):
        """A lease over `num_pages` private pages and no known tokens, or None."""
        cdef Quiet _quiet = Quiet()
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
        """Whether `bind` would succeed now; changes nothing, not even recency.

        What prefetches hold counts as free: they give way to a bind.
        """
        cdef cnp.ndarray array = borrow_tokens(tokens)
        cdef object key = namespace_key(extra_key)
        cdef Py_ssize_t num_tokens = cnp.PyArray_DIM(array, 0)
        cdef Py_ssize_t num_pages = self.pages_for(num_tokens, capacity)
        cdef Walk walk
        self.tree.enter()
        if num_pages > self.allocator.num_pages:
            return False
        walk = self.walk_prompt(key, <const token_t *>cnp.PyArray_DATA(array), num_tokens, reuse, NULL)
        need = num_pages - walk.num_pages + walk.unlocked_pages
        return need <= self.free_or_evictable() or need <= self.free_or_evictable() + self.fetch_room(&walk)

    def room_of_fetches(self):
        """Pages that could be had besides the free and the evictable ones, if all prefetches ended."""
        cdef Walk walk
        walk.num_pages = 0
        return self.fetch_room(&walk)

    cdef Py_ssize_t fetch_room(self, Walk *walk) except -1:
        """As `room_of_fetches`, without what `walk` matched."""
        cdef Quiet _quiet = Quiet()
        cdef Py_ssize_t room = len(self.fetching), matched
        cdef dict counts = {}
        cdef node_t n
        for handle in self.fetch_nodes.values():
            n = self.tree.arena.resolve(handle)
            while not self.tree.arena.nodes[n].flags & IS_ROOT:
                counts[n] = counts.get(n, 0) + 1
                n = self.tree.arena.nodes[n].parent
        for n, count in counts.items():
            if self.tree.arena.nodes[n].lock_ref == count:
                room += self.tree.arena.nodes[n].num_pages
        if walk.num_pages > 0:
            n, matched = walk.node, walk.node_pages
            while not self.tree.arena.nodes[n].flags & IS_ROOT:
                if n in counts and self.tree.arena.nodes[n].lock_ref == counts[n]:
                    room -= matched
                n = self.tree.arena.nodes[n].parent
                matched = self.tree.arena.nodes[n].num_pages
        return room

    def room_if_alone(self, tokens, extra_key, bint reuse):
        """Pages that `tokens` would match, and private pages to be had, once every lease is released.

        Pages that stay out of reach: taken ones, and those locked through `RadixCache.inc_lock_ref`.
        """
        cdef Quiet _quiet = Quiet()
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
