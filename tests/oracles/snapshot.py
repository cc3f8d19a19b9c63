"""Traffic that leaves a random tree behind, drawn by Hypothesis or by NumPy."""

import random

from kvpool import KVCachePool
from tests.helpers.stamps import stamp

NAMESPACES = (None, "", "tenant", "\ud800é", b"", b"tenant", 0, 1, -(10**40), 10**5000)
DTYPES = ("float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")


class Traffic:
    """A pool and calls on it that cache, look up, hold, evict and reset."""

    def __init__(self, rng, num_pages=24, page_size=2, **options):
        self.rng = rng
        self.pool = KVCachePool(2, num_pages * page_size, 1, 4, page_size=page_size, **options)
        self.held = []

    def words(self, most):
        """A prompt over an alphabet of two pages, so that prefixes are shared and split."""
        size = self.pool.page_size
        length = self.rng.randint(1, most)
        return [t for _ in range(length) for t in [7] * (size - 1) + [self.rng.randint(0, 1)]]

    def key(self):
        return self.rng.choice(NAMESPACES[: self.rng.choice((1, 2, len(NAMESPACES)))])

    def serve(self):
        tokens, key, pool = self.words(6), self.key(), self.pool
        if not pool.would_fit(tokens, len(tokens), extra_key=key):
            return
        priority = self.rng.choice((-1, 0, 0, 0, 3))
        request = pool.bind_request(tokens, len(tokens), extra_key=key, priority=priority)
        pool.mark_written(request, len(tokens))
        if self.rng.random() < 0.2 and len(self.held) < 3:
            pool.checkpoint_request(request, tokens)
            self.held.append((request, tokens))
        else:
            pool.finish_request(request, tokens)

    def match(self):
        self.pool.radix.match_prefix(self.words(6), self.key())

    def let_go(self):
        if self.held:
            request, tokens = self.held.pop(self.rng.randrange(len(self.held)))
            self.pool.finish_request(request, tokens)

    def evict(self):
        pages = self.pool.radix.evict(self.rng.randint(1, 3) * self.pool.page_size)
        size = self.pool.page_size
        self.pool.free([page * size + i for page in pages.tolist() for i in range(size)])

    def reset(self):
        self.pool.reset_prefix_cache()

    def run(self, num_calls):
        """So many calls; then every cached page has the bytes of its prefix."""
        calls = [self.serve] * 8 + [self.match] * 4 + [self.let_go] * 2 + [self.evict, self.serve]
        for _ in range(num_calls):
            self.rng.choice(calls)()
            if self.rng.random() < 0.01:
                self.reset()
        stamp(self.pool)
        return self


def random_pool(seed, num_calls=60, **options):
    """A pool after random traffic, nothing bound."""
    traffic = Traffic(random.Random(seed), **options).run(num_calls)
    while traffic.held:
        traffic.let_go()
    stamp(traffic.pool)
    return traffic.pool
