"""A RequestTable and its `HistoryOracle` side by side, and all that `explain` says compared.

`choose` draws the arguments, so the same verbs serve a Hypothesis machine and a seeded driver.
"""

import json

from kvpool.errors import KVCacheExhaustedError
from kvpool.requests import RequestTable
from tests.oracles.drawing import ALPHABET, WORDS, word
from tests.oracles.history import HistoryOracle, common_len

KEYS = (None, None, None, None, "a", 7, b"a")

# how often each verb comes up in a driver; the machine takes each as a rule
WEIGHTS = {
    "serve": 12,
    "bind": 3,
    "finish": 4,
    "checkpoint": 1,
    "unbind": 1,
    "extend": 1,
    "fork": 1,
    "alloc": 1,
    "free": 2,
    "evict": 1,
    "match": 2,
    "reset": 0.2,
    "explain": 10,
}


class ExplainTwin:
    def __init__(self, num_pages, page_size, eviction_history):
        self.table = RequestTable(num_pages, page_size, 1, eviction_history=eviction_history)
        self.radix = self.table.ledger.tree
        self.oracle = HistoryOracle(page_size)
        self.size = page_size
        self.bound = {}  # request id -> (request, tokens that it told, whether it may publish)
        self.known = []
        self.taken = []
        self.explanations = []

    # ---- drawing

    def draw_prompt(self, choose):
        """Words, or something known up to anywhere and then something else."""
        tokens = []
        if self.known and choose.integer(0, 3):
            tokens = choose.item(self.known)
            tokens = tokens[: choose.integer(0, 2 * len(tokens))]
        for letter in choose.items(WORDS, choose.integer(0, 3)):
            tokens = tokens + word(letter, self.size)
        tokens = tokens + choose.items(ALPHABET, choose.integer(0 if tokens else 1, self.size))
        self.known = [*self.known[-15:], tokens]
        return tokens

    def draw_bound(self, choose):
        return choose.item(list(self.bound.values())) if self.bound else (None, None, None)

    # ---- what changes the cache

    def bind(self, choose):
        prompt, key = self.draw_prompt(choose), choose.item(KEYS)
        capacity = len(prompt) + choose.integer(0, 2 * self.size)
        reuse = choose.integer(0, 9) > 0
        try:
            request = self.table.bind(prompt, capacity, key, choose.item((0, 0, 0, 2)), reuse)
        except KVCacheExhaustedError:
            return None
        self.bound[request.tag] = request, prompt, reuse
        self.oracle.follow(self.radix, "bind", request.tag)
        return request

    def write(self, choose, request):
        """Some tokens more than it told, and how many of all are written."""
        answer = choose.items(ALPHABET, choose.integer(0, 2 * self.size))
        tokens = [*self.bound[request.tag][1], *answer][: self.table.capacity(request)]
        least = choose.item((0, len(tokens), len(tokens)))
        self.table.mark_written(request, choose.integer(least, len(tokens)))
        return tokens

    def serve(self, choose):
        """A request from bind to finish."""
        request = self.bind(choose)
        if request is not None:
            self.end(request, self.write(choose, request))

    def finish(self, choose):
        request, _, _ = self.draw_bound(choose)
        if request is not None:
            self.end(request, self.write(choose, request))

    def end(self, request, tokens):
        self.known = [*self.known[-15:], tokens]
        self.table.finish(request, tokens, True)
        del self.bound[request.tag]
        self.oracle.follow(self.radix, "nobody")

    def checkpoint(self, choose):
        request, told, publishes = self.draw_bound(choose)
        if request is None:
            return
        tokens = self.write(choose, request)
        num_pages = min(self.table.valid_len(request), len(tokens)) // self.size
        if publishes and num_pages > request.tree_pages:
            told = told + tokens[len(told) : num_pages * self.size]
        self.table.checkpoint(request, tokens, True)
        self.bound[request.tag] = request, told, publishes
        self.oracle.follow(self.radix, "nobody")

    def unbind(self, choose):
        request, _, _ = self.draw_bound(choose)
        if request is not None:
            self.table.unbind(request)
            del self.bound[request.tag]
            self.oracle.follow(self.radix, "nobody")

    def extend(self, choose):
        request, _, _ = self.draw_bound(choose)
        if request is None:
            return
        try:
            self.table.extend(request, self.table.capacity(request) + choose.integer(0, 8))
        except KVCacheExhaustedError:
            return
        self.oracle.follow(self.radix, "extend", request.tag)

    def fork(self, choose):
        request, told, publishes = self.draw_bound(choose)
        if request is None:
            return
        capacity = max(1, self.table.valid_len(request) + choose.integer(0, 8))
        try:
            child = self.table.fork(request, capacity)
        except KVCacheExhaustedError:
            return
        self.bound[child.tag] = child, told, publishes
        self.oracle.follow(self.radix, "fork", child.tag)

    def alloc(self, choose):
        pages = self.table.ledger.take(choose.integer(1, 4))
        self.oracle.follow(self.radix, "alloc")
        if pages is not None:
            self.taken.append(pages)

    def free(self, choose):
        if self.taken:
            assert self.table.ledger.give(self.taken.pop()) == -1

    def evict(self, choose):
        self.taken.append(self.radix.evict(choose.integer(0, 8)))
        self.oracle.follow(self.radix, "radix.evict")

    def match(self, choose):
        """Splits nodes, and makes them recent."""
        self.radix.match_prefix(self.draw_prompt(choose), extra_key=choose.item(KEYS))
        self.oracle.follow(self.radix, "nobody")

    def reset(self, choose):
        self.table.ledger.reset()
        self.oracle.reset(self.radix)
        self.bound = {
            tag: (request, told, False) for tag, (request, told, _) in self.bound.items()
        }

    # ---- asking

    def explain(self, choose):
        prompt, key = self.draw_prompt(choose), choose.item(KEYS)
        before = self.radix._snapshot(), self.radix.format_tree()
        why = self.table.explain(prompt, key)
        assert (self.radix._snapshot(), self.radix.format_tree()) == before
        self.compare(why, prompt, key)
        self.explanations.append(why)

    def compare(self, why, prompt, key):
        limit, matched = len(self.oracle.prefixes(prompt, key)), self.oracle.matched(prompt, key)
        assert (why.prompt_len, why.limit_len) == (len(prompt), limit * self.size)
        assert why.matched_len == why.cached_len == matched * self.size
        self.compare_evicted(why, self.oracle.evictions(prompt, key))
        self.compare_nearest(why, *self.oracle.nearest(prompt, key))
        self.compare_other(why, *self.oracle.others(prompt, key))
        self.compare_bound(why, prompt, key)
        assert why.reason == self.reason(why)
        json.dumps(why.as_dict())

    def compare_evicted(self, why, truth):
        """What it says of evictions is so; all of it, if nothing was forgotten."""
        end, total = why.cached_len, self.oracle.evicted_pages
        for run in why.evicted:
            assert run.start == end < run.end
            pages = [(at - why.cached_len) // self.size for at in range(end, run.end, self.size)]
            for page in pages:
                assert (run.cause, run.request_id) == (truth[page].cause, truth[page].request)
            deepest = truth[pages[-1]]
            assert total - deepest.last < run.pages_since <= total - deepest.first
            end = run.end
        if why.reach.complete:
            assert end == why.cached_len + len(truth) * self.size
        assert why.evicted_len == end
        assert why.reach.remembered_len <= why.reach.limit_len

    def compare_nearest(self, why, entries, num_branches):
        near = why.nearest
        if not entries or why.cached_len == why.limit_len > 0:
            assert near is None
            return
        assert near.num_branches == num_branches
        assert any(
            (near.common_len, near.sequence_len, near.locked) == (common, length, locked)
            and near.cached_tokens[: len(tokens)] == tokens[:4]
            for common, length, tokens, locked in entries
        )

    def compare_other(self, why, names, num_pages):
        if not names:
            assert why.other_namespace is None
            return
        assert why.other_namespace.extra_key in names
        assert why.other_namespace.match_len == num_pages * self.size

    def compare_bound(self, why, prompt, key):
        counts = {
            tag: min(common_len(told, prompt), len(prompt) - 1) // self.size * self.size
            for tag, (request, told, publishes) in self.bound.items()
            if publishes and type(request.extra_key) is type(key) and request.extra_key == key
        }
        if max(counts.values(), default=0) <= why.cached_len:
            assert why.bound is None
            return
        assert counts[why.bound.request_id] == why.bound.match_len == max(counts.values())

    def reason(self, why):
        """The order of `kvpool.explain`, once more."""
        common = why.nearest.common_len if why.nearest else 0
        holds = [
            (why.limit_len == 0, "page floor"),
            (why.matched_len == why.limit_len, "whole"),
            (bool(why.evicted), "evicted"),
            (why.other_namespace is not None, "other namespace"),
            (common >= self.size, "diverged"),
            (common > 0, "page floor"),
            (True, "cold"),
        ]
        return next(name for held, name in holds if held)
