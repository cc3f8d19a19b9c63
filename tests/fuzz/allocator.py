"""Operations on a PageAllocator and its model."""

import numpy as np
import pytest

from kvpool import PageAllocator
from tests.fuzz.stream import given
from tests.oracles.allocator import AllocatorModel


class AllocatorStream:
    VERBS = ("take", "give", "give_a_run", "give_wrongly", "look")

    def __init__(self, stream):
        # Around 32, where runs of ids are handled in pieces.
        num_pages = stream.item((0, 1, 31, 33, 64, 100))
        self.pages, self.model = PageAllocator(num_pages), AllocatorModel(num_pages)

    def take(self, stream):
        n = stream.integer(0, self.model.num_pages + 1)
        chosen = self.pages.take(n)
        self.model.take(n, chosen)

    def give(self, stream):
        taken = sorted(self.model.taken)
        pages = [taken.pop(stream.integer(0, len(taken) - 1)) for _ in taken[:6]]
        self.pages.give(given(stream, pages))
        self.model.give(pages)

    def give_a_run(self, stream):
        """Neighbours, up or down."""
        taken = sorted(self.model.taken)
        first = stream.integer(0, len(taken))
        pages = taken[first : first + stream.integer(0, 70)][:: stream.item((1, -1))]
        self.pages.give(np.array(pages, np.int32))
        self.model.give(pages)

    def give_wrongly(self, stream):
        taken = sorted(self.model.taken)
        pages = taken[: stream.integer(0, 70)]
        foreign = stream.item((-1, -(2**31), 2**31 - 1, self.model.num_pages, *range(8)))
        pages.insert(stream.integer(0, len(pages)), foreign)
        wrong = self.model.wrong_pages(pages)
        if wrong:
            with pytest.raises(ValueError) as refused:  # noqa: PT011 - the text is checked below
                self.pages.give(np.array(pages, np.int32))
            assert str(wrong[0]) in str(refused.value)

    def look(self, stream):
        page = stream.integer(0, 120)
        if page < self.model.num_pages:
            assert self.pages.is_free(page) == (page in self.model.free)
        assert sorted(self.pages.taken_pages().tolist()) == sorted(self.model.taken)

    def compare(self):
        assert self.pages.num_free == len(self.model.free)
        assert self.pages.num_taken == len(self.model.taken)

    def compare_all(self):
        assert sorted(self.pages.free_pages().tolist()) == sorted(self.model.free)
        self.pages.check()

    def end(self):
        self.pages.give(np.array(sorted(self.model.taken), np.int32))
        assert self.pages.num_free == self.model.num_pages
        self.pages.check()
