"""A pool in poison mode against a model that says of every page whether it must be poison.

Nothing may be found in a healthy pool, whatever is done to it: that is checked too.
"""

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant

from kvpool import EVICTION_POLICIES
from tests.oracles.drawing import NumpyChooser
from tests.oracles.poison_twin import PoisonTwin
from tests.oracles.twin import WEIGHTS
from tests.test_machine_pool import SHARES, HypothesisChooser, PoolMachine


class PoisonMachine(PoolMachine):
    @initialize(data=st.data())
    def make(self, data):
        choose = HypothesisChooser(data)
        self.twin = PoisonTwin(
            choose.integer(8, 40),
            choose.item(self.page_sizes),
            max_words=4,
            eviction=choose.item(EVICTION_POLICIES),
        )
        rng = np.random.default_rng(choose.integer(0, 2**16))
        for verb in rng.choice(list(WEIGHTS), choose.integer(0, 40), p=SHARES).tolist():
            getattr(self.twin, verb)(NumpyChooser(rng))

    @invariant()
    def poison_is_where_it_must_be(self):
        if hasattr(self, "twin"):
            self.twin.compare_poison()


def drive(seed, operations, page_size, eviction):
    rng = np.random.default_rng(seed)
    twin = PoisonTwin(int(rng.integers(8, 60)), page_size, max_words=4, eviction=eviction)
    choose = NumpyChooser(rng)
    for verb in rng.choice(list(WEIGHTS), operations, p=SHARES).tolist():
        getattr(twin, verb)(choose)
        twin.compare_sums()
        twin.compare_poison()
    twin.compare_all()
    twin.compare_raw()
    twin.finish_all()


@pytest.mark.parametrize("eviction", EVICTION_POLICIES)
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_every_page_is_poison_when_it_must_be_and_only_then(page_size, eviction):
    drive(page_size, 150, page_size, eviction)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("seed", range(12))
def test_every_page_is_poison_over_long_runs(seed):
    drive(100 + seed, 2000, (1, 4, 16)[seed % 3], EVICTION_POLICIES[seed % 3])


class QuickMachine(PoisonMachine):
    """A few short runs; the other one takes as many as the profile says."""


QuickMachine.TestCase.settings = settings(deadline=None, stateful_step_count=20, max_examples=8)
TestQuickPoisonMachine = QuickMachine.TestCase
PoisonMachine.TestCase.settings = settings(deadline=None, stateful_step_count=40)
TestPoisonMachine = pytest.mark.long(pytest.mark.slow(PoisonMachine.TestCase))
