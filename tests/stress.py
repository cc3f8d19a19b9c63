"""A seeded random driver of the pool and its model.

`python -m tests.stress --operations 10000 --seeds 20`

Each operation is one call on both, and the ledger is compared by its sums; every so often all
requests, the bytes in the pages and the pool's own check are compared too. Prints one line a seed
and exits non-zero at the first error, or when the resident memory still grows in the second half
of a run.
"""

import argparse
import gc
import hashlib
import os
import sys
import time
import traceback

import numpy as np

from kvpool import EVICTION_POLICIES
from tests.oracles.drawing import NumpyChooser
from tests.oracles.twin import WEIGHTS, PoolTwin

MAX_GROWTH = 2 << 20  # bytes that the second half of a run may add: allocator slack, not a leak
MEMORY = ("half_bytes", "end_bytes")
LINE = (
    "seed {seed:3d}  {num_pages:5d} pages of {page_size:2d}, {eviction:4s}  "
    "{operations_per_s:6.0f} ops/s  "
    "evicted {evicted:6d}  matched {matched:7d}  reads {reads:4d}  refused {refusals:4d} "
)


def resident_bytes():
    """Resident memory of this process, or 0 where the kernel does not say."""
    try:
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def draw_pool(rng):
    """8 to 4,096 pages, small ones as likely as large ones; page size 1, 4 or 16."""
    num_pages = int(np.exp2(rng.uniform(3, 12)))
    return num_pages, int(rng.choice([1, 4, 16]))


def run(seed, operations, *, check_every=100, eviction=None):
    """One seed: its speed, its memory, and a digest of the page ids handed out.

    Without `eviction` the seeds take the policies in turn.
    """
    rng = np.random.default_rng(seed)
    num_pages, page_size = draw_pool(rng)
    eviction = eviction or EVICTION_POLICIES[seed % len(EVICTION_POLICIES)]
    max_words = min(96, max(4, num_pages // 12))
    twin = PoolTwin(num_pages, page_size, max_words=max_words, eviction=eviction)
    choose = NumpyChooser(rng)
    verbs = list(WEIGHTS)
    weights = np.array(list(WEIGHTS.values()))
    script = rng.choice(len(verbs), operations, p=weights / weights.sum())
    digest = hashlib.sha256()
    half_bytes, start = 0, time.perf_counter()
    for i, pick in enumerate(script.tolist()):
        try:
            getattr(twin, verbs[pick])(choose)
            twin.compare_sums()
            if i % check_every == 0:
                twin.compare_all()
                twin.compare_raw()
        except BaseException:
            print(f"seed {seed}, operation {i}: {verbs[pick]}", file=sys.stderr)
            raise
        for request in list(twin.model.requests.values())[-1:]:
            digest.update(repr(request.pages).encode())
        if i == operations // 2:
            gc.collect()
            half_bytes = resident_bytes()
    seconds = time.perf_counter() - start
    twin.compare_all()
    gc.collect()
    end_bytes = resident_bytes()
    twin.finish_all()
    return {
        "seed": seed,
        "num_pages": num_pages,
        "page_size": page_size,
        "eviction": eviction,
        "operations_per_s": operations / seconds,
        "half_bytes": half_bytes,
        "end_bytes": end_bytes,
        "evicted": twin.model.evicted,
        "matched": twin.model.match_tokens,
        "reads": twin.reads,
        "refusals": twin.refusals,
        "digest": digest.hexdigest(),
    }


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--operations", type=int, default=10_000, help="calls a seed")
    parser.add_argument(
        "--seeds", type=int, default=20, help="how many seeds, from --first-seed on"
    )
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument(
        "--check-every", type=int, default=100, help="operations between two full comparisons"
    )
    parser.add_argument(
        "--eviction", choices=EVICTION_POLICIES, help="one policy, not all of them in turn"
    )
    options = parser.parse_args(argv)
    failed = 0
    for seed in range(options.first_seed, options.first_seed + options.seeds):
        try:
            result = run(
                seed,
                options.operations,
                check_every=options.check_every,
                eviction=options.eviction,
            )
        except Exception:
            traceback.print_exc()
            failed += 1
            continue
        growth = result["end_bytes"] - result["half_bytes"]
        leaks = growth > MAX_GROWTH and options.operations >= 1000
        failed += leaks
        memory = "{:.1f} -> {:.1f} MiB".format(*(result[k] / 2**20 for k in MEMORY))
        print(LINE.format(**result), f"resident {memory}", "GROWS" if leaks else "ok", flush=True)
    print(f"{options.seeds - failed} of {options.seeds} seeds passed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
