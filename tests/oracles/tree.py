"""The radix tree as a trie with one node per page: no runs, no splits, no recency list.

A page is as recent as the last access that covered it. Accesses are match, insert and unlock; a
locked page gets its recency at its last unlock. The victim is the unlocked childless page with the
lowest (priority, tick).
"""

import heapq

ROOT, CACHED, ORPHAN, GONE = "root", "cached", "orphan", "gone"


class PageNode:
    """One cached page; `locks` counts the holders whose path passes through here."""

    __slots__ = (
        "children",
        "chunk",
        "depth",
        "locks",
        "page",
        "parent",
        "priority",
        "state",
        "tick",
    )

    def __init__(self, parent, chunk, page, priority, state=CACHED):
        self.parent = parent
        self.chunk = chunk
        self.page = page
        self.priority = priority
        self.state = state
        self.children = {}
        self.depth = parent.depth + 1 if parent is not None else 0
        self.locks = 0
        self.tick = 0

    def path(self):
        """The pages from the root down to this one, the root left out."""
        nodes, node = [], self
        while node.state is not ROOT:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]


class TreeModel:
    def __init__(self, page_size):
        self.page_size = page_size
        self.roots = {}
        self.clock = 0
        self.cached = {}  # page id -> node, reachable ones
        self.orphans = {}  # page id -> node, reset while locked and still locked
        self.released = {}  # page id -> node, orphans that nobody locks any more
        self.num_locked = 0  # pages with a lock, cached or orphan

    # ---- sizes, in pages

    @property
    def total(self):
        return len(self.cached) + len(self.orphans) + len(self.released)

    @property
    def protected(self):
        return self.num_locked

    @property
    def evictable(self):
        return self.total - self.num_locked

    # ---- walking

    def root(self, key):
        # 1 and "1" and b"1" are three namespaces, and so are None, "" and 0
        return self.roots.setdefault((type(key), key), PageNode(None, None, None, 0, ROOT))

    def chunks(self, tokens):
        size = self.page_size
        return [tuple(tokens[i : i + size]) for i in range(0, len(tokens) - size + 1, size)]

    def find(self, tokens, key=None):
        """The longest cached path of whole pages; not an access."""
        node, path = self.root(key), []
        for chunk in self.chunks(tokens):
            node = node.children.get(chunk)
            if node is None:
                break
            path.append(node)
        return path

    def touch(self, nodes):
        self.clock += 1
        for node in nodes:
            node.tick = self.clock

    # ---- the accesses

    def match(self, tokens, key=None):
        path = self.find(tokens, key)
        self.touch(path)
        return path

    def insert(self, tokens, pages, key=None, priority=0):
        """Answers (pages already cached, path); `pages` has one id per whole page of `tokens`."""
        chunks = self.chunks(tokens)
        assert len(pages) == len(chunks)
        path = self.find(tokens, key)
        num_cached = len(path)
        node = path[-1] if path else self.root(key)
        for chunk, page in zip(chunks[num_cached:], pages[num_cached:], strict=True):
            assert page not in self.cached
            child = PageNode(node, chunk, page, priority)
            node.children[chunk] = child
            self.cached[page] = child
            path.append(child)
            node = child
        for node in path:
            node.priority = max(node.priority, priority)
        self.touch(path)
        return num_cached, path

    def lock(self, node):
        for step in node.path():
            self.num_locked += step.locks == 0
            step.locks += 1
            if (
                step.page in self.released
            ):  # an orphan may be locked again until evict hands it out
                self.orphans[step.page] = self.released.pop(step.page)

    def unlock(self, node):
        """Answers the orphan pages that nobody holds any more."""
        path = node.path()
        assert all(step.locks > 0 for step in path)
        loose, released = [], []
        for step in path:
            step.locks -= 1
            if step.locks == 0:
                self.num_locked -= 1
                loose.append(step)
        self.touch(loose)
        for step in loose:
            if step.state is ORPHAN:
                self.released[step.page] = self.orphans.pop(step.page)
                released.append(step.page)
        return released

    # ---- leaving

    def evict(self, num_pages):
        """The victims in order; released orphans are not among them, see `take_released`."""
        leaves = [
            self._rank(node)
            for node in self.cached.values()
            if not node.children and not node.locks
        ]
        heapq.heapify(leaves)
        victims = []
        while leaves and len(victims) < num_pages:
            *_, node = heapq.heappop(leaves)
            victims.append(node.page)
            node.state = GONE
            del self.cached[node.page]
            parent = node.parent
            del parent.children[node.chunk]
            if parent.state is CACHED and not parent.children and not parent.locks:
                heapq.heappush(leaves, self._rank(parent))
        return victims

    @staticmethod
    def _rank(node):
        return node.priority, node.tick, node.page, node

    def take_released(self, num_pages, chosen):
        """Follow an evict that handed out the released orphans `chosen` before anything else."""
        assert len(chosen) == min(num_pages, len(self.released))
        for page in chosen:
            self.released.pop(page).state = GONE

    def drain_order(self):
        """Every unlocked cached page in the order of a full drain, by sorting and not by evicting.

        Priority and recency of a parent are never below its child's, so the sort is the drain; the
        pages of one access form a chain, and the deepest goes first. Only for a tree whose
        reachable pages are all unlocked.
        """
        assert all(node.locks == 0 for node in self.cached.values())
        nodes = sorted(
            self.cached.values(), key=lambda node: (node.priority, node.tick, -node.depth)
        )
        return [node.page for node in nodes]

    def reset(self):
        """Nothing old matches any more; answers the unlocked pages, which leave at once."""
        dropped = [page for page, node in self.cached.items() if node.locks == 0] + list(
            self.released
        )
        self.take_released(len(self.released), list(self.released))
        for page, node in self.cached.items():
            if node.locks:
                node.state = ORPHAN
                self.orphans[page] = node
            else:
                node.state = GONE
        self.cached.clear()
        self.roots.clear()
        return dropped

    @staticmethod
    def survivor(node):
        """The deepest page left of a handle's path, or None: then the handle is surely stale."""
        while node.state is GONE:
            node = node.parent
        return None if node.state is ROOT else node
