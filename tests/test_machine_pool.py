"""KVCachePool against its model, one random call after the other.

After each rule the ledger, every request, every counter and the pool's own check agree.
"""

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvpool import EVICTION_POLICIES
from tests.oracles.drawing import NumpyChooser
from tests.oracles.twin import WEIGHTS, PoolTwin

SHARES = np.array(list(WEIGHTS.values())) / sum(WEIGHTS.values())


class HypothesisChooser:
    def __init__(self, data):
        self.draw = data.draw

    def integer(self, low, high):
        return self.draw(st.integers(low, high))

    def item(self, items):
        return self.draw(st.sampled_from(items))

    def items(self, items, n):
        return self.draw(st.lists(st.sampled_from(items), min_size=n, max_size=n))


class PoolMachine(RuleBasedStateMachine):
    page_sizes = (1, 4)

    @initialize(data=st.data())
    def make(self, data):
        choose = HypothesisChooser(data)
        page_size = choose.item(self.page_sizes)
        self.twin = PoolTwin(
            choose.integer(8, 40), page_size, max_words=4, eviction=choose.item(EVICTION_POLICIES)
        )
        # a pool in use, so that few rules lead far; it shrinks to an empty one
        rng = np.random.default_rng(choose.integer(0, 2**16))
        verbs = rng.choice(list(WEIGHTS), choose.integer(0, 80), p=SHARES)
        for verb in verbs.tolist():
            getattr(self.twin, verb)(NumpyChooser(rng))

    @invariant()
    def agrees(self):
        if hasattr(self, "twin"):
            self.twin.compare_all()
            self.twin.compare_raw()

    def teardown(self):
        if hasattr(self, "twin"):
            self.twin.finish_all()


def as_rule(verb):
    def call(self, data):
        getattr(self.twin, verb)(HypothesisChooser(data))

    call.__name__ = verb
    return rule(data=st.data())(call)


# what lets everything go comes seldom, else a run never gets anywhere
SELDOM = (
    "bind_with_prefix",
    "bind_requests",
    "unbind_all",
    "reset",
    "radix_reset",
    "toggle_reuse",
)
OFTEN = ("serve", "bind", "put", "finish")


@rule(verb=st.sampled_from(["read"] * 5 + list(SELDOM)), data=st.data())
def seldom(self, verb, data):
    getattr(self.twin, verb)(HypothesisChooser(data))


PoolMachine.seldom = seldom
for verb in sorted({*WEIGHTS, "activate"} - set(SELDOM)):
    setattr(PoolMachine, verb, as_rule(verb))
for verb in OFTEN:
    for again in ("_again", "_once_more"):
        setattr(PoolMachine, verb + again, as_rule(verb))

PoolMachine.TestCase.settings = settings(deadline=None, stateful_step_count=40)
TestPoolMachine = PoolMachine.TestCase
