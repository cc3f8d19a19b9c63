"""What the host spends on one decode step, eager or ahead of the replay of a graph.

`python -m bench.step [--json FILE]` prints two tables. An eager step activates its rows, makes the
page table and the write slots; a step in a graph activates and fills the graph's buffers; no step
does both. Every step of a measured loop is a new one: ids and lengths come as int32 arrays,
lengths grow by a token (no row crosses a page) or by a page (all rows do; a graph zeroes the
pages, an eager step leaves that to its first put). The pool has the smallest geometry, so that
what is left is bookkeeping. The ratio is to copying the step's page ids, which a table that is
listed anew must do at least.
"""

import argparse
import statistics
import time

import numpy as np

from bench.clock import Table
from kvpool import KVCachePool

US = 1e6
PAGE_SIZE = 16
BATCHES = (1, 16, 64, 256, 512, 1024)
LENGTHS = (512, 2048, 8192, 32_768)
STAGES = ("activate", "page table", "write slots", "prepare")
EAGER, GRAPH = "eager", "graph"
WAYS = {EAGER: STAGES[:3], GRAPH: (STAGES[0], STAGES[3])}  # the stages of each
BATCH, LENGTH = 256, 8192  # of the table over lengths, and of the table over batches
WARM_UP = 4


def decode_pool(batch, length, num_steps):
    """A pool with `batch` requests that are written up to `length`, and room to decode."""
    capacity = length + (num_steps + 2) * PAGE_SIZE
    pool = KVCachePool(
        1,
        batch * capacity,
        1,
        1,
        page_size=PAGE_SIZE,
        dtype="float8_e4m3fn",
        max_batch_size=batch,
        max_seq_len=capacity,
    )
    requests = [pool.bind_request([row], capacity) for row in range(batch)]
    for request in requests:
        pool.mark_written(request, length)
    return pool, np.array(requests, np.int32)


def decode_steps(way, batch, length, advance, num_steps):
    """Median seconds of each stage of a way, over a loop in which rows advance so many tokens."""
    pool, ids = decode_pool(batch, length, num_steps)
    graph = pool.decode_graph
    samples = {stage: [] for stage in WAYS[way]}
    for i in range(num_steps):
        lengths = np.full(batch, length + 1 + i * advance, np.int32)
        starts = lengths - 1
        if advance > 1:
            for request in ids.tolist():  # what a prefill of that many tokens would have declared
                pool.mark_written(request, int(starts[0]) // PAGE_SIZE * PAGE_SIZE)
        times = [time.perf_counter()]
        step = pool.activate_step(ids)
        times.append(time.perf_counter())
        if way == GRAPH:
            graph.prepare(lengths, starts)
        else:
            step.page_table(lengths)
            times.append(time.perf_counter())
            step.window_slot_indices(starts, 1)
        times.append(time.perf_counter())
        if i >= WARM_UP:
            for found, start, end in zip(samples.values(), times[:-1], times[1:], strict=True):
                found.append(end - start)
    pool.close()
    return {stage: statistics.median(found) for stage, found in samples.items()}


def copy_of_page_ids(batch, length):
    """Median seconds of copying as many page ids as the step's table lists."""
    source = np.arange(batch * -(-length // PAGE_SIZE), dtype=np.int32)
    target, samples = np.empty_like(source), []
    for _ in range(40):
        start = time.perf_counter()
        np.copyto(target, source)
        samples.append(time.perf_counter() - start)
    return statistics.median(samples)


# From the first position of a page on, 15 tokens stay on it.
CROSSINGS = {"none crosses": (1, PAGE_SIZE), "all cross": (PAGE_SIZE, WARM_UP + 20)}


def measure(table, shapes, rounds):
    for batch, length in shapes:
        floor = copy_of_page_ids(batch, length)
        for words, (advance, num_steps) in CROSSINGS.items():
            for way, names in WAYS.items():
                loops = [
                    decode_steps(way, batch, length, advance, num_steps) for _ in range(rounds)
                ]
                stages = {
                    name: US * statistics.median(loop[name] for loop in loops) for name in names
                }
                parts = " ".join(f"{stages[s]:11.1f}" if s in stages else " " * 11 for s in STAGES)
                total = sum(stages.values())
                table.add(
                    f"{batch:5} x {length:5} {words:12} {way:5} {parts}",
                    total,
                    "us",
                    ratio=total / US / floor,
                    to="copying the page ids",
                )
                # the same, for programs
                shape = {"batch": batch, "length": length, "crossing": words, "way": way}
                table.rows[-1] |= shape | {"stages": stages}


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", metavar="FILE", help="also write the tables there, as one")
    parser.add_argument("--rounds", type=int, default=5, help="loops of each kind")
    parser.add_argument("--quick", action="store_true", help="the smallest shapes only")
    options = parser.parse_args(argv)
    batches, lengths = (BATCHES[:3], LENGTHS[:2]) if options.quick else (BATCHES, LENGTHS)
    stages = " ".join(f"{stage:>11}" for stage in STAGES)
    columns = f"\n  {'rows':>5} x {'tokens':12} {'':12} {stages}"
    title = f"One decode step on the host, pages of {PAGE_SIZE}, us: growth with the "
    by_batch = Table(f"{title}batch{columns}")
    measure(by_batch, [(batch, LENGTH) for batch in batches], options.rounds)
    by_batch.show()
    by_length = Table(f"{title}length{columns}")
    measure(by_length, [(BATCH, length) for length in lengths], options.rounds)
    by_length.show()
    if options.json:
        by_batch.rows += by_length.rows
        by_batch.write_json(options.json)


if __name__ == "__main__":
    main()
