"""The contenders of the replay, with verbs for one prompt at a time."""

import itertools

import numpy as np

from bench.replay.contender import Job, contender_class
from bench.replay.ours import Pool, TreeAndAllocator
from kvpool import RadixCache

NUMBERS = itertools.count(50_000)  # first tokens, each given once


def fresh_tokens(length):
    """A prompt that shares no page with any before."""
    tokens = np.arange(length, dtype=np.int32) % 50_000
    tokens[0] = next(NUMBERS)
    return tokens


class Driver:
    """A contender that is led through whole requests, one after the other."""

    def __init__(self, name, capacity, page_size):
        self.name, self.page_size = name, page_size
        capacity = -(-capacity // page_size) * page_size
        self.contender = made(name, capacity, page_size)
        self.ids = itertools.count()

    def job(self, tokens, num_prompt=None):
        """A request, turned into the contender's form."""
        job = Job(next(self.ids), tokens, len(tokens) if num_prompt is None else num_prompt)
        self.contender.prepare(job)
        return job

    def serve(self, job):
        """The whole request, from its match to its end."""
        contender = self.contender
        contender.match(job)
        contender.lock(job)
        contender.alloc(job)
        contender.finish(job)

    def store(self, tokens):
        """Cache the whole pages of a prompt."""
        self.serve(self.job(tokens))

    def store_in_steps(self, tokens, step):
        """Cache a prompt as a chat does that grows by `step` tokens: one node each."""
        if self.name.startswith("vllm"):
            step = len(tokens)  # it has blocks, not nodes
        for end in range(step, len(tokens) + 1, step):
            self.store(tokens[:end])

    def looker(self, tokens, expected=None):
        """A call that looks up all of `tokens`, no more than that; a pool binds and unbinds."""
        longer = np.append(tokens, tokens[-1:])  # a match is cut at n - 1
        job = self.job(longer)
        contender = self.contender
        if isinstance(contender, Pool):
            pool, capacity = contender.pool, len(longer)

            def look():
                pool.unbind_request(pool.bind_request(longer, capacity))

            job.request = pool.bind_request(longer, capacity)
            job.hit = pool.matched_prefix_len(job.request)
            pool.unbind_request(job.request)
        else:

            def look():
                contender.match(job)

            look()
        assert expected is None or job.hit == expected, (self.name, job.hit, expected)
        return look

    def evictor(self):
        """A function of tokens that evicts so many and frees their pages."""
        contender = self.contender
        if isinstance(contender, Pool):
            pool, radix, page_size = contender.pool, contender.pool.radix, self.page_size
            lanes = np.arange(page_size, dtype=np.int32)

            def evict(num_tokens):
                pages = radix.evict(num_tokens)
                pool.free((pages[:, None] * page_size + lanes).ravel())

            return evict
        if isinstance(contender, TreeAndAllocator):
            tree, pages = contender.tree, contender.pages
            return lambda num_tokens: pages.give(tree.evict(num_tokens))
        if self.name.startswith("vllm"):
            blocks, size = contender.manager.block_pool, self.page_size
            return lambda num_tokens: blocks.get_new_blocks(num_tokens // size)
        return contender.evict


def made(name, capacity, page_size):
    """The contender; our parts get a tree that touches its memory at once, as a pool's does."""
    contender = contender_class(name)(capacity, page_size)
    if isinstance(contender, TreeAndAllocator):
        contender.tree = RadixCache(page_size, num_pages=capacity // page_size)
    return contender
