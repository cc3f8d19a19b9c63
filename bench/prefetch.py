"""What tiers cost a scheduler that finds nothing in them, and how fast they give what they have.

`python -m bench.prefetch [--json FILE]` prints times of calls of the scheduler's thread beside the
same calls of a pool without tiers, in turns, and bytes of K and V a second that a prefetch brings
from a tier to the tree, for some lengths of a prompt. Binds are cold, of prompts that nobody has,
and end without insert, so that nothing is written meanwhile.
"""

import argparse
import itertools
import statistics
import tempfile
import time

import numpy as np

from bench.clock import Table, interleave
from kvpool import KVCachePool
from kvpool.tiers.file import FileTier
from kvpool.tiers.host import HostTier

NUM_SLOTS, PAGE_SIZE = 65536, 16
PROMPT_LENS = (512, 4096)
ROUNDS = 200
KV = {"num_layers": 16, "num_kv_heads": 8, "head_dim": 128}  # 64 KiB a token in bfloat16


def small_pool():
    """Bookkeeping alone: K and V of one element."""
    return KVCachePool(1, NUM_SLOTS, 1, 1, page_size=PAGE_SIZE)


def fresh_prompts(num_tokens, seed):
    """Prompts that no two calls share a page of."""
    rng = np.random.default_rng(seed)
    while True:
        yield rng.integers(0, 1 << 31, num_tokens, np.int32)


def binds(pool, prompts):
    """A cold bind of the next prompt, and its unbind."""

    def setup():
        return next(prompts)

    def call(prompt):
        pool.unbind_request(pool.bind_request(prompt, prompt.size))

    return setup, call


def prefetches(pool, prompts):
    """A prefetch that finds nothing, and its cancellation."""

    def setup():
        return next(prompts)

    def call(prompt):
        pool.prefetch(prompt).cancel()

    return setup, call


def calls(table):
    """Binds with and without tiers, and what a prefetch costs that finds nothing."""
    for num_tokens in PROMPT_LENS:
        plain, tiered = small_pool(), small_pool()
        with plain, tiered:
            tiered.attach_tiers([HostTier(1 << 20)], model="bench")
            time.sleep(0.1)  # the follower rests
            prompts = (fresh_prompts(num_tokens, seed) for seed in itertools.count())
            found = interleave(
                {
                    "without": binds(plain, next(prompts)),
                    "with": binds(tiered, next(prompts)),
                    "without again": binds(plain, next(prompts)),
                },
                rounds=ROUNDS,
            )
            # By itself: what it wakes would be at work beside the binds.
            found |= interleave({"prefetch": prefetches(tiered, next(prompts))}, rounds=ROUNDS)
        what = f"{num_tokens} tokens"
        # The quicker of two, before and behind: what tiers cost is not made small by noise.
        plain_s = min(found["without"], found["without again"])
        table.add(f"bind and unbind, {what}, no tiers", plain_s * 1e6, "us")
        for name, shown in (
            ("with", f"bind and unbind, {what}, tiers, nothing found"),
            ("prefetch", f"prefetch and cancel, {what}, nothing found"),
        ):
            ratio = found[name] / plain_s
            table.add(shown, found[name] * 1e6, "us", ratio=ratio, to="no tiers")
        table.add(f"more with tiers, {what}", (found["with"] - plain_s) * 1e6, "us")


def kv_pool(num_tokens):
    return KVCachePool(
        KV["num_layers"],
        4 * num_tokens,
        KV["num_kv_heads"],
        KV["head_dim"],
        page_size=PAGE_SIZE,
        dtype="bfloat16",
    )


def throughput(table, folder):
    """From each tier to the tree, verified and published."""
    num_tokens = 4096
    prompt = np.arange(num_tokens + 1, dtype=np.int32)
    num_bytes = 4 * KV["num_layers"] * KV["num_kv_heads"] * KV["head_dim"] * num_tokens
    tiers = [HostTier(2 * num_bytes), FileTier(folder, 4 * num_bytes)]
    for tier in tiers:
        with kv_pool(num_tokens) as pool:
            attached = pool.attach_tiers([tier], model="bench", timeout_s=60.0)
            request = pool.bind_request(prompt, prompt.size)
            for cache in (pool.key_cache, pool.value_cache):
                cache[...] = 1.0
            pool.mark_written(request, num_tokens)
            start = time.perf_counter()
            pool.finish_request(request, prompt)
            assert attached.flush(120)
            seconds = time.perf_counter() - start
            assert attached.stats()["write_pages"] == num_tokens // PAGE_SIZE
        table.add(f"write-back to {tier.name}", num_bytes / seconds / 1e9, "GB/s")
        times = []
        for _ in range(3):
            with kv_pool(num_tokens) as pool:
                pool.attach_tiers([tier], model="bench", timeout_s=60.0, write="none")
                start = time.perf_counter()
                found = pool.prefetch(prompt).wait(120)
                pool.poll_tiers()
                times.append(time.perf_counter() - start)
                assert found == pool.radix.total_size == num_tokens, (found, num_tokens)
        seconds = statistics.median(times)
        table.add(f"prefetch from {tier.name}", num_bytes / seconds / 1e9, "GB/s")
    for tier in tiers:
        tier.close()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", help="also write the numbers here")
    arguments = parser.parse_args()
    table = Table("prefetch: what tiers cost, and what they give")
    calls(table)
    with tempfile.TemporaryDirectory() as folder:
        throughput(table, folder)
    table.show()
    if arguments.json:
        table.write_json(arguments.json)


if __name__ == "__main__":
    main()
