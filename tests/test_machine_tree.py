"""RadixCache against a trie with one node per page, one random call after the other."""

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvpool import RadixCache
from tests.oracles.drawing import NAMESPACES
from tests.oracles.prompts import prompts
from tests.oracles.tree import GONE, ROOT, TreeModel

NUM_PAGES = 48  # ids that the machine hands to insert and gets back from evict
PICK = st.integers(0, 10**6)  # reduced modulo the number of candidates
PRIORITIES = st.sampled_from([0, 0, 0, 1, 7, -3, 2**31 - 1, -(2**31)])
KEYS = st.sampled_from([None, None, None, *NAMESPACES])


class TreeMachine(RuleBasedStateMachine):
    eviction = "lru"

    @initialize(page_size=st.sampled_from([1, 2, 4]))
    def make(self, page_size):
        self.page_size = page_size
        self.cache = RadixCache(page_size, self.eviction)
        self.model = TreeModel(page_size, self.eviction)
        self.spare = list(range(NUM_PAGES))
        self.known = []  # sequences that later ones share a part of
        self.handles = []  # (handle of the cache, page node of the model)
        self.held = []  # those of them that are locked, once per lock

    def remember(self, handle, path, key):
        node = path[-1] if path else self.model.root(key)
        self.handles = [*self.handles[-11:], (handle, node)]

    def draw_tokens(self, data):
        tokens = data.draw(prompts(self.page_size))
        if self.known and data.draw(
            st.booleans()
        ):  # part of something known, and then something else
            known = data.draw(st.sampled_from(self.known))
            whole = data.draw(st.integers(0, len(known) // self.page_size)) * self.page_size
            tokens = known[:whole] + tokens[: data.draw(st.sampled_from([0, self.page_size]))]
        self.known = [*self.known[-7:], tokens]
        form = data.draw(st.sampled_from(["list", "tuple", "int32", "int64"]))
        given = {"list": list, "tuple": tuple}.get(form, lambda t: np.array(t, form))(tokens)
        return tokens, given

    # ---- accesses

    @rule(data=st.data(), key=KEYS)
    def match(self, data, key):
        tokens, given = self.draw_tokens(data)
        found = self.cache.match_prefix(given, key)
        path = self.model.match(tokens, key)
        assert found.length == len(path) * self.page_size
        assert [int(page) for page in found.pages] == [node.page for node in path]
        self.remember(found.node, path, key)

    @rule(data=st.data(), key=KEYS, priority=PRIORITIES)
    def insert(self, data, key, priority):
        tokens, given = self.draw_tokens(data)
        num_pages = len(tokens) // self.page_size
        if num_pages > len(self.spare):
            return
        pages, self.spare = self.spare[:num_pages], self.spare[num_pages:]
        result = self.cache.insert(
            given, np.array(pages, np.int32), extra_key=key, priority=priority
        )
        num_cached, path = self.model.insert(tokens, pages, key, priority)
        assert result.prefix_len == num_cached * self.page_size
        self.spare += pages[:num_cached]
        self.remember(result.node, path, key)

    @rule(data=st.data(), key=KEYS, off_by=st.sampled_from([-1, 1]))
    def insert_with_the_wrong_number_of_pages(self, data, key, off_by):
        tokens, given = self.draw_tokens(data)
        num_pages = len(tokens) // self.page_size + off_by
        if num_pages < 0:
            return
        with pytest.raises(ValueError, match=str(num_pages)):
            self.cache.insert(
                given, np.arange(900, 900 + num_pages, dtype=np.int32), extra_key=key
            )

    # accesses come three times as often as locks and evictions
    match_again = match_once_more = match
    insert_again = insert_once_more = insert

    # ---- locks

    @precondition(lambda self: self.handles)
    @rule(pick=PICK)
    def lock(self, pick):
        handle, node = self.handles[pick % len(self.handles)]
        left = self.model.survivor(node) if node.state is GONE else node
        if node.state is GONE and left is None:
            with pytest.raises(ValueError):  # noqa: PT011 - a stale handle says so in its own words
                self.cache.inc_lock_ref(handle)
            return
        try:
            self.cache.inc_lock_ref(handle)
        except ValueError:
            # a handle names a run of pages: gone with its whole run, alive while the run's head is
            # there
            assert node.state is GONE
            return
        if node.state is not ROOT:
            self.model.lock(left)
        self.held.append((handle, left))

    @precondition(lambda self: self.held)
    @rule(pick=PICK)
    def unlock(self, pick):
        handle, node = self.held.pop(pick % len(self.held))
        self.cache.dec_lock_ref(handle)
        if node.state is not ROOT:
            self.model.unlock(node)

    @precondition(lambda self: self.handles)
    @rule(pick=PICK)
    def unlock_what_is_not_locked(self, pick):
        handle, node = self.handles[pick % len(self.handles)]
        if node.state is ROOT or node.locks:
            return
        left = self.model.survivor(node)
        if left is not None and left.locks:
            return
        with pytest.raises(ValueError):  # noqa: PT011 - below zero or stale, each in its own words
            self.cache.dec_lock_ref(handle)

    # ---- leaving

    @rule(num_tokens=st.integers(0, 12))
    def evict(self, num_tokens):
        victims = self.cache.evict(num_tokens)
        self.compare_victims(victims, -(-num_tokens // self.page_size))

    def evict_everything(self):
        order = None
        if not self.model.num_locked and not self.model.released:
            order = self.model.drain_order()
        victims = self.cache.evict(NUM_PAGES * self.page_size)
        if order is not None:
            assert [int(page) for page in victims] == order
        self.compare_victims(victims, NUM_PAGES)

    def compare_victims(self, victims, num_pages):
        assert victims.dtype == np.int32
        victims = [int(page) for page in victims]
        num_released = min(num_pages, len(self.model.released))
        self.model.take_released(num_pages, victims[:num_released])
        assert victims[num_released:] == self.model.evict(num_pages - num_released)
        self.spare += victims

    def reset(self):
        dropped = [int(page) for page in self.cache.reset()]
        assert sorted(dropped) == sorted(self.model.reset())
        self.spare += dropped

    # ---- after each rule

    @invariant()
    def agrees(self):
        if not hasattr(self, "cache"):
            return
        cache, model, size = self.cache, self.model, self.page_size
        assert cache.evictable_size == model.evictable * size
        assert cache.protected_size == model.protected * size
        assert cache.total_size == model.total * size
        assert (cache.num_nodes == 0) == (model.total == 0)
        assert cache.num_nodes <= model.total
        assert len(self.spare) + model.total == NUM_PAGES
        cache.check()

    @rule(what=st.sampled_from(["look"] * 5 + ["evict_everything", "reset"]))
    def empty(self, what):
        """Seldom: what empties the tree would else keep it small."""
        getattr(self, what)()

    def look(self):
        assert isinstance(self.cache.format_tree(), str)
        list(self.cache.nodes())

    def teardown(self):
        if not hasattr(self, "cache"):
            return
        while self.held:
            self.unlock(0)
        assert self.cache.protected_size == 0
        self.evict_everything()
        assert self.cache.total_size == 0
        assert self.model.cached == {}
        self.cache.check()


class FifoTreeMachine(TreeMachine):
    eviction = "fifo"


class LfuTreeMachine(TreeMachine):
    eviction = "lfu"


for machine in (TreeMachine, FifoTreeMachine, LfuTreeMachine):
    machine.TestCase.settings = settings(deadline=None, stateful_step_count=50)
TestTreeMachine = TreeMachine.TestCase
TestFifoTreeMachine = FifoTreeMachine.TestCase
TestLfuTreeMachine = LfuTreeMachine.TestCase


def test_lock_the_root_changes_nothing():
    cache = RadixCache(2)
    root = cache.match_prefix([1, 2]).node
    cache.inc_lock_ref(root)
    cache.inc_lock_ref(root)
    assert cache.protected_size == 0
    cache.dec_lock_ref(root)
    cache.dec_lock_ref(root)
    cache.insert([1, 2], np.array([0], np.int32))
    assert cache.evict(2).tolist() == [0]
    cache.check()


def test_use_a_handle_whose_slot_was_reused_raises():
    cache = RadixCache(1)
    stale = cache.insert([1], np.array([0], np.int32)).node
    assert cache.evict(1).tolist() == [0]
    for token in range(2, 6):  # these nodes may live where the old one did
        cache.insert([token], np.array([token], np.int32))
    with pytest.raises(ValueError, match=r"."):
        cache.inc_lock_ref(stale)
    with pytest.raises(ValueError, match=r"."):
        cache.dec_lock_ref(stale)
    assert cache.protected_size == 0
    cache.check()


@pytest.mark.parametrize("page_size", [1, 2, 4])
def test_match_a_chain_deeper_than_pythons_stack_finds_all(page_size):
    """sgl-project/sglang#154: one node per level, far past the recursion limit of 1,000."""
    cache, depth = RadixCache(page_size), 1500
    tokens = np.arange(depth * page_size, dtype=np.int32)
    pages = np.arange(depth, dtype=np.int32)
    for n in range(1, depth + 1):
        cache.insert(tokens[: n * page_size], pages[:n])
    found = cache.match_prefix(tokens)
    assert found.length == depth * page_size
    np.testing.assert_array_equal(found.pages, pages)
    cache.inc_lock_ref(found.node)
    assert cache.protected_size == depth * page_size
    cache.dec_lock_ref(found.node)
    assert isinstance(cache.format_tree(), str)
    cache.check()
    np.testing.assert_array_equal(cache.evict(depth * page_size), pages[::-1])
    assert cache.num_nodes == 0
