"""Small traces for the replay, as lines and as files."""

import json

import numpy as np


def hashed(input_length, ids, output_length=0, **more):
    """A line in Mooncake's format."""
    lengths = {"timestamp": 0, "input_length": input_length, "output_length": output_length}
    return lengths | {"hash_ids": list(ids)} | more


def random_lines(seed, num_requests, block_size, num_keys=1):
    """Requests that often begin alike, and end in the middle of a block or at its end."""
    rng = np.random.default_rng(seed)
    lines = []
    for _ in range(num_requests):
        ids = [int(rng.integers(0, 2)), *rng.integers(0, 3, rng.integers(0, 6)).tolist()]
        cut = int(rng.integers(0, block_size)) if rng.random() < 0.7 else 0
        length = len(ids) * block_size - cut
        line = hashed(length, ids, int(rng.integers(0, 3 * block_size // 2)))
        if num_keys > 1:
            line["extra_key"] = f"tenant {rng.integers(0, num_keys)}"
        lines.append(line)
    return lines


def write_trace(folder, lines, name="trace.jsonl"):
    """A file of these lines; a line may be text already."""
    path = folder / name
    path.write_text(
        "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines)
    )
    return path
