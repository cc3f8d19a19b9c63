"""A pool, its model, and those who are told of its tree, through random calls.

After each drain what was told is the tree: pages, prefixes, namespaces, keys and generations. The
journal has room for everything, for a little, or for next to nothing, so that changes are lost.
"""

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from kvpool import EVICTION_POLICIES
from kvpool_ext.listing import follow_tree, take_changes, unfollow_tree
from kvpool_ext.victims import next_victims
from tests.helpers.driven import drive
from tests.helpers.following import follower_of, keys_of
from tests.oracles.drawing import NumpyChooser
from tests.oracles.following import RecordsTwin, ToldTwin, told_of
from tests.oracles.twin import WEIGHTS, PoolTwin
from tests.test_machine_pool import SHARES, HypothesisChooser

ROOM = (1 << 20, 1 << 20, 2000, 150)


def unlocked_pages(pool):
    """Pages of the tree that eviction could take."""
    views = [view for view in pool.radix.nodes() if view.lock_ref == 0 and not view.detached]
    return sorted(page for view in views for page in view.pages.tolist())


class JournalMachine(RuleBasedStateMachine):
    @initialize(data=st.data())
    def make(self, data):
        choose = HypothesisChooser(data)
        self.twin = PoolTwin(
            choose.integer(8, 40),
            choose.item((1, 4)),
            max_words=4,
            eviction=choose.item(EVICTION_POLICIES),
        )
        self.run(choose, choose.integer(0, 40))
        self.follower = follower_of(self.twin.pool, max_bytes=choose.item(ROOM))
        self.told = [ToldTwin(keys_of(self.twin.pool))]
        self.follower.subscribe(self.told[0])
        self.drain()

    def run(self, choose, num_calls):
        rng = np.random.default_rng(choose.integer(0, 2**16))
        for verb in rng.choice(list(WEIGHTS), num_calls, p=SHARES).tolist():
            getattr(self.twin, verb)(NumpyChooser(rng))

    @rule()
    def drain(self):
        self.follower.drain()
        for told in self.told:
            told.compare(self.twin.pool, self.follower)

    @rule(data=st.data())
    def many(self, data):
        self.run(HypothesisChooser(data), 12)

    @rule()
    @precondition(lambda self: len(self.told) < 4)
    def join(self):
        self.told.append(ToldTwin(keys_of(self.twin.pool)))
        self.follower.subscribe(self.told[-1])

    @rule(data=st.data())
    def victims(self, data):
        pool, follower = self.twin.pool, self.follower
        before = pool.radix.format_tree(max_nodes=None, max_depth=None)
        everything = follower.next_victims(pool.num_pages).tolist()
        assert sorted(everything) == unlocked_pages(pool)
        for n in range(len(everything)):
            assert follower.next_victims(n).tolist() == everything[:n]
        assert pool.radix.format_tree(max_nodes=None, max_depth=None) == before
        self.drain()
        # What is told as removed; where changes were lost nobody can say.
        removed, losses = len(self.told[0].removed), follower.stats()["losses"]
        self.twin.radix_evict(HypothesisChooser(data))
        self.drain()
        gone = self.told[0].removed[removed:]
        assert follower.stats()["losses"] > losses or gone == everything[: len(gone)]

    def teardown(self):
        if hasattr(self, "follower"):
            self.drain()
            self.follower.close()
            self.twin.finish_all()


def as_rule(verb):
    def call(self, data):
        getattr(self.twin, verb)(HypothesisChooser(data))

    call.__name__ = verb
    return rule(data=st.data())(call)


VERBS = ("serve", "bind", "put", "finish", "checkpoint", "unbind", "fork", "extend", "shrink")
for verb in (*VERBS, "radix_insert", "radix_match", "radix_unlock", "reset", "radix_reset"):
    setattr(JournalMachine, verb, as_rule(verb))

JournalMachine.TestCase.settings = settings(deadline=None, stateful_step_count=30, max_examples=30)
TestJournalMachine = JournalMachine.TestCase


@pytest.mark.parametrize("eviction", EVICTION_POLICIES)
def test_records_alone_rebuild_the_tree(eviction):
    for seed, max_bytes in ((0, 1 << 20), (1, 1 << 20), (2, 150), (3, 1 << 20)):
        records = twin = None
        for i, twin in enumerate(drive(seed, 250, eviction=eviction)):
            tree = twin.pool.radix
            if records is None:
                records = RecordsTwin(twin.page_size)
                journal = follow_tree(twin.pool._requests.ledger, max_bytes)
            if i % 7 == 0:
                words, names, _, _ = take_changes(tree)
                records.read(words, names)
                assert records.pages == told_of(twin.pool)
                pages = np.array(sorted(records.pages), np.int32)
                generations = np.array([records.generations[page] for page in pages], np.uint32)
                assert journal.still_cached(pages, generations).all()
                assert not journal.still_cached(pages, generations + np.uint32(1)).any()
        assert (journal.num_losses > 0) == (max_bytes == 150)
        assert records.removed
        unfollow_tree(tree, journal)
        twin.pool.close()


@pytest.mark.parametrize("eviction", EVICTION_POLICIES)
@pytest.mark.parametrize("seed", range(6))
def test_next_victims_are_those_that_eviction_takes(eviction, seed):
    for i, twin in enumerate(drive(seed, 200, num_pages=40, page_size=1, eviction=eviction)):
        if i % 5 == 0:
            expected = next_victims(twin.pool.radix, 1000).tolist()
            assert sorted(expected) == unlocked_pages(twin.pool)
    expected = next_victims(twin.pool.radix, 1000).tolist()
    assert twin.pool.radix.evict(twin.pool.num_slots).tolist() == expected
    twin.pool.close()
