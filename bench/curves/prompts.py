"""Subjects of one prompt: look it up, miss it, cache it, serve it again, give it as a list."""

import numpy as np

from bench.curves.drivers import Driver, fresh_tokens
from bench.curves.subject import FLOOR, LONG, PARTS, POOL, SGLANG, Panel, Subject
from bench.curves.timing import steady, timed
from bench.replay.floor import MEMCMP, MEMMOVE

LENGTHS = (1_024, 4_096, 16_384, 65_536, LONG)
STEP = 512  # tokens by which a chat grows
CAPACITY = 1_000_000
FROM_A_LIST = "kvpool, from a list"


class Traffic:
    """The bytes of one prompt, compared or copied; and those of its page ids, copied."""

    def __init__(self, length, page_size):
        self.tokens = fresh_tokens(length)
        self.twin = self.tokens.copy()
        self.ids = np.arange(length // page_size, dtype=np.int32)
        self.row = np.zeros_like(self.ids)
        tokens, twin, ids, row = (
            array.ctypes.data for array in (self.tokens, self.twin, self.ids, self.row)
        )
        self.compare_arguments = tokens, twin, self.tokens.nbytes
        self.copy_arguments = twin, tokens, self.tokens.nbytes
        self.ids_arguments = row, ids, self.ids.nbytes

    def look_up(self):
        MEMCMP(*self.compare_arguments)
        MEMMOVE(*self.ids_arguments)

    def cache(self):
        MEMMOVE(*self.copy_arguments)
        MEMMOVE(*self.ids_arguments)


def match_lengths(contender, panel, sizes):
    if contender == FLOOR:
        return {size: steady(Traffic(size, panel.page_size).look_up) for size in sizes}
    driver = Driver(contender, 2 * sum(sizes), panel.page_size)
    samplers = {}
    for size in sizes:
        tokens = fresh_tokens(size)
        driver.store(tokens)
        samplers[size] = steady(driver.looker(tokens, size))
    return samplers


def match_nodes(contender, panel, sizes):
    if contender == FLOOR:
        return {size: steady(Traffic(LONG, panel.page_size).look_up) for size in sizes}
    driver = Driver(contender, (len(sizes) + 1) * LONG, panel.page_size)
    samplers = {}
    for size in sizes:
        tokens = fresh_tokens(LONG)
        driver.store_in_steps(tokens, LONG // size)
        samplers[size] = steady(driver.looker(tokens, LONG))
    return samplers


def miss(contender, panel, sizes):
    if contender == FLOOR:
        return {size: steady(lambda: np.empty(0, np.int32)) for size in sizes}
    driver = Driver(contender, CAPACITY, panel.page_size)
    driver.store(fresh_tokens(LONG))
    return {size: steady(driver.looker(fresh_tokens(size), 0)) for size in sizes}


def insert(contender, panel, sizes):
    """Whole requests of fresh tokens; the pool is full, so each evicts its like."""
    if contender == FLOOR:
        return {size: steady(Traffic(size, panel.page_size).cache) for size in sizes}
    driver = Driver(contender, CAPACITY, panel.page_size)
    for _ in range(CAPACITY // 8_192):
        driver.store(fresh_tokens(8_192))

    def sampler(size):
        jobs = [driver.job(fresh_tokens(size)) for _ in range(max(1, 8_192 // size))]
        waiting = iter(jobs)
        return timed(lambda: driver.serve(next(waiting)), len(jobs))

    return {size: lambda size=size: sampler(size) for size in sizes}


def reinsert(contender, panel, sizes):
    """Whole requests of cached tokens, which a chat has cached in steps."""
    if contender == FLOOR:
        return {size: steady(Traffic(size, panel.page_size).look_up) for size in sizes}
    driver = Driver(contender, 2 * sum(sizes), panel.page_size)
    prompts = {size: fresh_tokens(size) for size in sizes}
    for tokens in prompts.values():
        driver.store_in_steps(tokens, STEP)

    def sampler(tokens):
        driver.serve(driver.job(tokens))
        job = driver.job(tokens)
        return timed(lambda: driver.serve(job))

    return {size: lambda tokens=tokens: sampler(tokens) for size, tokens in prompts.items()}


def list_or_array(contender, panel, sizes):
    samplers = {}
    capacity = 2 * max(sizes)
    pool = Driver(POOL, capacity, panel.page_size).contender.pool if contender != FLOOR else None
    for size in sizes:
        tokens = np.random.default_rng(size).integers(0, 50_000, size).astype(np.int32)
        prompt = tokens if contender == POOL else tokens.tolist()
        if contender == FLOOR:
            samplers[size] = steady(lambda prompt=prompt: np.asarray(prompt, np.int32))
        else:
            samplers[size] = steady(
                lambda prompt=prompt, size=size: pool.unbind_request(
                    pool.bind_request(prompt, size)
                )
            )
    return samplers


SUBJECTS = (
    Subject(
        "match",
        "Look up a cached prompt, one node",
        "tokens of the prompt, all cached",
        LENGTHS,
        match_lengths,
        floor="memcmp of the tokens and copy of the page ids",
    ),
    Subject(
        "match-nodes",
        "Look up 131,072 cached tokens, in many nodes",
        "nodes that hold them",
        (1, 4, 16, 64, 256, 1_024),
        match_nodes,
        reach=dict.fromkeys((*SGLANG, "vllm-sha256"), 256),
        floor="memcmp of the tokens and copy of the page ids",
        notes=("vllm has blocks, not nodes: its prompt is cached at once",),
    ),
    Subject(
        "miss",
        "Look up a prompt that misses",
        "tokens of the prompt, none cached",
        LENGTHS,
        miss,
        headline=PARTS,
        floor="an empty array",
        notes=("miss: kvpool's bind also takes and gives back the pages and copies the tokens",),
    ),
    Subject(
        "insert",
        "Cache a fresh prompt in a full pool, evicting",
        "tokens of the prompt, none cached",
        LENGTHS,
        insert,
        floor="copy of the tokens and of the page ids",
    ),
    Subject(
        "reinsert",
        "Serve a prompt that is cached, one node each 512 tokens",
        "tokens of the prompt, all cached",
        LENGTHS,
        reinsert,
        floor="memcmp of the tokens and copy of the page ids",
        notes=("insert, reinsert: the whole request, match to finish",),
    ),
    Subject(
        "list",
        "A prompt as a Python list",
        "tokens of the prompt, none cached",
        (128, 1_024, 8_192, 65_536, LONG),
        list_or_array,
        contenders=(FLOOR, POOL, FROM_A_LIST),
        panels=(Panel(16),),
        floor="np.asarray of the list",
        floor_is="NumPy",
    ),
)
