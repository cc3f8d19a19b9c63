"""Operations on a RadixCache of its own and its model."""

import contextlib

import numpy as np
import pytest

from kvpool import EVICTION_POLICIES, RadixCache
from tests.fuzz.stream import NOTHING_LEFT, given
from tests.oracles.drawing import ALPHABET, NAMESPACES, WORDS, word
from tests.oracles.tree import GONE, ROOT, TreeModel

NUM_PAGES = 40  # ids to insert; evict gives them back
PRIORITIES = (0, 0, 0, 1, 7, -3, 2**31 - 1, -(2**31))
KEYS = (None, None, None, *NAMESPACES)


def draw_tokens(stream, page_size, known, max_words=6):
    """Pages out of a few words, or part of what came before and then something else."""
    tokens = []
    if known and stream.integer(0, 1):
        tokens = stream.item(known)
        tokens = tokens[: stream.integer(0, len(tokens) // page_size) * page_size]
    for letter in stream.items(WORDS, stream.integer(0, max_words)):
        tokens = tokens + word(letter, page_size)
    tokens = tokens[: 24 * page_size]
    return tokens + stream.items(ALPHABET, stream.integer(0, page_size))


class TreeStream:
    VERBS = (
        *("match", "insert") * 3,
        *("lock", "unlock", "evict") * 2,
        *("insert_wrongly", "unlock_wrongly", "trace", "look", "evict_all", "reset"),
    )

    def __init__(self, stream):
        self.page_size = stream.item((1, 2, 4, 5, 8))
        policy = stream.item(EVICTION_POLICIES)
        # No slab, one that is too small, one that is enough; no memory of evictions, a short one.
        num_pages = stream.item((0, 0, 4, NUM_PAGES))
        history = stream.item((0, 0, self.page_size, 9 * self.page_size, 1000))
        self.cache = RadixCache(
            self.page_size, policy, num_pages=num_pages, eviction_history=history
        )
        self.model = TreeModel(self.page_size, policy)
        self.spare = list(range(NUM_PAGES))
        self.known = []
        self.handles = []  # (handle, page node of the model)
        self.held = []  # those that are locked, once a lock

    def draw(self, stream):
        tokens = draw_tokens(stream, self.page_size, self.known)
        self.known = [*self.known[-7:], tokens]
        return tokens, given(stream, tokens), stream.item(KEYS)

    def remember(self, handle, path, key):
        node = path[-1] if path else self.model.root(key)
        self.handles = [*self.handles[-11:], (handle, node)]

    def match(self, stream):
        tokens, form, key = self.draw(stream)
        found = self.cache.match_prefix(form, key)
        path = self.model.match(tokens, key)
        assert found.length == len(path) * self.page_size
        assert found.pages.tolist() == [node.page for node in path]
        self.remember(found.node, path, key)

    def insert(self, stream):
        tokens, form, key = self.draw(stream)
        priority = stream.item(PRIORITIES)
        num_pages = len(tokens) // self.page_size
        if num_pages > len(self.spare):
            return
        pages, self.spare = self.spare[:num_pages], self.spare[num_pages:]
        result = self.cache.insert(form, given(stream, pages), key, priority)
        num_cached, path = self.model.insert(tokens, pages, key, priority)
        assert result.prefix_len == num_cached * self.page_size
        self.spare += pages[:num_cached]
        self.remember(result.node, path, key)

    def insert_wrongly(self, stream):
        tokens, form, key = self.draw(stream)
        num_pages = len(tokens) // self.page_size + stream.item((-1, 1))
        if num_pages >= 0:
            with pytest.raises(ValueError, match=str(num_pages)):
                self.cache.insert(form, np.zeros(num_pages, np.int32), key)

    def lock(self, stream):
        if not self.handles:
            return
        handle, node = stream.item(self.handles)
        left = self.model.survivor(node) if node.state is GONE else node
        try:
            self.cache.inc_lock_ref(handle)
        except ValueError:
            # A handle names a run of pages: it is stale once the head of the run went.
            assert node.state is GONE
            return
        assert left is not None
        if node.state is not ROOT:
            self.model.lock(left)
        self.held.append((handle, left))

    def unlock(self, stream):
        if self.held:
            handle, node = self.held.pop(stream.integer(0, len(self.held) - 1))
            self.cache.dec_lock_ref(handle)
            if node.state is not ROOT:
                self.model.unlock(node)

    def unlock_wrongly(self, stream):
        handle = stream.item((0, 1, 1 << 32, (1 << 63) - 1, *(h for h, _ in self.handles)))
        if handle not in [held for held, _ in self.held]:
            # The root's handle, too, is one that holds nothing: a no-op, and not an error.
            before = self.cache.protected_size
            with contextlib.suppress(ValueError):
                self.cache.dec_lock_ref(handle)
            assert self.cache.protected_size == before

    def evict(self, stream):
        self.compare_victims(stream.integer(0, 3 * self.page_size + 1))

    def evict_all(self, _stream):
        if self.model.num_locked or self.model.released:
            self.compare_victims(NUM_PAGES * self.page_size)
            return
        order = self.model.drain_order()
        assert self.compare_victims(NUM_PAGES * self.page_size) == order

    def compare_victims(self, num_tokens):
        victims = self.cache.evict(num_tokens).tolist()
        num_pages = -(-num_tokens // self.page_size)
        num_released = min(num_pages, len(self.model.released))
        self.model.take_released(num_pages, victims[:num_released])
        assert victims[num_released:] == self.model.evict(num_pages - num_released)
        self.spare += victims
        return victims

    def reset(self, _stream):
        dropped = self.cache.reset().tolist()
        assert sorted(dropped) == sorted(self.model.reset())
        self.spare += dropped

    def trace(self, stream):
        """Where what does not match went: intervals in order, behind what matches."""
        tokens, form, key = self.draw(stream)
        if self.cache.history is None:
            return
        num_pages = len(tokens) // self.page_size
        at = num_live = len(self.model.find(tokens, key))
        ends = {handle: 0 for handle, node in self.handles if node.state is ROOT}
        for start, end, *_ in self.cache.history.trace(form, num_live, num_pages, ends, key):
            assert at == start < end <= num_pages
            at = end

    def look(self, stream):
        what = stream.integer(0, 2)
        if what == 0:
            assert sum(len(node.pages) for node in self.cache.nodes()) == self.model.total
        elif what == 1:
            assert isinstance(self.cache.format_tree(max_nodes=stream.integer(0, 9)), str)
        else:
            assert self.cache.survey().num_pages.sum() == self.model.total

    def compare(self):
        cache, model, size = self.cache, self.model, self.page_size
        assert cache.evictable_size == model.evictable * size
        assert cache.protected_size == model.protected * size
        assert cache.total_size == model.total * size
        assert len(self.spare) + model.total == NUM_PAGES

    def compare_all(self):
        self.cache.check()

    def end(self):
        while self.held:
            self.unlock(NOTHING_LEFT)
        assert self.cache.protected_size == 0
        self.evict_all(NOTHING_LEFT)
        assert self.cache.total_size == self.cache.num_nodes == 0
        self.cache.check()
        if self.cache.history is not None:
            self.cache.reset()
        assert self.cache.memory()["runs_in_use_bytes"] == 0
