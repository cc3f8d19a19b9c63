"""Why a prompt matches so far, from every prefix that ever stood in the tree, tokens in full.

A prefix is a tuple of tokens that ends with a page. The oracle looks at the tree after each call:
what is gone was evicted, and on whose account the caller says.
"""

from typing import NamedTuple


class Eviction(NamedTuple):
    cause: str
    request: int | None
    first: int  # pages that were evicted before this call
    last: int  # and after it


def common_len(a, b):
    """Leading equal tokens."""
    n = 0
    while n < min(len(a), len(b)) and a[n] == b[n]:
        n += 1
    return n


def typed(key):
    return type(key), key  # 1, "1" and b"1" are three namespaces


class HistoryOracle:
    def __init__(self, page_size):
        self.page_size = page_size
        self.live = set()  # (namespace, prefix)
        self.gone = {}  # (namespace, prefix) -> its last Eviction
        self.evicted_pages = 0
        self.locked = set()
        self.keys = {}

    # ---- following

    def look(self, radix):
        """All prefixes of the tree, and those that are locked."""
        nodes = {node.node: node for node in radix.nodes() if not node.detached}
        live, locked = set(), set()
        for node in nodes.values():
            before, parent = (), nodes.get(node.parent)
            while parent is not None:
                before = tuple(parent.tokens.tolist()) + before
                parent = nodes.get(parent.parent)
            tokens = before + tuple(node.tokens.tolist())
            self.keys[typed(node.extra_key)] = node.extra_key
            for end in range(len(before) + self.page_size, len(tokens) + 1, self.page_size):
                live.add((typed(node.extra_key), tokens[:end]))
                if node.lock_ref:
                    locked.add((typed(node.extra_key), tokens[:end]))
        return live, locked

    def follow(self, radix, cause, request=None):
        """A call was done; what it took from the tree, it evicted."""
        live, self.locked = self.look(radix)
        lost = self.live - live
        eviction = Eviction(cause, request, self.evicted_pages, self.evicted_pages + len(lost))
        self.evicted_pages += len(lost)
        self.gone.update(dict.fromkeys(lost, eviction))
        self.live = live

    def reset(self, radix):
        """Nothing that was before matches, or is remembered."""
        self.gone.clear()
        self.live, self.locked = self.look(radix)
        assert not self.live

    # ---- saying

    def prefixes(self, prompt, key):
        """What may match of a prompt, page by page."""
        ends = range(self.page_size, len(prompt), self.page_size)
        return [(typed(key), tuple(prompt[:end])) for end in ends]

    def matched(self, prompt, key):
        """Pages that match now."""
        count = 0
        for prefix in self.prefixes(prompt, key):
            if prefix not in self.live:
                break
            count += 1
        return count

    def evictions(self, prompt, key):
        """The eviction of each page that would go on the match, in order."""
        found = []
        for prefix in self.prefixes(prompt, key)[self.matched(prompt, key) :]:
            if prefix not in self.gone:
                break
            found.append(self.gone[prefix])
        return found

    def others(self, prompt, key):
        """Namespaces that hold most, if that is more than this one does; and how many pages."""
        counts = {
            name: self.matched(prompt, name)
            for name in self.keys.values()
            if typed(name) != typed(key)
        }
        best = max(counts.values(), default=0)
        if best <= self.matched(prompt, key):
            return [], 0
        return [name for name, count in counts.items() if count == best], best

    def nearest(self, prompt, key):
        """All that may be said of the nearest sequence.

        ``{(common_len, sequence_len, tokens, locked)}`` with one entry for each branch that is as
        near as any; and how many branches there are where the prompt leaves the tree.
        """
        start = self.matched(prompt, key) * self.page_size
        branches = {}
        for name, tokens in self.live:
            if (
                name == typed(key)
                and len(tokens) > start
                and tokens[:start] == tuple(prompt[:start])
            ):
                branches.setdefault(tokens[start : start + self.page_size], []).append(tokens)
        common = {page: start + common_len(page, prompt[start:]) for page in branches}
        best = max(common.values(), default=0)
        return {
            (
                best,
                max(map(len, branches[page])),
                page[best - start :],
                (typed(key), tuple(prompt[:start]) + page) in self.locked,
            )
            for page in branches
            if common[page] == best
        }, len(branches)
