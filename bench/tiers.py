"""What following the tree costs the scheduler's thread: the price of tiers and events on a bind.

`python -m bench.tiers [--json FILE]` serves the same requests on pools that nobody follows and on
pools that somebody does, in turns, and prints what a request costs more beside what it may:
5 us, and 0.1 us a page that comes or goes.
"""

import argparse
import statistics
import time

import numpy as np

from bench.clock import Table
from kvpool import KVCachePool
from kvpool.following import TreeFollower
from kvpool.page_keys import PageKeys
from kvpool.snapshot import Fingerprint

PAGE_SIZE = 16
US = 1e6
REQUEST_US, PAGE_US = 5.0, 0.1  # what following may cost
WARM_UP = 20  # requests before those that count
STEP_S = 0.004  # of a model, between two requests


class Silent:
    """A subscriber that does nothing with what it is told."""

    def on_stored(self, run):
        """Pages came."""

    def on_removed(self, page_ids, keys):
        """Pages went."""

    def on_cleared(self):
        """All went."""

    def on_caught_up(self):
        """That was all."""


def serve(pool, prompt):
    """One request's books: bound, written, cached; in a full pool as much is evicted."""
    request = pool.bind_request(prompt, len(prompt))
    pool.mark_written(request, len(prompt))
    pool.finish_request(request, prompt)


def full_pool(num_pages, prompts):
    """A pool in which each further request evicts what it needs."""
    pool = KVCachePool(1, num_pages * PAGE_SIZE, 1, 1, page_size=PAGE_SIZE)
    for prompt in prompts:
        serve(pool, prompt)
    return pool


def followed(pool, **options):
    """A follower of `pool` with one subscriber who has been told what is there."""
    fingerprint = Fingerprint("bench", 1, 1, 1, PAGE_SIZE, "float32", "float32", 1.0, 1.0)
    follower = TreeFollower(pool._requests.ledger, PageKeys(fingerprint), **options)
    follower.subscribe(Silent())
    follower.drain()
    return follower


def request_costs(table, num_pages, rounds):
    """Off, on, and on with the thread at work: each request on all of them, in any order."""
    room = 16
    rng = np.random.default_rng(0)
    shape = (room + WARM_UP + rounds, num_pages * PAGE_SIZE)
    prompts = rng.integers(0, 50_000, shape).astype(np.int32)
    names = ["off", "off again", "on", "on, thread"]
    pools = {name: full_pool(room * num_pages, prompts[:room]) for name in ("warm", *names)}
    followers = {name: followed(pools[name]) for name in names[2:]}
    followers["on, thread"].start()
    spent = {name: [] for name in names}
    for i, prompt in enumerate(prompts[room:]):
        # The step of a model: a thread in the background works meanwhile.
        time.sleep(STEP_S)
        serve(pools["warm"], prompt)  # the first after a sleep is slower than the others
        for name in rng.permutation(names).tolist():
            start = time.perf_counter()
            serve(pools[name], prompt)
            seconds = time.perf_counter() - start
            if i >= WARM_UP:
                spent[name].append(seconds)
        # Its keys are made here, and not while somebody looks at the clock.
        followers["on"].drain()
    assert all(pool.stats()["evicted_pages"] > 0 for pool in pools.values())
    what = f"{num_pages:,} pages in, as many out"
    may = (REQUEST_US + PAGE_US * 2 * num_pages) / US
    off = np.array(spent["off"])
    for name in names:
        middle = np.median(spent[name])
        table.add(
            f"bind + finish, {what}, {name}",
            middle * US,
            "us",
            ratio=middle / np.median(off),
            to="off",
        )
    for name in names[1:]:
        more = np.median(np.array(spent[name]) - off)
        table.add(f"  {name}: more than off", more * US, "us", ratio=more / may, to="may be")
    for follower in followers.values():
        assert follower.stats()["losses"] == 0
        follower.close()
    for pool in pools.values():
        pool.close()


def without_a_pause(table, num_pages, rounds):
    """A scheduler that does nothing but bind and finish, beside the thread that makes the keys.

    The thread falls behind. What it takes from the scheduler is its share of the interpreter: each
    hand-over costs as much as a whole request.
    """
    room = 16
    rng = np.random.default_rng(2)
    shape = (room + 2 * rounds, num_pages * PAGE_SIZE)
    prompts = rng.integers(0, 50_000, shape).astype(np.int32)
    seconds = {"off": [], "on, thread": []}
    for name, samples in seconds.items():
        pool = full_pool(room * num_pages, prompts[:room])
        follower = followed(pool) if name != "off" else None
        if follower is not None:
            follower.start()
        for prompt in prompts[room:]:
            start = time.perf_counter()
            serve(pool, prompt)
            samples.append(time.perf_counter() - start)
        if follower is not None:
            follower.close()
        pool.close()
    off = np.array(seconds["off"])
    for name, found in seconds.items():
        for kind, value, base in (
            ("mean", np.mean(found), np.mean(off)),
            ("slowest of 100", np.percentile(found, 99), np.percentile(off, 99)),
        ):
            table.add(
                f"requests of {num_pages} pages without a pause, {name}, {kind}",
                value * US,
                "us",
                ratio=value / base,
                to="off",
            )


def draining(table, rounds):
    """What the thread in the background does for it: keys, above all."""
    num_pages = 256
    rng = np.random.default_rng(1)
    prompts = rng.integers(0, 50_000, (rounds + 2, num_pages * PAGE_SIZE)).astype(np.int32)
    pool = full_pool(2 * num_pages, prompts[:2])
    follower = followed(pool)
    keys = follower.keys
    spent, floor = [], []
    for prompt in prompts[2:]:
        serve(pool, prompt)
        start = time.perf_counter()
        follower.drain()
        between = time.perf_counter()
        keys.of_tokens(prompt, None)
        floor.append(time.perf_counter() - between)
        spent.append(between - start)
    drained, hashed = statistics.median(spent), statistics.median(floor)
    table.add(
        "drain, a page in and one out",
        drained / num_pages * US,
        "us",
        ratio=drained / hashed,
        to="its SHA-256",
    )
    start = time.perf_counter()
    follower.subscribe(Silent())
    follower.drain()
    seconds = time.perf_counter() - start
    table.add("listing, a page", seconds / (2 * num_pages) * US, "us")
    stays = np.arange(64, dtype=np.int32), np.zeros(64, np.uint32)
    for name, call in {
        "still_cached of 64 pages": lambda: follower.still_cached(*stays),
        "next_victims, 64 pages": lambda: follower.next_victims(64),
    }.items():
        times = []
        for _ in range(200):
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
        table.add(name, statistics.median(times) * US, "us")
    follower.close()
    pool.close()


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", metavar="FILE", help="also write the table there")
    parser.add_argument("--rounds", type=int, default=400, help="requests a case")
    options = parser.parse_args(argv)
    table = Table(f"following the tree, page size {PAGE_SIZE}, medians unless said otherwise")
    for num_pages in (1, 8, 125, 1000):
        request_costs(table, num_pages, options.rounds)
    without_a_pause(table, 125, 4 * options.rounds)
    draining(table, min(options.rounds, 60))
    table.show()
    if options.json:
        table.write_json(options.json)


if __name__ == "__main__":
    main()
