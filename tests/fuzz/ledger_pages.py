"""The verbs of a LedgerStream that need no request: raw pages, the tree, looking."""

import numpy as np

from tests.fuzz.stream import given
from tests.fuzz.tree import KEYS, PRIORITIES


class PageVerbs:
    # ---- raw pages

    def take(self, stream):
        n = stream.integer(0, 6)
        fits = self.model.fits(n)
        pages = self.ledger.take(n)
        assert (pages is not None) == fits
        if fits:
            self.model.make_room(n)
            self.model.claim(pages.tolist())
            self.model.taken |= set(pages.tolist())

    def draw_taken(self, stream, most):
        taken = sorted(self.model.taken)
        return [taken.pop(stream.integer(0, len(taken) - 1)) for _ in taken[:most]]

    def give(self, stream):
        pages = self.draw_taken(stream, 4)
        assert self.ledger.give(np.array(pages, np.int32)) == -1
        self.model.taken -= set(pages)
        self.model.free |= set(pages)

    def give_wrongly(self, stream):
        pages = self.draw_taken(stream, 3)
        foreign = stream.integer(-1, self.model.num_pages)
        if foreign not in self.model.taken:
            pages.insert(stream.integer(0, len(pages)), foreign)
            assert self.ledger.give(np.array(pages, np.int32)) == pages.index(foreign)

    # ---- the tree as a caller sees it

    def evict(self, stream):
        n = stream.integer(0, 4 * self.page_size)
        assert self.ledger.tree.evict(n).tolist() == self.model.evict_to_taken(n)

    def insert(self, stream):
        tokens, key, priority = self.draw(stream), stream.item(KEYS), stream.item(PRIORITIES)
        pages = self.draw_taken(stream, len(tokens) // self.page_size)
        tokens = tokens[: len(pages) * self.page_size]
        result = self.ledger.tree.insert(given(stream, tokens), pages, key, priority)
        num_cached, path = self.model.tree.insert(tokens, pages, key, priority)
        assert result.prefix_len == num_cached * self.page_size
        self.model.taken -= {node.page for node in path[num_cached:]}
        self.remember(tokens)

    def match(self, stream):
        tokens, key = self.draw(stream), stream.item(KEYS)
        found = self.ledger.tree.match_prefix(given(stream, tokens), key)
        path = self.model.tree.match(tokens, key)
        assert found.pages.tolist() == [node.page for node in path]
        if path and len(self.locks) < 3:
            self.ledger.tree.inc_lock_ref(found.node)
            self.model.tree.lock(path[-1])
            self.locks.append(found.node)
            self.model.external.append(path[-1])

    def unlock(self, stream):
        if self.locks:
            i = stream.integer(0, len(self.locks) - 1)
            self.ledger.tree.dec_lock_ref(self.locks.pop(i))
            self.model.unlock(self.model.external.pop(i))

    def reset(self, _stream):
        assert self.ledger.reset() == self.model.reset()

    def reset_tree(self, _stream):
        """The tree's own reset hands the pages to the caller."""
        dropped, kept = set(self.ledger.tree.reset().tolist()), set(self.model.free)
        self.model.reset()
        assert dropped == self.model.free - kept
        self.model.free = kept
        self.model.taken |= dropped

    # ---- looking

    def would_fit(self, stream):
        prompt, key = self.draw(stream) or [1], stream.item(KEYS)
        capacity = len(prompt) + stream.integer(0, 3 * self.page_size)
        plan = self.model.plan_bind(prompt, capacity, key)
        form = given(stream, prompt)
        assert self.ledger.would_fit(form, capacity, key, self.model.reuse) == plan.fits
        alone = self.model.plan_exclusive(prompt, 1 << 40, key)
        found = self.ledger.room_if_alone(prompt, key, self.model.reuse)
        assert found == (len(alone.path), alone.need)

    def locate(self, stream):
        page = stream.integer(0, self.model.num_pages - 1)
        state = self.ledger.locate(page)[0]
        if page in self.model.holders:
            assert state == "private"
            assert self.ledger.holders_of(page) >= 1
        else:
            states = {"free": self.model.free, "taken": self.model.taken}
            assert state == next((name for name, at in states.items() if page in at), "tree")
