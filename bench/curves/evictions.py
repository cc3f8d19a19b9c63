"""Subjects of eviction: one page out of ever more leaves, and ever more pages at once."""

import time

import numba
import numpy as np

from bench.curves.drivers import Driver
from bench.curves.subject import FLOOR, PARTS, PEERS, Subject
from bench.curves.timing import timed

CALLS = 1_000  # whose mean is a sample
PATIENCE = 0.5  # seconds that a sample may take, with no fewer calls than FEW
FEW = 3
LEAF = 128  # tokens of a leaf, where many are evicted at once
NUM_LEAVES = 10_240
CHASED = 1 << 26  # bytes in which the floor has its cache misses


def leaf(number, length):
    """A prompt that shares no page with another leaf."""
    tokens = np.zeros(length, np.int32)
    tokens[0] = number
    return tokens


def fill(driver, num_leaves, page_size):
    """As many one-page leaves below the root, or blocks of one long prompt after another."""
    if driver.name == PARTS:  # directly: a million whole requests take their time
        insert, pages = driver.contender.tree.insert, driver.contender.pages.take(num_leaves)
        for number in range(num_leaves):
            insert(leaf(number, page_size), pages[number : number + 1])
    elif driver.name.startswith("vllm"):
        at_once = 1_000
        for first in range(0, num_leaves, at_once):
            tokens = np.zeros(at_once * page_size, np.int32)
            tokens[0] = first + 1
            driver.store(tokens)
    else:
        for number in range(num_leaves):
            driver.store(leaf(number, page_size))


def evict_one(contender, panel, sizes):
    """Mean of calls that evict one page each; a fresh leaf after each, untimed."""
    page_size = panel.page_size
    if contender == FLOOR:
        return dict.fromkeys(sizes, cold_miss())

    def make(size):
        driver = Driver(contender, (size + 8) * page_size, page_size)
        fill(driver, size, page_size)
        evict, number = driver.evictor(), size
        # vLLM takes cached blocks and is given no new ones: not more than there are.
        most = min(CALLS, size // 10) if contender.startswith("vllm") else CALLS

        def sample():
            nonlocal number
            seconds = calls = 0
            while calls < FEW or (calls < most and seconds < PATIENCE):
                start = time.perf_counter()
                evict(page_size)
                seconds += time.perf_counter() - start
                calls += 1
                if contender == PARTS:
                    parts = driver.contender
                    parts.tree.insert(leaf(number, page_size), parts.pages.take(1))
                elif not contender.startswith("vllm"):
                    driver.store(leaf(number, page_size))
                number += 1
            return seconds / calls

        return sample

    return {size: make(size) for size in sizes}


@numba.njit(cache=False)
def _chase(next_places, place, count):
    for _ in range(count):
        place = next_places[place]
    return place


def cold_miss():
    """A sampler of what cannot be spared to reach the oldest leaf: one cache miss."""
    places = np.random.default_rng(0).permutation(CHASED // 8)
    next_places = np.empty_like(places)
    next_places[places] = np.roll(places, 1)
    place = int(_chase(next_places, 0, 1))

    def sample():
        nonlocal place
        start = time.perf_counter()
        place = int(_chase(next_places, place, CALLS))
        return (time.perf_counter() - start) / CALLS

    return sample


def evict_many(contender, panel, sizes):
    """The sizes one after the other out of one cache, which is filled anew for each sample."""
    page_size = panel.page_size
    if contender == FLOOR:
        ids = np.arange(max(sizes) // page_size, dtype=np.int32)
        return {
            size: lambda size=size: timed(lambda: ids[: size // page_size].copy())
            for size in sizes
        }
    found = {size: [] for size in sizes}

    def measure():
        driver = Driver(contender, NUM_LEAVES * LEAF, page_size)
        evict = driver.evictor()
        for number in range(NUM_LEAVES):
            driver.store(leaf(number, LEAF))
        for size in sizes:
            found[size].append(timed(lambda size=size: evict(size)))

    def sample(size):
        if not found[size]:
            measure()
        return found[size].pop(0)

    return {size: lambda size=size: sample(size) for size in sizes}


SUBJECTS = (
    Subject(
        "evict-one",
        "Evict one page",
        "one-page leaves in the tree",
        (1_000, 10_000, 100_000, 1_000_000),
        evict_one,
        contenders=(FLOOR, PARTS, *PEERS),
        headline=PARTS,
        reach=dict.fromkeys(PEERS, 100_000),
        floor="one cache miss, in 64 MB",
        notes=(
            "evict-one: mean of 1,000 calls (of fewer, if they take over 0.5 s), with the freeing "
            "of the page; vllm has no leaves, so many cached blocks",
        ),
        rounds=5,
    ),
    Subject(
        "evict-many",
        "Evict many tokens in one call, leaves of 128",
        "tokens to evict",
        (1_024, 8_192, 65_536, 1_048_576),
        evict_many,
        contenders=(FLOOR, PARTS, *PEERS),
        headline=PARTS,
        floor="copy of the page ids",
        rounds=3,
    ),
)
