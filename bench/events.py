"""What events cost the scheduler's thread, and how many a publisher sustains.

`python -m bench.events [--json FILE] [--quick]` prints two tables; it needs the extra `events`.

A request binds a prompt that nobody has seen, declares it written and finishes it, in a full pool:
each request stores as many pages as it evicts. Two pools take turns, one without events and one
whose publisher has a subscriber in another process. The calls are paced by a sleep between
requests, as a model's step would: there the follower's thread can work. Without the sleep it
competes for the interpreter, and the scheduler's thread waits for it now and then.

The cost of a request and of a page is the line through the differences at the shortest and the
longest prompt. "of the thread" counts while the thread was running, "on the clock" also what it
waited; both are medians, the mean is on the clock.
"""

import argparse
import subprocess
import sys
import time

import numpy as np

from bench.clock import Table
from kvpool import KVCachePool
from kvpool.events import EventSubscriber
from kvpool.events.past import PastBatches
from kvpool.events.sockets import EventSockets
from kvpool.events.stream import EventStream
from kvpool.events.wording import Wording
from kvpool.following.contract import StoredRun

US = 1e6
PAGE_SIZE = 16
LENGTHS = (1, 8, 64, 512)  # pages
LOOPBACK = "tcp://127.0.0.1:0"
BLOCKS = {True: 20, False: 1000}  # requests; without a pace so many that the follower wakes
STEP_S = 0.002  # between requests
STEP_PAGES_S = 4e-6  # and more for each page: what the follower does with it in the background
RUN_PAGES = 64
SUBSCRIBER = """
import sys
from kvpool.events import EventSubscriber
with EventSubscriber(*sys.argv[1:]) as subscriber:
    subscriber.read()
    print("ready", flush=True)
    while subscriber.read(3600.0):
        pass
"""


class Subscribed:
    """A subscriber of a publisher in a process of its own."""

    def __init__(self, publisher):
        command = [sys.executable, "-c", SUBSCRIBER, publisher.endpoint]
        if publisher.replay_endpoint:
            command.append(publisher.replay_endpoint)
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE)

    def __enter__(self):
        assert self.process.stdout.readline() == b"ready\n"
        return self

    def __exit__(self, *error):
        self.process.kill()
        self.process.communicate()


def make_pool(num_pages):
    return KVCachePool(1, num_pages * PAGE_SIZE, 1, 1, page_size=PAGE_SIZE, eviction_history=0)


def serve(pool, prompt):
    """One request; seconds on the clock, and of this thread."""
    start, start_thread = time.perf_counter(), time.thread_time()
    request = pool.bind_request(prompt, len(prompt))
    pool.mark_written(request, len(prompt))
    pool.finish_request(request, prompt)
    return time.perf_counter() - start, time.thread_time() - start_thread


def compare(pools, flush, num_pages, rounds, paced):
    """Figures of requests of one length, `{figure: {name: microseconds}}`.

    The pools take turns by blocks of requests, with all events told in between: what the follower
    does for the one must not slow the other.
    """
    rng = np.random.default_rng(num_pages)
    samples, block = {name: [] for name in pools}, BLOCKS[paced]
    for i in range(1 + -(-rounds // block)):
        for name, pool in pools.items():
            flush()
            for _ in range(block):
                prompt = rng.integers(0, 50_000, num_pages * PAGE_SIZE).astype(np.int32)
                if paced:
                    time.sleep(STEP_S + num_pages * STEP_PAGES_S)
                seconds = serve(pool, prompt)
                if i:  # the first block warms up
                    samples[name].append(seconds)
    columns = {name: np.array(times).T * US for name, times in samples.items()}
    return {
        "of the thread": {name: float(np.median(found[1])) for name, found in columns.items()},
        "on the clock": {name: float(np.median(found[0])) for name, found in columns.items()},
        "mean": {name: float(found[0].mean()) for name, found in columns.items()},
        "p99": {name: float(np.quantile(found[0], 0.99)) for name, found in columns.items()},
    }


def scheduler(table, rounds):
    pools = {"off": make_pool(4 * LENGTHS[-1]), "on": make_pool(4 * LENGTHS[-1])}
    publisher = pools["on"].publish_events(LOOPBACK, replay_endpoint=LOOPBACK)
    publisher.flush()
    with Subscribed(publisher):
        for paced, words in ((True, "paced"), (False, "not paced")):
            found = {
                num_pages: compare(pools, publisher.flush, num_pages, rounds, paced)
                for num_pages in LENGTHS
            }
            for num_pages, figures in found.items():
                for figure, by_name in figures.items():
                    ratio = by_name["on"] / by_name["off"]
                    name = f"{words}, {num_pages} pages a request, {figure}"
                    table.add(name, by_name["on"], "us", ratio=ratio, to="off")
            for figure in ("of the thread", "on the clock", "mean"):
                small, large = (
                    found[num_pages][figure]["on"] - found[num_pages][figure]["off"]
                    for num_pages in (LENGTHS[0], LENGTHS[-1])
                )
                a_page = (large - small) / (LENGTHS[-1] - LENGTHS[0])
                table.add(f"{words}, added a page, {figure}", a_page, "us")
                table.add(f"{words}, added a request, {figure}", small - a_page * LENGTHS[0], "us")
    assert publisher.stats()["failed"] == 0
    for pool in pools.values():
        pool.close()


def sustained(table, rounds):
    """What encoding and sending alone takes, and the whole way from the tree on."""
    sockets = EventSockets(LOOPBACK, None, allow_remote=False, hwm=100_000, replay_hwm=1)
    wording = Wording.of("", "cpu", "bytes", None, None)
    stream = EventStream(sockets.publish, wording, PastBatches(10_000, 64 << 20))
    rng = np.random.default_rng(0)
    numbers = np.arange(RUN_PAGES)
    run = StoredRun(
        numbers.astype(np.int32),
        [rng.bytes(32) for _ in numbers],
        rng.bytes(32),
        rng.integers(0, 50_000, (RUN_PAGES, PAGE_SIZE)).astype(np.int32),
        None,
        numbers.astype(np.uint32),
    )
    with EventSubscriber(sockets.endpoint) as subscriber:
        while subscriber.read(0.01) is None:  # until it is heard of
            stream.stored(run)
            stream.flush()
        start, before = time.perf_counter(), stream.stats()
        for _ in range(rounds * 20):
            stream.stored(run)
            stream.removed(run.keys)
            stream.flush()
        seconds, after = time.perf_counter() - start, stream.stats()
    sockets.close(0)
    for name, unit in (("events", "events/s"), ("stored_pages", "pages/s")):
        rate = (after[name] - before[name]) / seconds
        table.add(f"encode and send, runs of {RUN_PAGES} pages, {name}", rate, unit)
    for num_pages in (1, RUN_PAGES):
        pool = make_pool(4096)
        with pool.publish_events(LOOPBACK, replay_endpoint=LOOPBACK) as publisher:
            publisher.flush()
            with Subscribed(publisher):
                before = publisher.stats()
                start = time.perf_counter()
                for _ in range(rounds * 20):
                    serve(pool, rng.integers(0, 50_000, num_pages * PAGE_SIZE).astype(np.int32))
                publisher.flush()
                seconds, after = time.perf_counter() - start, publisher.stats()
        changed = sum(after[name] - before[name] for name in ("stored_pages", "removed_pages"))
        rate = (after["events"] - before["events"]) / seconds
        table.add(f"requests of {num_pages} pages back to back, events", rate, "events/s")
        table.add(f"requests of {num_pages} pages, told in and out", changed / seconds, "pages/s")
        pool.close()


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", metavar="FILE", help="also write the tables there, as one")
    parser.add_argument("--rounds", type=int, default=200, help="requests of each length")
    parser.add_argument("--quick", action="store_true", help="a tenth of them")
    options = parser.parse_args(argv)
    rounds = max(5, options.rounds // 10) if options.quick else options.rounds
    cost = Table(f"The scheduler's thread with events on, pages of {PAGE_SIZE}")
    scheduler(cost, rounds)
    cost.show()
    rates = Table("What a publisher sustains, one subscriber")
    sustained(rates, rounds)
    rates.show()
    if options.json:
        cost.rows += rates.rows
        cost.write_json(options.json)


if __name__ == "__main__":
    main()
