"""The radix tree as a trie with one node per page: no runs, no splits, no lists.

Each page has a tick, by policy:

lru   that of the last access that covered it; accesses are match, insert and unlock, and a locked
      page gets its tick at its last unlock
fifo  that of the insert which brought it, or raised its priority
lfu   as lru

The victim is the unlocked childless page with the lowest (priority, tick); under lfu with the
lowest (priority, uses, tick), where a page starts with one use and each match that covers it,
locked or not, adds one.
"""

import heapq

ROOT, CACHED, ORPHAN, GONE = "root", "cached", "orphan", "gone"
MOST_USES = 65_535  # of a page; further ones are not counted


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
        "uses",
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
        self.uses = 1

    def path(self):
        """The pages from the root down to this one, the root left out."""
        nodes, node = [], self
        while node.state is not ROOT:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]


class TreeModel:
    def __init__(self, page_size, eviction="lru"):
        self.page_size = page_size
        self.eviction = eviction
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

    # ---- the accesses

    def touch(self, nodes):
        self.clock += 1
        if self.eviction != "fifo":
            for node in nodes:
                node.tick = self.clock

    def use(self, path):
        """A match of this path, by a caller or by a bind."""
        for node in path:
            node.uses = min(node.uses + 1, MOST_USES)
        self.touch(path)

    def match(self, tokens, key=None):
        path = self.find(tokens, key)
        self.use(path)
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
        entered = path[num_cached:] + [node for node in path if node.priority < priority]
        for node in path:
            node.priority = max(node.priority, priority)
        self.touch(path)
        for node in entered:
            node.tick = self.clock
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
            (self.rank(node), node.page, node)
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
                heapq.heappush(leaves, (self.rank(parent), parent.page, parent))
        return victims

    def rank(self, node):
        """What orders the victims; the pages of one tick are on one path, so no two childless
        pages are equal in it."""
        return node.priority, node.uses if self.eviction == "lfu" else 0, node.tick

    def take_released(self, num_pages, chosen):
        """Follow an evict that handed out the released orphans `chosen` before anything else."""
        assert len(chosen) == min(num_pages, len(self.released))
        for page in chosen:
            self.released.pop(page).state = GONE

    def drain_order(self):
        """Every unlocked cached page in the order of a full drain, by sorting and not by evicting.

        A page goes when its own rank is up and all below it is gone: right after the last of them
        if that is later. The pages of one rank form a chain, and the deepest goes first. Only for
        a tree whose reachable pages are all unlocked.
        """
        assert all(node.locks == 0 for node in self.cached.values())
        due = {}
        for node in sorted(self.cached.values(), key=lambda node: -node.depth):
            below = [due[child.page] for child in node.children.values()]
            due[node.page] = max([self.rank(node), *below])
        nodes = sorted(self.cached.values(), key=lambda node: (due[node.page], -node.depth))
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
