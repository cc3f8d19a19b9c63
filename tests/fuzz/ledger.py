"""Operations on a PageLedger, which holds a tree and an allocator, and the model of a pool."""

import numpy as np
import pytest

from kvpool import EVICTION_POLICIES
from kvpool_ext.ledger import PageLedger
from tests.fuzz.ledger_pages import PageVerbs
from tests.fuzz.stream import NOTHING_LEFT, given
from tests.fuzz.tree import KEYS, PRIORITIES, draw_tokens
from tests.oracles.drawing import ALPHABET
from tests.oracles.pool import PoolModel

MAX_BOUND = 12


class LedgerStream(PageVerbs):
    VERBS = (
        *("bind", "mark", "finish") * 3,
        *("checkpoint", "fork", "take", "give", "match", "unlock") * 2,
        *("bind_blank", "extend", "shrink", "seal", "release", "evict", "insert", "contradict"),
        *("give_wrongly", "would_fit", "locate", "reset", "reset_tree", "toggle"),
    )

    def __init__(self, stream):
        self.page_size = stream.item((1, 2, 4, 8))
        policy = stream.item(EVICTION_POLICIES)
        num_pages = stream.item((6, 12, 24, 40))
        history = stream.item((0, 9 * self.page_size, 1000))
        self.ledger = PageLedger(num_pages, self.page_size, 1, policy, history)
        self.model = PoolModel(num_pages, self.page_size, 1, policy)
        self.known = []
        self.locks = []  # handles that go with model.external

    # ---- drawing

    def draw(self, stream):
        return draw_tokens(stream, self.page_size, self.known, max_words=8)

    def remember(self, tokens):
        self.known = [*self.known[-7:], tokens]

    def pick(self, stream):
        """A bound request of the model and its lease, or two times None."""
        requests = list(self.model.requests.values())
        if not requests:
            return None, None
        request = stream.item(requests)
        return request, self.ledger.leases[request.id]

    def continued(self, stream, request, tokens):
        """A history as long as the capacity, that agrees with what the ledger was told."""
        tokens = tokens + (request.prompt or [])[len(tokens) :]
        rest = request.capacity - len(tokens)
        words = [token for letter in stream.items(ALPHABET, 3) for token in [letter] * 3]
        return (tokens + words * (rest // len(words) + 1))[: request.capacity]

    def written(self, stream, request):
        n = stream.item((request.valid_len, stream.integer(0, request.capacity)))
        return request.tokens[:n]

    # ---- a request's life

    def bind(self, stream):
        prompt = self.draw(stream) or [1]
        capacity = len(prompt) + stream.integer(0, 3 * self.page_size)
        key, priority = stream.item(KEYS), stream.item(PRIORITIES)
        if len(self.model.requests) >= MAX_BOUND:
            return
        plan = self.model.plan_bind(prompt, capacity, key)
        lease = self.ledger.bind(given(stream, prompt), capacity, key, priority, self.model.reuse)
        assert self.ledger.needed_pages == plan.need
        assert (lease is not None) == plan.fits
        if lease is not None:
            self.started(stream, plan, lease, prompt)

    def bind_blank(self, stream):
        num_pages = stream.integer(1, self.model.num_pages // 2)
        key = stream.item(KEYS)
        if len(self.model.requests) >= MAX_BOUND:
            return
        plan = self.model.plan_bind([], num_pages * self.page_size, key)
        lease = self.ledger.bind_blank(num_pages, key, self.model.reuse)
        assert (lease is not None) == plan.fits
        if lease is not None:
            self.started(stream, plan, lease, None)

    def started(self, stream, plan, lease, prompt):
        pages = lease.pages().tolist()
        request = self.model.bind(plan, lease.tag, pages, lease.extra_key, lease.priority, prompt)
        self.model.start_tokens(request, self.continued(stream, request, []))

    def mark(self, stream):
        request, lease = self.pick(stream)
        if request is None:
            return
        start = request.valid_len
        end = stream.item((request.capacity, min(request.capacity, start + self.page_size)))
        end = stream.item((end, stream.integer(0, request.capacity)))
        assert self.ledger.mark(lease, end)
        request.write(0, min(start, end), end)
        request.declare(end)
        assert not self.ledger.mark(lease, request.capacity + stream.item((1, 1 << 40, 1 << 70)))

    def seal(self, stream):
        request, lease = self.pick(stream)
        if request is not None:
            length = request.shared + stream.integer(0, request.capacity - request.shared)
            self.ledger.lengths.cap(lease.row, length)
            request.seal(length)

    def finish(self, stream):
        request, lease = self.pick(stream)
        if request is not None:
            tokens = self.written(stream, request)
            count = self.ledger.finish(lease, given(stream, tokens), self.model.reuse)
            assert count == self.model.finish(request, tokens)
            self.remember(tokens)
            with pytest.raises(RuntimeError):
                self.ledger.release(lease)

    def contradict(self, stream):
        """The tokens of somebody else are refused."""
        request, lease = self.pick(stream)
        if request is not None and request.prompt:
            at = stream.integer(0, len(request.prompt) - 1)
            tokens = [*request.prompt[:at], request.prompt[at] ^ 1]
            verb = stream.item((self.ledger.finish, self.ledger.checkpoint))
            with pytest.raises(ValueError, match=f"position {at} "):
                verb(lease, given(stream, tokens), self.model.reuse)

    def checkpoint(self, stream):
        request, lease = self.pick(stream)
        if request is not None:
            tokens = self.written(stream, request)
            count = self.ledger.checkpoint(lease, given(stream, tokens), self.model.reuse)
            assert count == self.model.checkpoint(request, tokens)
            self.remember(tokens)

    def release(self, stream):
        request, lease = self.pick(stream)
        if request is not None:
            self.ledger.release(lease)
            self.model.release(request)

    def fork(self, stream):
        request, lease = self.pick(stream)
        if request is None or len(self.model.requests) >= MAX_BOUND:
            return
        valid_len = request.valid_len
        capacity = max(1, valid_len) + stream.integer(0, 3 * self.page_size)
        plan = self.model.plan_fork(request, capacity)
        num_pages = self.model.pages_for(capacity)
        child = self.ledger.fork(lease, plan[0], num_pages, valid_len)
        assert (child is not None) == plan[2]
        if child is not None:
            child.entered_pages = self.model.pages_for(valid_len)
            twin = self.model.fork(request, child.tag, child.pages().tolist(), plan)
            twin.set_tokens(self.continued(stream, twin, request.tokens[:valid_len]))

    def extend(self, stream):
        request, lease = self.pick(stream)
        if request is None:
            return
        num_pages = stream.integer(1, len(request.pages) + 4)
        need = max(0, num_pages - len(request.pages))
        fits = self.model.fits(need)
        assert self.ledger.extend(lease, num_pages) == fits
        if fits and need:
            request.grow(self.model.extend(request, lease.pages().tolist()))
            request.set_tokens(self.continued(stream, request, request.tokens))

    def shrink(self, stream):
        request, lease = self.pick(stream)
        if request is not None:
            least = max(lease.shared_pages, lease.entered_pages, 1)
            num_pages = stream.integer(least, max(least, len(request.pages)))
            self.ledger.shrink(lease, num_pages)
            self.model.shrink(request, num_pages * self.page_size)

    def toggle(self, _stream):
        self.model.reuse = not self.model.reuse

    # ---- comparing

    def compare(self):
        ledger, model, size = self.ledger, self.model, self.page_size
        assert ledger.allocator.num_free == len(model.free)
        assert ledger.allocator.num_taken == len(model.taken)
        assert ledger.private_pages == len(model.holders)
        assert ledger.tree.total_size == model.tree.total * size
        assert ledger.tree.evictable_size == model.tree.evictable * size
        assert ledger.tree.evicted_pages == model.evicted

    def compare_all(self):
        for request in self.model.requests.values():
            lease = self.ledger.leases[request.id]
            assert lease.pages().tolist() == request.pages
            assert lease.shared_pages * self.page_size == request.shared
            assert self.ledger.lengths.minimum(lease.row) == request.valid_len
            assert (lease.extra_key, lease.priority) == (request.key, request.priority)
        assert len(self.ledger.leases) == len(self.model.requests)
        self.ledger.check()

    def end(self):
        """Let everything go, and find every page again."""
        self.compare_all()
        for lease in list(self.ledger.leases.values()):
            self.ledger.release(lease)
        self.model.release_all()
        while self.locks:
            self.unlock(NOTHING_LEFT)
        order = self.model.tree.drain_order()
        victims = self.ledger.tree.evict(self.model.num_pages * self.page_size).tolist()
        assert victims == order
        self.ledger.give(np.array([*victims, *sorted(self.model.taken)], np.int32))
        assert self.ledger.allocator.num_free == self.model.num_pages
        self.ledger.check()
