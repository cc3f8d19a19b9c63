"""Seeded random speculative episodes against a slow model that keeps each sequence in a list.

`python -m tests.speculative --episodes 500 --seeds 20`

An episode is a pool of its own, up to eight requests, and some twenty operations: windows of 1 to
6 tokens, eager or captured, with random accepts; checkpoints, forks, finishes with right and with
rejected tokens. Page tables, reads on all layers, written lengths, the tree and the ledger are
compared after each. Prints one line a seed, and exits non-zero at the first difference.
"""

import argparse
import sys
import time
import traceback

import numpy as np

from tests.oracles.speculation_twin import run_episode

LINE = (
    "seed {seed:3d}  {episodes:5d} episodes  {operations:6d} operations compared  "
    "{episodes_per_s:5.0f} episodes/s"
)


def run(seed, episodes, first=0):
    """Episodes `[first, first + episodes)` of one seed; each can be run alone by its number."""
    start, operations = time.perf_counter(), 0
    for episode in range(first, first + episodes):
        try:
            operations += run_episode(np.random.default_rng([seed, episode]))
        except BaseException:
            again = f"--first-seed {seed} --seeds 1 --first-episode {episode} --episodes 1"
            print(f"seed {seed}, episode {episode}; again: {again}", file=sys.stderr)
            raise
    return {
        "seed": seed,
        "episodes": episodes,
        "operations": operations,
        "episodes_per_s": episodes / (time.perf_counter() - start),
    }


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--episodes", type=int, default=500, help="episodes a seed")
    parser.add_argument("--first-episode", type=int, default=0)
    parser.add_argument("--seeds", type=int, default=4, help="seeds, from --first-seed on")
    parser.add_argument("--first-seed", type=int, default=0)
    options = parser.parse_args(argv)
    failed = 0
    for seed in range(options.first_seed, options.first_seed + options.seeds):
        try:
            result = run(seed, options.episodes, options.first_episode)
        except Exception:
            traceback.print_exc()
            failed += 1
            continue
        print(LINE.format(**result), flush=True)
    print(f"{options.seeds - failed} of {options.seeds} seeds passed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
