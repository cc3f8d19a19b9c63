"""TreeReading: what can be read off a tree without changing it, sizes first, then its nodes for people and tests."""
cimport numpy as cnp
from libc.stdint cimport int32_t
from libc.string cimport memcpy

from kvpool_ext.arena cimport IS_DETACHED, IS_LINKED, IS_ROOT, IS_WAITING, Node, entry_of
from kvpool_ext.classes cimport DETACHED_RANK, EvictionClass
from kvpool_ext.quiet cimport Quiet
from kvpool_ext.tree cimport RadixTree
from kvpool_ext.types cimport NO_NODE, node_t, page_t, token_t

from kvpool_ext.audit import check_tree
from kvpool_ext.outline import format_tree
from kvpool_ext.survey import survey_tree
from kvpool_ext.views import NodeView

cnp.import_array()


cdef class TreeReading(RadixTree):
    """Sizes, nodes and checks of a tree; `RadixCache` adds the verbs."""

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
        cdef Quiet _quiet = Quiet()
        cdef node_t root
        found = []
        for key, number in list(self.roots.items()):
            root = number
            if key is None or self.arena.nodes[root].num_children > 0:
                found.append(key)
        return found

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
        cdef Quiet _quiet = Quiet()
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
        cdef Quiet _quiet = Quiet()
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
        cdef Quiet _quiet = Quiet()
        try:
            self.gate.c_enter()
            self.arena.runs.check()
            self.arena.id_runs.check()
            if self.history is not None:
                self.history.check()
            snapshot = self._snapshot()
            check_tree(snapshot)
            if self.journal is not None:
                nodes = [node for node in snapshot["nodes"].values() if not node["detached"]]
                self.journal.check([page for node in nodes for page in node["pages"]])
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
        cdef Quiet _quiet = Quiet()
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

    cdef bint holds_pages(self, node_t n) noexcept:
        return self.arena.nodes[n].generation & 1 and not self.arena.nodes[n].flags & IS_ROOT
