"""PageAllocator against a set, one random call after the other."""

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvpool import PageAllocator
from tests.oracles.allocator import AllocatorModel


class AllocatorMachine(RuleBasedStateMachine):
    """A second allocator gets the same calls: page ids must not depend on anything else."""

    @initialize(num_pages=st.integers(0, 24))
    def make(self, num_pages):
        self.pages = PageAllocator(num_pages)
        self.shadow = PageAllocator(num_pages)
        self.model = AllocatorModel(num_pages)

    @rule(n=st.integers(0, 9))
    def take(self, n):
        chosen = self.pages.take(n)
        if chosen is not None:
            assert chosen.dtype == np.int32
            assert chosen.shape == (n,)
        self.model.take(n, chosen)
        np.testing.assert_array_equal(chosen, self.shadow.take(n))

    @rule(n=st.integers(-3, -1))
    def take_less_than_nothing(self, n):
        with pytest.raises(ValueError, match=str(n)):
            self.pages.take(n)

    @precondition(lambda self: self.model.taken)
    @rule(data=st.data())
    def give(self, data):
        taken = sorted(self.model.taken)
        pages = data.draw(st.lists(st.sampled_from(taken), unique=True))
        self.pages.give(np.array(pages, np.int32))
        self.shadow.give(np.array(pages, np.int32))
        self.model.give(pages)

    @rule(data=st.data(), foreign=st.integers(-2, 30), where=st.integers(0, 100))
    def give_a_wrong_page(self, data, foreign, where):
        """A free, foreign, negative or repeated page among good ones is refused and named."""
        taken = sorted(self.model.taken)
        pages = data.draw(st.lists(st.sampled_from(taken), unique=True)) if taken else []
        pages.insert(where % (len(pages) + 1), foreign)
        wrong = self.model.wrong_pages(pages)
        if not wrong:
            return
        with pytest.raises(ValueError) as refused:  # noqa: PT011 - the text is checked below
            self.pages.give(np.array(pages, np.int32))
        assert any(str(page) in str(refused.value) for page in wrong)

    @invariant()
    def agrees(self):
        if not hasattr(self, "pages"):
            return
        assert self.pages.num_free == len(self.model.free)
        for page in range(self.model.num_pages):
            assert self.pages.is_free(page) == (page in self.model.free)
        self.pages.check()


AllocatorMachine.TestCase.settings = settings(deadline=None, stateful_step_count=40)
TestAllocatorMachine = AllocatorMachine.TestCase


def test_take_all_then_give_all_in_any_order_restores_every_page():
    pages = PageAllocator(100)
    for seed in range(5):
        everything = pages.take(100)
        assert sorted(everything.tolist()) == list(range(100))
        assert pages.take(1) is None
        np.random.default_rng(seed).shuffle(everything)
        pages.give(everything[:37])
        pages.give(everything[37:])
        assert pages.num_free == 100
        pages.check()


@pytest.mark.parametrize("as_given", [list, tuple, np.int64, np.int32])
def test_give_takes_pages_in_any_integer_form(as_given):
    pages = PageAllocator(4)
    taken = pages.take(3)
    given = as_given(taken.tolist()) if as_given in (list, tuple) else taken.astype(as_given)
    pages.give(given)
    assert pages.num_free == 4
