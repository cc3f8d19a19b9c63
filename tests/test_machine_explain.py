"""`explain` against an oracle that forgets nothing, one random call after the other.

Once with a history that is large enough: every answer is right. Once with a tiny one: it may say
less, and what it says is true.
"""

from collections import Counter

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.oracles.drawing import NumpyChooser
from tests.oracles.explain_twin import WEIGHTS, ExplainTwin

SHARES = np.array(list(WEIGHTS.values())) / sum(WEIGHTS.values())
LARGE = 10**6


def drive(twin, rng, num_calls):
    """Verbs in their shares, as a pool in use has them."""
    for verb in rng.choice(list(WEIGHTS), num_calls, p=SHARES).tolist():
        getattr(twin, verb)(NumpyChooser(rng))


@pytest.mark.parametrize("history", [LARGE, 6, 0], ids=["large", "tiny", "none"])
@pytest.mark.parametrize("page_size", [1, 4])
def test_explain_pools_in_use_says_what_happened(page_size, history):
    rng = np.random.default_rng(page_size + history)
    reasons, runs, causes = Counter(), Counter(), Counter()
    for num_pages in (6, 12, 24, 40):
        twin = ExplainTwin(num_pages, page_size, history * page_size)
        drive(twin, rng, 500)
        twin.table.check()
        reasons.update(why.reason for why in twin.explanations)
        runs.update(len(why.evicted) for why in twin.explanations)
        causes.update(run.cause for why in twin.explanations for run in why.evicted)
    assert {"whole", "diverged", "cold", "other namespace", "page floor"} <= set(reasons)
    if history == LARGE:
        assert {"bind", "alloc", "radix.evict"} <= set(causes)
        assert runs[1] > 20
        assert sum(runs.values()) - runs[0] - runs[1] > 20
    assert (reasons["evicted"] > 0) == (history > 0)


class HypothesisChooser:
    def __init__(self, data):
        self.draw = data.draw

    def integer(self, low, high):
        return self.draw(st.integers(low, high))

    def item(self, items):
        return self.draw(st.sampled_from(items))

    def items(self, items, n):
        return self.draw(st.lists(st.sampled_from(items), min_size=n, max_size=n))


class ExplainMachine(RuleBasedStateMachine):
    history = LARGE

    @initialize(data=st.data())
    def make(self, data):
        choose = HypothesisChooser(data)
        page_size = choose.item((1, 2, 4))
        history = self.history if self.history == LARGE else choose.integer(0, self.history)
        self.twin = ExplainTwin(choose.integer(3, 24), page_size, history * page_size)
        # a pool in use, so that few rules lead far; it shrinks to an empty one
        drive(self.twin, np.random.default_rng(choose.integer(0, 2**16)), choose.integer(0, 60))

    @invariant()
    def sound(self):
        if hasattr(self, "twin"):
            self.twin.table.check()


class TinyHistoryMachine(ExplainMachine):
    history = 6  # pages


def as_rule(verb):
    def call(self, data):
        getattr(self.twin, verb)(HypothesisChooser(data))

    call.__name__ = verb
    return rule(data=st.data())(call)


for verb in set(WEIGHTS) - {"reset"}:
    setattr(ExplainMachine, verb, as_rule(verb))
for verb in ("serve", "explain"):
    for again in ("_again", "_once_more"):
        setattr(ExplainMachine, verb + again, as_rule(verb))

TestExplainMachine = ExplainMachine.TestCase
TestTinyHistoryMachine = TinyHistoryMachine.TestCase
TestExplainMachine.settings = settings(deadline=None, stateful_step_count=30)
TestTinyHistoryMachine.settings = settings(deadline=None, stateful_step_count=30)
