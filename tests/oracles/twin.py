"""A pool and its model side by side: each verb does one call on both and compares the answers.

`choose` draws the arguments, so the same verbs serve a Hypothesis machine and a seeded driver.
"""

import contextlib

import numpy as np

from kvpool import KVCachePool
from tests.oracles.drawing import ALPHABET, NAMESPACES, WORDS, word
from tests.oracles.pool import PoolModel
from tests.oracles.prints import HEAD_DIM, LAYERS
from tests.oracles.twin_pages import PageVerbs
from tests.oracles.twin_reading import ReadingVerbs
from tests.oracles.twin_requests import RequestVerbs
from tests.oracles.twin_steps import StepVerbs


class PoolTwin(RequestVerbs, PageVerbs, StepVerbs, ReadingVerbs):
    def __init__(self, num_pages, page_size, *, max_words=5, eviction="lru", **pool_options):
        pool_options |= {"page_size": page_size, "eviction": eviction}
        self.pool = KVCachePool(LAYERS, num_pages * page_size, 1, HEAD_DIM, **pool_options)
        self.model = PoolModel(num_pages, page_size, LAYERS, eviction)
        self.page_size = page_size
        self.max_words = max_words
        self.steps = []
        self.latest = None
        self.history = []
        self.locks = []  # handles that go with model.external
        self.reads = self.refusals = 0

    # ---- drawing

    def draw_tokens(self, choose, n):
        return choose.items(ALPHABET, n)

    def draw_prompt(self, choose):
        """Pages out of three words, or a finished sequence and more: hits, late partings."""
        size = self.page_size
        tokens = []
        if self.history and choose.integer(0, 2) == 0:
            tokens = choose.item(self.history)
            tokens = tokens[: choose.integer(0, len(tokens))]
        else:
            for letter in choose.items(WORDS, choose.integer(0, self.max_words)):
                tokens += word(letter, size)
        return tokens + self.draw_tokens(choose, choose.integer(0 if tokens else 1, size))

    def draw_bind(self, choose):
        prompt = self.draw_prompt(choose)
        capacity = len(prompt) + choose.integer(0, 3 * self.page_size)
        return prompt, capacity, choose.item((None, None, None, None, *NAMESPACES))

    def draw_request(self, choose):
        requests = list(self.model.requests.values())
        return choose.item(requests) if requests else None

    def given(self, choose, tokens):
        form = choose.item((list, tuple, np.int32, np.int64))
        return form(tokens) if form in (list, tuple) else np.array(tokens, form)

    # ---- comparing

    def snapshot(self):
        pool, radix = self.pool, self.pool.radix
        stats = {k: v for k, v in pool.stats().items() if not k.startswith("bind_failures")}
        infos = [pool.request(i) for i in self.model.requests]
        infos = [
            (i.request_id, i.capacity, i.matched_len, i.valid_len, i.shared_len, list(i.page_ids))
            for i in infos
        ]
        return stats, (radix.evictable_size, radix.protected_size, radix.total_size), infos

    @contextlib.contextmanager
    def refused(self, *errors):
        """The body must raise one of `errors` and change nothing."""
        before = self.snapshot()
        self.refusals += 1
        self.caught = None
        try:
            yield
        except errors as error:
            self.caught = error
        else:
            raise AssertionError(f"nothing raised, expected {[e.__name__ for e in errors]}")
        assert self.snapshot() == before, f"{self.caught!r} changed something"

    def compare_sums(self):
        """The ledger by its counts, as cheap as it goes."""
        pool, model, size = self.pool, self.model, self.page_size
        stats = pool.stats()
        tree = model.tree
        assert stats["pages_free"] == pool.free_pages == len(model.free)
        assert stats["pages_private"] == len(model.holders)
        assert stats["pages_tree"] == tree.total
        assert stats["pages_taken"] == len(model.taken)
        assert (
            len(model.free) + len(model.holders) + tree.total + len(model.taken) == model.num_pages
        )
        assert stats["requests_bound"] == pool.bound_request_count == len(model.requests)
        assert pool.radix.evictable_size == tree.evictable * size
        assert pool.radix.protected_size == tree.protected * size
        assert stats["prefix_prompt_tokens"] == model.prompt_tokens
        assert stats["prefix_match_tokens"] == model.match_tokens
        assert stats["prefix_insert_tokens"] == model.insert_tokens
        assert stats["evicted_pages"] == model.evicted

    def compare_all(self):
        self.compare_sums()
        pool, model = self.pool, self.model
        for request in model.requests.values():
            info = pool.request(request.id)
            assert (info.request_id, info.capacity) == (request.id, request.capacity)
            assert list(info.page_ids) == request.pages
            assert (info.valid_len, info.shared_len) == (request.valid_len, request.shared)
            assert (info.extra_key, info.priority) == (request.key, request.priority)
            assert type(info.extra_key) is type(request.key)
            if request.matched is None:  # a fork: constant from here on
                request.matched = info.matched_len
            assert info.matched_len == pool.matched_prefix_len(request.id) == request.matched
            assert pool.valid_len(request.id) == request.valid_len
            assert pool.is_bound(request.id)
        self.bury_steps()
        live = self.latest in self.steps
        smallest = (
            min((model.requests[i].capacity for i in self.latest.ids), default=0) if live else 0
        )
        assert pool.request_capacity == smallest
        pool.check()

    def page_ids(self, request_id):
        return [int(page) for page in self.pool.request(request_id).page_ids]

    # ---- the end

    def finish_all(self):
        """Let everything go and find every page again, the tree's in the order of a drain."""
        self.unbind_all(None)
        while self.locks:
            self.pool.radix.dec_lock_ref(self.locks.pop())
            self.model.unlock(self.model.external.pop())
        self.compare_all()
        assert self.model.tree.protected == 0
        order = self.model.tree.drain_order()
        victims = self.pool.radix.evict(self.model.num_pages * self.page_size).tolist()
        assert victims == order
        self.model.evict_to_taken(self.model.num_pages * self.page_size)
        self.pool.free(np.array(self.expand(sorted(self.model.taken)), np.int64))
        self.model.free |= self.model.taken
        self.model.taken.clear()
        self.compare_all()
        assert self.pool.free_pages == self.model.num_pages
        self.pool.close()


# how often each verb comes up in a driver; the machine takes each as a rule
WEIGHTS = {
    "serve": 10,
    "bind": 14,
    "put": 24,
    "finish": 8,
    "read": 6,
    "table": 4,
    "checkpoint": 4,
    "unbind": 2,
    "fork": 3,
    "extend": 3,
    "shrink": 2,
    "mark_written": 4,
    "seal": 2,
    "truncate": 2,
    "invalidate": 1,
    "alloc": 2,
    "free": 2,
    "radix_evict": 1,
    "radix_insert": 1,
    "radix_match": 2,
    "radix_unlock": 1,
    "would_fit": 2,
    "owner": 1,
    "put_wrongly": 1,
    "read_past_the_end": 1,
    "bind_with_prefix": 0.3,
    "bind_requests": 0.3,
    "unbind_all": 0.2,
    "reset": 0.3,
    "radix_reset": 0.1,
    "toggle_reuse": 0.2,
}
