"""Snapshots under fire: saves that are killed, files that were damaged.

`python -m tests.snapshots --kills 500 --signals 100 --rivals 100 --corruptions 500 --seed 0`

A kill ends the process of a save right after the N-th byte that it writes, or at an fsync or a
rename; a signal is a SIGKILL at a random time; rivals are two processes that save to one path. At
any time the file must be one of the two pools that were saved, whole. A corruption damages a file,
every other one with a seal that fits again; load must refuse it with SnapshotError, or serve only
pages whose bytes are those of their prefix. Prints what happened, and exits non-zero where
anything else did.
"""

import argparse
import collections
import os
import random
import resource
import signal
import sys
import tempfile
import time
from pathlib import Path

from kvpool import KVCachePool, SnapshotError
from tests.helpers.damage import DAMAGES, damaged
from tests.helpers.stamps import cached, wrong_pages
from tests.oracles.snapshot import random_pool

MODEL = "name@revision"
MORE_MEMORY = 512 << 20  # that a load of a few kilobytes may take, address space included
MOST_SECONDS = 20  # of one load
ENDS = ("fsync", "before rename", "after rename")  # where else a kill may strike


def two_pools(seed, dtype="bfloat16"):
    """Two pools of one shape, each with some of what the other has."""
    return [
        random_pool(seed + i, num_calls=60 + 60 * i, num_pages=40, page_size=4, dtype=dtype)
        for i in range(2)
    ]


def load_whole(path, states):
    """Which of `states` the file holds, each page verified; raises if none of them."""
    loaded = KVCachePool.load(path, model=MODEL)
    loaded.check()
    assert loaded.load_report.pages_loaded == loaded.load_report.pages_saved, loaded.load_report
    assert not wrong_pages(loaded)
    return states.index(cached(loaded))


def in_child(work):
    """Fork a process that does `work` and never returns; its id."""
    child = os.fork()
    if child:
        return child
    try:
        work()
    finally:
        os._exit(99)
    raise AssertionError


def die_after(num_bytes, end):
    """Make this process end right after so many written bytes, or at `end`."""
    write, rename, left = os.write, os.rename, num_bytes

    def writing(file, data):
        nonlocal left
        if end is None and len(data) >= left:
            write(file, data[:left])
            os._exit(0)
        left -= len(data)
        return write(file, data)

    def renaming(*names):
        if end == "before rename":
            os._exit(0)
        rename(*names)
        if end == "after rename":
            os._exit(0)

    os.write, os.rename = writing, renaming
    if end == "fsync":
        os.fsync = lambda _: os._exit(0)


def written_bytes(pool, folder):
    """What a save of `pool` writes in all, the seal and the checksums a second time."""
    write, total = os.write, 0

    def counting(file, data):
        nonlocal total
        total += len(data)
        return write(file, data)

    os.write = counting
    try:
        pool.save(folder / "counted", model=MODEL)
    finally:
        os.write = write
        (folder / "counted").unlink()
    return total


def kills(count, rng, folder):
    """Kills at random bytes, and at each of `ENDS` once."""
    old, new = two_pools(rng.randrange(1 << 30))
    states, path, outcomes = [cached(old), cached(new)], folder / "pool", collections.Counter()
    total = written_bytes(new, folder)
    for i in range(count):
        old.save(path, model=MODEL)  # removes what the last one left behind, too
        assert os.listdir(folder) == ["pool"]
        end = ENDS[i] if i < len(ENDS) else None
        num_bytes = rng.randint(1, total)

        def work(num_bytes=num_bytes, end=end):
            die_after(num_bytes, end)
            new.save(path, model=MODEL)

        _, status = os.waitpid(in_child(work), 0)
        assert status == 0, f"the child was not where it should die: {status}"
        outcomes[("old", "new")[load_whole(path, states)]] += 1
    old.save(path, model=MODEL)
    assert os.listdir(folder) == ["pool"]
    return outcomes


def signals(count, rng, folder):
    """SIGKILLs at random times of a process that saves two pools in turn."""
    pools = two_pools(rng.randrange(1 << 30))
    states, path, outcomes = [*map(cached, pools)], folder / "pool", collections.Counter()
    pools[0].save(path, model=MODEL)

    def work():
        while True:
            for pool in reversed(pools):
                pool.save(path, model=MODEL)

    for _ in range(count):
        child = in_child(work)
        time.sleep(rng.uniform(0, 0.05))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        outcomes[("first", "second")[load_whole(path, states)]] += 1
        outcomes["left beside"] += len(os.listdir(folder)) - 1
    pools[0].save(path, model=MODEL)
    assert os.listdir(folder) == ["pool"]
    return outcomes


def rivals(count, rng, folder):
    """Two processes that save two pools to one path, so often each; what a third one reads."""
    pools = two_pools(rng.randrange(1 << 30))
    states, path, outcomes = [*map(cached, pools)], folder / "pool", collections.Counter()
    pools[0].save(path, model=MODEL)

    def saving(pool):
        def work():
            for _ in range(count):
                pool.save(path, model=MODEL)
            os._exit(0)

        return work

    left = {in_child(saving(pool)) for pool in pools}
    while left:
        outcomes[("first read", "second read")[load_whole(path, states)]] += 1
        child, status = os.waitpid(-1, os.WNOHANG)
        assert status == 0, f"a save failed: {status}"
        left.discard(child)
    assert os.listdir(folder) == ["pool"]
    return outcomes


def corruptions(count, rng, folder):
    """Damaged files; pages that were served, and dropped, beside the outcomes."""
    outcomes, path = collections.Counter(), folder / "pool"
    images = []
    for i in range(4):
        pair = []
        for pool in two_pools(rng.randrange(1 << 30), ("bfloat16", "float8_e4m3fn")[i % 2]):
            pool.save(path, model=MODEL)
            pair.append((path.read_bytes(), cached(pool)))
        images.append(pair)
    limit_memory()
    for i in range(count):
        pair = rng.choice(images)
        kind = list(DAMAGES)[i // 2 % len(DAMAGES)]
        data = damaged(kind, pair[0][0], pair[1][0], rng, reseal=i % 2 == 1)
        path.write_bytes(data)
        outcomes[load_damaged(path, pair[0][1].keys() | pair[1][1].keys(), outcomes)] += 1
    return outcomes


def load_damaged(path, known, outcomes):
    """Load, and raise if anything was served that is not what it seems; what load did."""
    signal.alarm(MOST_SECONDS)
    try:
        loaded = KVCachePool.load(path, model=MODEL)
    except SnapshotError:
        return "refused"
    finally:
        signal.alarm(0)
    loaded.check()
    report = loaded.load_report
    assert not wrong_pages(loaded), "a page was served whose bytes are not those of its prefix"
    assert cached(loaded).keys() <= known, "a prefix was served that nobody saved"
    assert len(cached(loaded)) == report.pages_loaded
    outcomes["pages served"] += report.pages_loaded
    outcomes["pages dropped"] += report.pages_dropped_corrupt
    if report.pages_loaded == report.pages_saved:
        return "loaded whole"
    return "loaded in part"


def limit_memory():
    """Let this process have little more address space than it has."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + MORE_MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=500, help="saves killed after N bytes")
    parser.add_argument("--signals", type=int, default=100, help="saves killed by SIGKILL")
    parser.add_argument("--rivals", type=int, default=100, help="saves of each of two processes")
    parser.add_argument("--corruptions", type=int, default=500, help="damaged files")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(argv)
    for work in (kills, signals, rivals, corruptions):
        count, start = getattr(options, work.__name__), time.perf_counter()
        if not count:
            continue
        with tempfile.TemporaryDirectory() as folder:
            outcomes = work(count, random.Random(options.seed), Path(folder))
        seconds = time.perf_counter() - start
        told = ", ".join(f"{name} {number:,}" for name, number in sorted(outcomes.items()))
        print(f"{work.__name__}: {count}, violations 0 ({told}) in {seconds:.1f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
