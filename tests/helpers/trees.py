"""A tree and its model, fed with the same calls."""

import numpy as np

from kvpool import RadixCache
from tests.oracles.tree import TreeModel


class Cache:
    """A RadixCache and the trie model; pages are numbered in the order of insertion."""

    def __init__(self, page_size, eviction="lru"):
        self.page_size = page_size
        self.real = RadixCache(page_size, eviction)
        self.model = TreeModel(page_size, eviction)
        self.next_page = 0

    def insert(self, tokens, priority=0, key=None):
        """The ids of all its pages; the first of them are unused where pages were cached."""
        n = len(tokens) // self.page_size
        pages = list(range(self.next_page, self.next_page + n))
        self.next_page += n
        self.model.insert(tokens, pages, key, priority)
        self.real.insert(tokens, np.array(pages, np.int32), key, priority)
        self.real.check()
        return pages

    def match(self, tokens, key=None):
        self.model.match(tokens, key)
        found = self.real.match_prefix(tokens, key)
        self.real.check()
        return found

    def lock(self, tokens):
        """Match `tokens` and hold them; what `unlock` takes."""
        found = self.match(tokens)
        node = self.model.find(tokens)[-1]
        self.real.inc_lock_ref(found.node)
        self.model.lock(node)
        self.real.check()
        return found.node, node

    def unlock(self, held):
        self.real.dec_lock_ref(held[0])
        self.model.unlock(held[1])
        self.real.check()

    def evict(self, num_pages):
        victims = self.real.evict(num_pages * self.page_size).tolist()
        assert victims == self.model.evict(num_pages)
        self.real.check()
        return victims

    def drain(self):
        order = self.model.drain_order()
        victims = self.real.evict(self.real.total_size).tolist()
        assert victims == order == self.model.evict(len(order))
        self.real.check()
        return victims


def words(page_size, *letters):
    """One page of tokens a letter."""
    return [token for letter in letters for token in [0] * (page_size - 1) + [letter]]
