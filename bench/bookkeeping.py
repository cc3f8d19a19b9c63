"""What the host spends on bookkeeping: matching, binding, evicting, taking pages.

`python -m bench.bookkeeping [--json FILE]` prints one table; every ratio is against a floor
measured in the same run.
"""

import argparse
import ctypes
import statistics
import time

import numpy as np

from bench.clock import Table, interleave
from kvpool import KVCachePool, PageAllocator, RadixCache

PAGE_SIZE = 16
LONG = 131_072  # tokens
REQUEST = 2_000  # tokens
US, NS = 1e6, 1e9

MEMCMP = ctypes.CDLL(None).memcmp
MEMCMP.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]


def chain(length, num_nodes, cache):
    """Cache one prompt as `num_nodes` nodes of equal length; answers the prompt."""
    tokens = np.arange(length, dtype=np.int32)
    pages = np.arange(length // PAGE_SIZE, dtype=np.int32)
    for end in range(length // num_nodes, length + 1, length // num_nodes):
        cache.insert(tokens[:end], pages[: end // PAGE_SIZE])
    assert cache.num_nodes == num_nodes
    return tokens


def cached_pool(num_nodes):
    """A pool that holds one long prompt in `num_nodes` nodes, by that many chunked prefills."""
    pool = KVCachePool(1, LONG + 64 * PAGE_SIZE, 1, 1, page_size=PAGE_SIZE)
    prompt = np.arange(LONG + 1, dtype=np.int32)
    request = pool.bind_request(prompt[:LONG], LONG)
    for end in range(LONG // num_nodes, LONG + 1, LONG // num_nodes):
        pool.mark_written(request, end)
        pool.checkpoint_request(request, prompt[:end])
    pool.finish_request(request, prompt[:LONG])
    return pool, prompt


def match_long_prompt(table, rounds):
    one, many = RadixCache(PAGE_SIZE), RadixCache(PAGE_SIZE)
    tokens = chain(LONG, 1, one)
    chain(LONG, 256, many)
    twin = tokens.copy()
    floor_arguments = tokens.ctypes.data, twin.ctypes.data, tokens.nbytes
    pool_one, prompt = cached_pool(1)
    pool_many, _ = cached_pool(256)
    # the floor reads what a match must read: the prompt, and as many bytes at another place
    cases = {
        "memcmp of the same bytes": lambda: MEMCMP(*floor_arguments),
        "match_prefix, one node": lambda: one.match_prefix(tokens),
        "match_prefix, 256 nodes": lambda: many.match_prefix(tokens),
        "bind + unbind, one node": lambda: pool_one.unbind_request(
            pool_one.bind_request(prompt, LONG + 1)
        ),
        "bind + unbind, 256 nodes": lambda: pool_many.unbind_request(
            pool_many.bind_request(prompt, LONG + 1)
        ),
    }
    assert one.match_prefix(tokens).length == many.match_prefix(tokens).length == LONG
    for pool in (pool_one, pool_many):
        request = pool.bind_request(prompt, LONG + 1)
        assert pool.matched_prefix_len(request) == LONG
        pool.unbind_request(request)
    seconds = interleave(cases, rounds=rounds * 10)
    floor = seconds["memcmp of the same bytes"]
    for name, value in seconds.items():
        table.add(
            f"131,072 tokens cached, {name}", value * US, "us", ratio=value / floor, to="memcmp"
        )


GEOMETRIES = {  # layers, KV heads, head dim, dtype
    "1 layer": (1, 1, 1, "float32"),
    "SmolLM2": (30, 3, 64, "bfloat16"),
}


def serve(pool, prompt):
    request = pool.bind_request(prompt, REQUEST)
    pool.mark_written(request, REQUEST)
    pool.finish_request(request, prompt)


def whole_requests(table, rounds):
    """Bind, declare and finish distinct prompts; in a full pool each evicts what it needs."""
    num_full, num_fresh = 8, rounds
    rng = np.random.default_rng(0)
    prompts = rng.integers(0, 50_000, (num_full + 2 * rounds, REQUEST)).astype(np.int32)
    for name, (layers, heads, head_dim, dtype) in GEOMETRIES.items():
        for kind in ("full", "not full"):
            num_requests = num_full if kind == "full" else num_full + num_fresh
            pool = KVCachePool(
                layers, num_requests * REQUEST, heads, head_dim, page_size=PAGE_SIZE, dtype=dtype
            )
            for prompt in prompts[:num_full]:
                serve(pool, prompt)
            times = []
            for prompt in prompts[
                num_full : num_full + (num_fresh if kind == "not full" else 2 * rounds)
            ]:
                start = time.perf_counter()
                serve(pool, prompt)
                times.append(time.perf_counter() - start)
            assert (pool.stats()["evicted_pages"] > 0) == (kind == "full")
            table.add(
                f"bind + mark + finish of 2,000 tokens, {name}, {kind} pool",
                statistics.median(times) * US,
                "us",
            )
            pool.close()


def lists_of_tokens(table, rounds):
    pool = KVCachePool(1, 4 * REQUEST, 1, 1, page_size=PAGE_SIZE)
    prompt = np.random.default_rng(1).integers(0, 50_000, REQUEST).astype(np.int32)
    as_list = prompt.tolist()
    seconds = interleave(
        {
            "int32": lambda: pool.unbind_request(pool.bind_request(prompt, REQUEST)),
            "list": lambda: pool.unbind_request(pool.bind_request(as_list, REQUEST)),
            "asarray": lambda: np.asarray(as_list, dtype=np.int32),
        },
        rounds=rounds,
        repeat=20,
    )
    table.add("bind + unbind of 2,000 tokens, int32 array", seconds["int32"] * US, "us")
    table.add("bind + unbind of 2,000 tokens, list", seconds["list"] * US, "us")
    extra = (seconds["list"] - seconds["int32"]) / REQUEST
    table.add(
        "a list more than an array, per token",
        extra * NS,
        "ns",
        ratio=extra * REQUEST / seconds["asarray"],
        to="np.asarray(list)",
    )


def evict_one_page(table, _rounds):
    """Mean of 1,000 evictions; a fresh leaf after each, so that the number of leaves stays."""
    evictions, batches = 1_000, 5
    means = {1_000: [], 1_000_000: []}
    caches = {}
    tokens = np.arange(max(means) + evictions * batches, dtype=np.int32)
    pages = tokens[:, None].copy()
    for num_leaves in means:
        caches[num_leaves] = RadixCache(1)
        for i in range(num_leaves):
            caches[num_leaves].insert(tokens[i : i + 1], pages[i])
    for batch in range(batches):
        for num_leaves, cache in caches.items():
            spent = 0
            for i in range(batch * evictions, (batch + 1) * evictions):
                start = time.perf_counter_ns()
                victims = cache.evict(1)
                spent += time.perf_counter_ns() - start
                assert victims[0] == i
                j = num_leaves + i
                cache.insert(tokens[j : j + 1], pages[j])
            means[num_leaves].append(spent / evictions / NS)
    base = statistics.median(means[1_000])
    for num_leaves, batch_means in means.items():
        mean = statistics.median(batch_means)
        table.add(
            f"evict one page of {num_leaves:,} leaves, mean of 1,000",
            mean * US,
            "us",
            ratio=mean / base,
            to="1,000 leaves",
        )


def take_and_give(table, rounds):
    """Ids in order as from a fresh pool, and scattered as after days of traffic."""
    fresh, used = PageAllocator(20_000), PageAllocator(20_000)
    everything = used.take(20_000)
    np.random.default_rng(2).shuffle(everything)
    used.give(everything)
    source, target = np.zeros(8_192, np.int32), np.zeros(8_192, np.int32)
    cases = {"copy of 32 KB": lambda: np.copyto(target, source)}
    for name, pages in (("in order", fresh), ("scattered", used)):
        for n in (1, 8_192):
            cases[f"take {n:,} pages and give them back, {name}"] = lambda n=n, pages=pages: (
                pages.give(pages.take(n))
            )
    seconds = interleave(cases, rounds=rounds * 5, repeat=20)
    for name, value in seconds.items():
        ratio = value / seconds["copy of 32 KB"]
        table.add(name, value * US, "us", ratio=ratio, to="that copy")


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", metavar="FILE", help="also write the table there")
    parser.add_argument("--rounds", type=int, default=40, help="samples a case")
    options = parser.parse_args(argv)
    table = Table("bookkeeping, page size 16, medians unless said otherwise")
    for part in (
        match_long_prompt,
        whole_requests,
        lists_of_tokens,
        evict_one_page,
        take_and_give,
    ):
        part(table, options.rounds)
    table.show()
    if options.json:
        table.write_json(options.json)


if __name__ == "__main__":
    main()
