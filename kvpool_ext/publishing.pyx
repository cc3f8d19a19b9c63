"""How pages of a lease become the tree's.

In two parts: `prepare` does all that can fail, memory above all, and changes nothing that anyone can see; `publish`
carries the plan out and cannot fail. No line of Python and no run of the collector stands between the walk of the one
and the end of the other, so that the tree is still the one that was walked.
"""
from libc.stdint cimport int32_t
from libc.string cimport memcpy, memset

from kvpool_ext.lease cimport PageLease
from kvpool_ext.memory cimport calloc, free
from kvpool_ext.moves cimport LedgerMoves
from kvpool_ext.tree cimport NodeMemory
from kvpool_ext.types cimport NO_NODE, node_t, page_t, token_t


cdef class LedgerPublishing(LedgerMoves):
    """`prepare` and `publish`; `PageLedger` adds the verbs."""

    cdef object prepare(
        self, PageLease lease, const token_t *tokens, Py_ssize_t num_pages, bint ends, Publication *plan
    ):
        """Plan to grow the tree from the lease's node to `num_pages`; returns the tokens that will be new.

        If the lease `ends` with this, its own copy of the tokens becomes the tree's where it can. The walk starts at
        the lease's node: what bind matched is not compared again. MemoryError changes nothing.
        """
        cdef Py_ssize_t start = lease.tree_pages
        cdef node_t root = lease.node
        cdef token_t **own_run = NULL
        memset(plan, 0, sizeof(Publication))
        plan.num_pages = num_pages
        plan.growth.rank = -1
        if root == NO_NODE:
            plan.made_root = self.tree.root_of(lease.extra_key) == NO_NODE
            root = self.tree.ensure_root(lease.extra_key)
        try:
            # A root may take memory that runs the collector, and with it a clean-up that ends this lease.
            self.check_live(lease)
            plan.walk = self.tree.walk(root, tokens + start * self.page_size, num_pages - start, NULL)
            plan.cached = start + plan.walk.num_pages
            if ends and plan.cached == lease.matched_pages and lease.lineage is None:
                self.learn(lease, tokens, num_pages * self.page_size)
                own_run = &lease.known
            elif not ends and plan.walk.num_pages > 0:
                plan.duplicates = one_more(lease, start, plan.cached)
            self.tree.prepare_growth(&plan.walk, num_pages - plan.cached, lease.priority, own_run, &plan.growth)
            if lease.lineage is not None:
                self.prepare_shares(lease, plan)
            # An int: the collector does not run for it.
            return (num_pages - plan.cached) * self.page_size
        except (MemoryError, RuntimeError):
            self.drop(lease, plan)
            raise

    cdef int prepare_shares(self, PageLease lease, Publication *plan) except -1:
        """Plan for those of the lineage who hold pages that the lease brings to the tree."""
        cdef Py_ssize_t end, limit, num_splits = 0, k
        cdef PageLease other
        cdef Share *share
        cdef bint is_known
        plan.shares = <Share *>calloc(len(lease.lineage), sizeof(Share))
        if plan.shares == NULL:
            raise MemoryError(f"no memory for the {len(lease.lineage)} holders of shared pages")
        for each in lease.lineage:
            other = <PageLease>each
            if other is lease or not other.live:
                continue
            limit = min(plan.num_pages, other.num_pages)
            end = other.tree_pages
            while end < limit and other.page_ids[end] == lease.page_ids[end]:
                end += 1
            if end == other.tree_pages:
                continue
            share = &plan.shares[plan.num_shares]
            plan.num_shares += 1
            share.lease = <void *>other
            share.end = end
            if plan.cached > other.tree_pages:
                share.duplicates = one_more(other, other.tree_pages, min(end, plan.cached))
            # The first with this end splits the path there, for all of them. How long the upper half will be follows
            # from the other ends: as much as up to the lease's node is enough, and the rest is given back.
            is_known = end >= plan.num_pages or end <= lease.tree_pages
            for k in range(plan.num_shares - 1):
                is_known |= plan.shares[k].end == end
            if not is_known:
                self.tree.take_memory(end - lease.tree_pages, &share.upper, True)
                num_splits += 1
        # With the two of the growth.
        self.tree.arena.reserve(2 + num_splits)
        return 0

    cdef void drop(self, PageLease lease, Publication *plan) noexcept:
        """Give back what a plan took that is not carried out."""
        cdef Py_ssize_t k
        self.tree.drop_growth(&plan.growth)
        lease.id_runs.give(<token_t *>plan.duplicates)
        for k in range(plan.num_shares):
            self.tree.give_memory(&plan.shares[k].upper)
            lease.id_runs.give(<token_t *>plan.shares[k].duplicates)
        free(plan.shares)
        if plan.made_root:
            self.tree.forget_root(lease.extra_key)

    cdef void publish(self, PageLease lease, const token_t *tokens, Publication *plan) noexcept:
        """Carry a plan out: ``plan.walk.node`` becomes the deepest node of the path, its lock is the caller's part."""
        cdef Py_ssize_t i
        plan.walk.node = self.tree.attach(
            &plan.walk, tokens + plan.cached * self.page_size, lease.page_ids + plan.cached,
            plan.num_pages - plan.cached, &plan.growth,
        )
        self.inserted_tokens += (plan.num_pages - plan.cached) * self.page_size
        if lease.known == NULL:
            lease.known_len = lease.matched_pages * self.page_size
        if plan.duplicates != NULL:
            replace_duplicates(lease, plan.duplicates)
        if lease.lineage is not None:
            self.publish_shares(lease, plan)
            for i in range(plan.cached, plan.num_pages):
                self.holders[lease.page_ids[i]] = 0

    cdef void publish_shares(self, PageLease lease, Publication *plan) noexcept:
        """Lock the new pages for each other lease that holds them too."""
        cdef Py_ssize_t depth, k
        cdef PageLease other
        cdef Share *share
        cdef node_t n
        for k in range(plan.num_shares):
            share = &plan.shares[k]
            other = <PageLease>share.lease
            depth = plan.num_pages
            n = self.node_at(plan.walk.node, &depth, share.end)
            if depth > share.end:
                n = self.tree.split(n, self.tree.arena.nodes[n].num_pages - (depth - share.end), &share.upper)
                self.tree.trim_runs(&self.tree.arena.nodes[n])
            self.tree.give_memory(&share.upper)
            if share.duplicates != NULL:
                replace_duplicates(other, share.duplicates)
            self.tree.lock_path(n, other.node)
            other.node = n
            other.tree_pages = share.end
        free(plan.shares)

    cdef int raise_path(self, PageLease lease, Py_ssize_t num_pages) except -1:
        """An insert that adds no page still raises the priority of the first `num_pages` of the lease's path."""
        cdef node_t n = lease.node
        cdef Py_ssize_t depth = lease.tree_pages, num_upper
        cdef NodeMemory upper
        cdef int32_t rank
        if num_pages == 0:
            return 0
        n = self.node_at(n, &depth, num_pages)
        if self.tree.arena.classes[self.tree.arena.nodes[n].rank].priority >= lease.priority:
            return 0
        num_upper = self.tree.arena.nodes[n].num_pages - (depth - num_pages)
        if depth > num_pages:
            self.tree.prepare_split(num_upper, &upper)
        try:
            rank = self.tree.arena.ensure_class(lease.priority)
        except MemoryError:
            if depth > num_pages:
                self.tree.give_memory(&upper)
            raise
        if depth > num_pages:
            n = self.tree.split(n, num_upper, &upper)
        self.tree.arena.on_insert(n, rank, False)
        return 0


cdef page_t *one_more(PageLease lease, Py_ssize_t start, Py_ssize_t end) except NULL:
    """The duplicates of a lease and ``[start, end)``, in a run of their own."""
    cdef Py_ssize_t n = lease.num_duplicates
    cdef page_t *duplicates = <page_t *>lease.id_runs.take(2 * (n + 1))
    if duplicates == NULL:
        raise MemoryError(f"no memory for {n + 1} intervals of duplicate pages")
    if n > 0:
        memcpy(duplicates, lease.duplicates, 2 * n * sizeof(page_t))
    duplicates[2 * n] = <page_t>start
    duplicates[2 * n + 1] = <page_t>end
    return duplicates


cdef void replace_duplicates(PageLease lease, page_t *duplicates) noexcept:
    lease.id_runs.give(<token_t *>lease.duplicates)
    lease.duplicates = duplicates
    lease.num_duplicates += 1
