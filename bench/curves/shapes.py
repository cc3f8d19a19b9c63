"""Subjects of trees in extreme shapes: chains of one-page nodes, and nodes of many children."""

import numpy as np

from bench.curves.drivers import Driver, fresh_tokens
from bench.curves.subject import FLOOR, PARTS, PEERS, POOL, SGLANG, Panel, Subject
from bench.curves.timing import steady, timed
from bench.replay.floor import MEMCMP

LOOKED_UP = 256  # children that a sample looks up


def chain(driver, num_nodes, page_size):
    """Cache a prompt of so many pages as one node each; answers it."""
    tokens = fresh_tokens(num_nodes * page_size)
    if driver.name == POOL:
        pool = driver.contender.pool
        request = pool.bind_request(tokens, len(tokens))
        for end in range(page_size, len(tokens) + 1, page_size):
            pool.mark_written(request, end)
            pool.checkpoint_request(request, tokens[:end])
        pool.finish_request(request, tokens)
        assert pool.radix.num_nodes == num_nodes
        return tokens
    driver.store(tokens)
    for length in range(len(tokens) - page_size, 0, -page_size):
        driver.looker(tokens[:length])  # splits the upper node, which is the shorter one
    return tokens


def deep(contender, panel, sizes):
    """Look up the whole chain."""
    samplers = {}
    for size in sizes:
        if contender == FLOOR:
            tokens = fresh_tokens(size * panel.page_size)
            twin = tokens.copy()
            there = tokens.ctypes.data, twin.ctypes.data, tokens.nbytes
            samplers[size] = steady(lambda there=there, keep=(tokens, twin): MEMCMP(*there))
            continue
        driver = Driver(contender, (size + 8) * panel.page_size, panel.page_size)
        tokens = chain(driver, size, panel.page_size)
        samplers[size] = steady(driver.looker(tokens, len(tokens)))
    return samplers


def checkpoints(contender, panel, sizes):
    """Cache one page more of a request that has cached so many, a node each time."""
    page_size = panel.page_size
    samplers = {}
    for size in sizes:
        tokens = fresh_tokens((size + 4_096) * page_size)
        if contender == FLOOR:
            ids = np.arange(1, dtype=np.int32)
            samplers[size] = steady(lambda ids=ids: ids.copy())
            continue
        pool = Driver(contender, len(tokens) + page_size, page_size).contender.pool
        request = pool.bind_request(tokens, len(tokens))
        ends = iter(range(size * page_size, len(tokens) + 1, page_size))

        def checkpoint(pool=pool, request=request, tokens=tokens, ends=ends):
            end = next(ends)
            pool.mark_written(request, end)
            pool.checkpoint_request(request, tokens[:end])

        checkpoint()
        samplers[size] = lambda checkpoint=checkpoint: timed(checkpoint, 32)
    return samplers


def child(number, page_size):
    """A prompt of two pages: the first is the same in all."""
    tokens = np.zeros(2 * page_size, np.int32)
    tokens[-1] = number + 1
    return tokens


def fan(make_sampler):
    """Samplers over a tree in which one node has so many children."""

    def make(contender, panel, sizes):
        page_size = panel.page_size
        samplers = {}
        for size in sizes:
            if contender == FLOOR:
                tokens, twin = child(1, page_size), child(1, page_size)
                there = tokens.ctypes.data, twin.ctypes.data, tokens.nbytes
                samplers[size] = steady(lambda there=there, keep=(tokens, twin): MEMCMP(*there))
                continue
            driver = Driver(contender, (size + 8_192) * page_size, page_size)
            if contender == PARTS:
                insert, pages = driver.contender.tree.insert, driver.contender.pages.take(size + 1)
                for number in range(size):
                    insert(child(number, page_size), pages[[0, number + 1]])
            else:
                for number in range(size):
                    driver.store(child(number, page_size))
            samplers[size] = make_sampler(driver, size, page_size)
        return samplers

    return make


def look_up_children(driver, size, page_size):
    numbers = np.random.default_rng(0).integers(0, size, LOOKED_UP).tolist()
    lookers = [driver.looker(child(number, page_size), 2 * page_size) for number in numbers]

    def sample():
        waiting = iter(lookers)
        return timed(lambda: next(waiting)(), len(lookers))

    return sample


def add_children(driver, size, page_size):
    number = size

    def sample():
        nonlocal number
        jobs = [driver.job(child(number + i, page_size)) for i in range(LOOKED_UP)]
        number += LOOKED_UP
        waiting = iter(jobs)
        return timed(lambda: driver.serve(next(waiting)), len(jobs))

    return sample


WIDTHS = (1_000, 10_000, 100_000, 1_000_000)
NARROW = dict.fromkeys(PEERS, 100_000)
SUBJECTS = (
    Subject(
        "deep-chain",
        "Look up a chain of one-page nodes",
        "nodes of the chain",
        (100, 1_000, 10_000, 100_000),
        deep,
        contenders=(FLOOR, POOL, *SGLANG),
        panels=(Panel(1), Panel(16)),
        reach={POOL: 100_000, FLOOR: 100_000, "sglang-py": 10_000, "sglang-rust": 10_000},
        floor="memcmp of the tokens",
    ),
    Subject(
        "checkpoint",
        "Cache one more page of a growing request",
        "pages that it has cached",
        (100, 1_000, 10_000, 100_000),
        checkpoints,
        contenders=(FLOOR, POOL),
        panels=(Panel(16), Panel(64), Panel(1)),
        floor="an array of one id",
        notes=("checkpoint: mark_written and checkpoint_request of one page more",),
    ),
    Subject(
        "wide-fan",
        "Look up one child of a node with many",
        "children of the node",
        WIDTHS,
        fan(look_up_children),
        contenders=(FLOOR, POOL, PARTS, *PEERS),
        panels=(Panel(16),),
        reach=NARROW,
        floor="memcmp of two pages",
        notes=("wide-fan: 256 random children; all prompts have an equal first page",),
    ),
    Subject(
        "wide-fan-add",
        "Add one child to a node with many",
        "children of the node",
        WIDTHS,
        fan(add_children),
        contenders=(FLOOR, POOL, PARTS, *PEERS),
        panels=(Panel(16),),
        reach=NARROW,
        floor="memcmp of two pages",
        notes=("wide-fan-add: the whole request, match to finish",),
    ),
)
