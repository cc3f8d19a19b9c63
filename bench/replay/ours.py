"""kvpool: the public pool, and its tree and page allocator alone."""

import numpy as np

import kvpool
from bench.replay.contender import Contender
from kvpool import KVCachePool, PageAllocator, RadixCache


class Pool(Contender):
    """The public calls of a pool of the smallest geometry: bind, mark as written, finish."""

    name = "kvpool"
    exact_lru = True
    notes = (
        "kvpool: public bind_request (its match and lock are in the column alloc), mark_written "
        "and finish_request (both in finish) of a pool of 1 layer, 1 head, 1 dim, FP8; the row of "
        "a request is its page ids, int32, inside the request",
    )

    def __init__(self, capacity, page_size):
        super().__init__(capacity, page_size)
        self.pool = KVCachePool(1, capacity, 1, 1, page_size=page_size, dtype="float8_e4m3fn")
        self.caches = self.pool.key_cache, self.pool.value_cache
        for cache in self.caches:  # resident from the start, so that it can be told from the rest
            cache.view(np.uint8).fill(0)

    @classmethod
    def versions(cls):
        return {"kvpool": kvpool.__version__, "numpy": np.__version__}

    def alloc(self, job):
        job.request = self.pool.bind_request(job.prompt, job.num_tokens)
        job.hit = self.pool.matched_prefix_len(job.request)

    def finish(self, job):
        self.pool.mark_written(job.request, job.num_tokens)
        self.pool.finish_request(job.request, job.tokens)

    def cached_tokens(self):
        stats = self.pool.stats()
        assert stats["pages_free"] + stats["pages_tree"] == stats["pages_total"], stats
        return stats["pages_tree"] * self.page_size

    def other_bytes(self):
        return sum(cache.nbytes for cache in self.caches)


class ShuffledPool(Pool):
    """The same with a free list in no order, as after days of traffic."""

    name = "kvpool-shuffled"
    notes = ("kvpool-shuffled: the same, its free list shuffled before the first request",)

    def __init__(self, capacity, page_size):
        super().__init__(capacity, page_size)
        slots = self.pool.alloc(capacity).reshape(-1, page_size)
        self.pool.free(slots[np.random.default_rng(0).permutation(len(slots))].ravel())


class CheckpointingPool(Pool):
    """The same with a checkpoint after prefill, so that requests in flight share prompts."""

    name = "kvpool-checkpoint"
    publishes = "prefill"
    notes = (
        "kvpool-checkpoint: the same, with mark_written and checkpoint_request of the prompt in "
        "the column prefill",
    )

    def prefill(self, job):
        self.pool.mark_written(job.request, job.num_prompt)
        self.pool.checkpoint_request(job.request, job.prompt)


class TreeAndAllocator(Contender):
    """`RadixCache` and `PageAllocator` without a pool: every phase is a call of its own."""

    name = "kvpool-parts"
    exact_lru = True
    notes = (
        "kvpool-parts: RadixCache and PageAllocator alone; the row is page ids, int32, joined "
        "from the matched and the new",
    )

    def __init__(self, capacity, page_size):
        super().__init__(capacity, page_size)
        self.tree = RadixCache(page_size)
        self.pages = PageAllocator(capacity // page_size)

    @classmethod
    def versions(cls):
        return Pool.versions()

    def prepare(self, job):
        job.shorter = job.prompt[:-1]

    def match(self, job):
        job.match = self.tree.match_prefix(job.shorter)
        job.hit = job.match.length

    def lock(self, job):
        self.tree.inc_lock_ref(job.match.node)

    def alloc(self, job):
        need = -(-(job.num_tokens - job.hit) // self.page_size)
        short = need - self.pages.num_free
        if short > 0:
            self.pages.give(self.tree.evict(short * self.page_size))
        job.row = np.concatenate([job.match.pages, self.pages.take(need)])

    def finish(self, job):
        num_full = job.num_tokens // self.page_size
        result = self.tree.insert(job.tokens, job.row[:num_full])
        matched, cached = job.hit // self.page_size, result.prefix_len // self.page_size
        if cached > matched:
            self.pages.give(job.row[matched:cached])
        if num_full < len(job.row):
            self.pages.give(job.row[num_full:])
        self.tree.dec_lock_ref(job.match.node)

    def cached_tokens(self):
        cached = self.tree.total_size
        assert cached + self.pages.num_free * self.page_size == self.capacity, cached
        return cached
