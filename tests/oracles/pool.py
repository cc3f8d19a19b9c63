"""The whole pool as sets of page ids, a page trie and the requests that hold them.

The model never chooses a page id: it learns which ones the pool handed out, and checks that they
were free to give.
"""

import numpy as np

from tests.oracles.prints import UNKNOWN, k_prints
from tests.oracles.request import RequestModel
from tests.oracles.tree import TreeModel


class BindPlan:
    """What a bind would do: matched path, private pages needed, whether they are there."""

    def __init__(self, path, num_pages, need, fits):
        self.path = path
        self.num_pages = num_pages
        self.need = need
        self.fits = fits


class PoolModel:
    def __init__(self, num_pages, page_size, num_layers, eviction="lru"):
        self.num_pages = num_pages
        self.page_size = page_size
        self.num_layers = num_layers
        self.tree = TreeModel(page_size, eviction)
        self.free = set(range(num_pages))
        self.taken = set()
        self.holders = {}  # private page -> ids of the requests that hold it
        self.requests = {}
        self.external = []  # tree pages that the caller locked through pool.radix
        self.reuse = True
        self.prompt_tokens = self.match_tokens = self.insert_tokens = 0
        self.evicted = 0

    def pages_for(self, num_tokens):
        return -(-num_tokens // self.page_size)

    # ---- pages

    def make_room(self, need):
        short = need - len(self.free)
        if short > 0:
            victims = self.tree.evict(short)
            assert len(victims) == short
            self.evicted += short
            self.free |= set(victims)

    def claim(self, pages):
        """The pool handed these out: they must have been free, and are not any more."""
        assert len(set(pages)) == len(pages)
        assert set(pages) <= self.free, f"held pages handed out: {set(pages) - self.free}"
        self.free -= set(pages)

    def unlock(self, node):
        if node is not None:
            self.free |= set(self.tree.unlock(node))
            self.tree.released.clear()  # a pool frees them at once

    def fits(self, need, path=()):
        usable = self.tree.evictable - sum(node.locks == 0 for node in path)
        return need <= len(self.free) + usable

    # ---- binds

    def plan_bind(self, prompt, capacity, key):
        path = self.tree.find(prompt[:-1], key) if self.reuse else []
        num_pages = self.pages_for(capacity)
        need = num_pages - len(path)
        return BindPlan(path, num_pages, need, self.fits(need, path))

    def plan_exclusive(self, prompt, capacity, key):
        """As if nothing else were bound: what only the caller's own locks and takes keep away."""
        path = self.tree.find(prompt[:-1], key) if self.reuse else []
        kept = self.kept_nodes()
        room = self.num_pages - len(self.taken) - len(kept) - sum(id(n) not in kept for n in path)
        num_pages = min(self.pages_for(capacity), len(path) + room)
        fits = num_pages * self.page_size >= len(prompt)
        return BindPlan(path, num_pages, num_pages - len(path), fits)

    def plan_batch(self, batch, capacity):
        room = self.num_pages - len(self.taken) - len(self.kept_nodes())
        return min(self.pages_for(capacity), room // batch)

    def kept_nodes(self):
        return {id(step) for node in self.external for step in node.path()}

    def bind(self, plan, request_id, page_ids, key, priority, prompt=None):
        """Follow a bind that succeeded with `page_ids`."""
        matched = len(plan.path)
        assert len(page_ids) == plan.num_pages
        assert page_ids[:matched] == [node.page for node in plan.path]
        if plan.path:
            self.tree.use(plan.path)
            self.tree.lock(plan.path[-1])
        self.make_room(plan.need)
        private = page_ids[matched:]
        self.claim(private)
        for page in private:
            self.holders[page] = {request_id}
        request = RequestModel(
            request_id, page_ids, matched * self.page_size, key, priority, self.reuse, self
        )
        request.lock = plan.path[-1] if plan.path else None
        self.requests[request_id] = request
        if prompt is not None:
            request.prompt = list(prompt)
            if self.reuse:
                self.prompt_tokens += len(prompt)
                self.match_tokens += request.matched
        return request

    def start_tokens(self, request, tokens):
        request.set_tokens(tokens)
        request.content[:, : request.matched] = request.prints[:, : request.matched]

    # ---- the end of a request

    def release(self, request):
        del self.requests[request.id]
        for page in request.pages:
            holders = self.holders.get(page)
            if holders is not None and request.id in holders:
                holders.discard(request.id)
                if not holders:
                    del self.holders[page]
                    self.free.add(page)
        self.unlock(request.lock)

    def release_all(self):
        for request in list(self.requests.values()):
            self.release(request)

    def publish(self, request, tokens):
        """Insert what is written; answers the newly inserted token count and the path."""
        size = self.page_size
        num = min(len(tokens), request.valid_len) // size
        if not (request.inserts and self.reuse and num):
            return 0, []
        prints = k_prints(tokens, request.key, self.num_layers)[:, : num * size]
        assert np.array_equal(prints, request.content[:, : num * size]), (
            "the driver published a wrong history"
        )
        num_cached, path = self.tree.insert(
            tokens[: num * size], request.pages[:num], request.key, request.priority
        )
        deepest = {}
        for page, node in zip(request.pages, path, strict=False):
            for other in self.holders.get(page, ()):
                deepest[other] = node
        for node in path[num_cached:]:
            del self.holders[node.page]
        for other, node in deepest.items():
            if other != request.id:  # other forks go on holding what the tree has now
                self.hold(self.requests[other], node)
        count = (len(path) - num_cached) * size
        self.insert_tokens += count
        return count, path

    def hold(self, request, node):
        if request.lock is None or node.depth > request.lock.depth:
            self.tree.lock(node)
            self.unlock(request.lock)
            request.lock = node

    def finish(self, request, tokens):
        count, _ = self.publish(request, tokens)
        self.release(request)
        return count

    def checkpoint(self, request, tokens):
        count, path = self.publish(request, tokens)
        if path:
            self.hold(request, path[-1])
            request.shared = max(request.shared, len(path) * self.page_size)
        return count

    # ---- forks and capacity

    def plan_fork(self, request, capacity):
        shared = request.valid_len // self.page_size
        need = self.pages_for(capacity) - shared
        return shared, need, self.fits(need)

    def fork(self, parent, request_id, page_ids, plan):
        shared, need, _ = plan
        size = self.page_size
        assert page_ids[:shared] == parent.pages[:shared]
        self.make_room(need)
        self.claim(page_ids[shared:])
        child = RequestModel(
            request_id, page_ids, shared * size, parent.key, parent.priority, parent.inserts, self
        )
        for page in page_ids[:shared]:
            if page in self.holders:
                self.holders[page].add(request_id)
        for page in page_ids[shared:]:
            self.holders[page] = {request_id}
        if parent.lock is not None:
            self.tree.lock(parent.lock)
            child.lock = parent.lock
        child.matched = None  # the contract does not say
        valid = parent.valid_len
        parent.shared = max(parent.shared, shared * size)
        child.declare(valid)
        copied = min(self.pages_for(valid) * size, child.capacity)
        child.content[:, :copied] = parent.content[:, :copied]
        rest = child.content[:, valid:copied]
        rest[rest != 0] = UNKNOWN
        child.prompt = parent.prompt
        self.requests[request_id] = child
        return child

    def extend(self, request, page_ids):
        fresh = page_ids[len(request.pages) :]
        assert page_ids[: len(request.pages)] == request.pages
        self.make_room(len(fresh))
        self.claim(fresh)
        for page in fresh:
            self.holders[page] = {request.id}
        return fresh

    def shrink(self, request, capacity):
        num_pages = max(self.pages_for(capacity), self.pages_for(request.high))
        for page in request.pages[num_pages:]:
            assert self.holders.pop(page) == {request.id}
            self.free.add(page)
        request.pages = request.pages[:num_pages]
        request.content = request.content[:, : request.capacity]
        request.set_tokens(request.tokens[: request.capacity])

    # ---- the tree as a caller sees it

    def reset(self):
        dropped = self.tree.reset()
        self.free |= set(dropped)
        for request in self.requests.values():
            request.inserts = False
        return len(dropped) * self.page_size

    def evict_to_taken(self, num_tokens):
        victims = self.tree.evict(self.pages_for(num_tokens))
        self.taken |= set(victims)
        self.evicted += len(victims)
        return victims
