"""Writing and reading K/V rows of 2 KB on the CPU, against NumPy's indexing of the same arrays.

`python -m bench.rows [--json FILE]`; a copy of as many bytes is the floor of both.
"""

import argparse

import numpy as np

from bench.clock import Table, interleave
from kvpool import KVCachePool

NUM_ROWS, HEADS, HEAD_DIM, PAGE_SIZE = 4_096, 4, 128, 16  # 4 * 128 * 4 bytes = 2 KB a row


def scattered_pool(dtype):
    """A pool of twice the rows whose free pages come in no order, and one bound request."""
    pool = KVCachePool(1, 2 * NUM_ROWS, HEADS, HEAD_DIM, page_size=PAGE_SIZE, dtype=dtype)
    slots = pool.alloc(pool.num_slots).reshape(-1, PAGE_SIZE)
    for page in np.random.default_rng(0).permutation(len(slots)):
        pool.free(slots[page])
    request = pool.bind_request(range(NUM_ROWS), NUM_ROWS)
    return pool, pool.activate_step(request)


def measure(table, rounds):
    pool, step = scattered_pool("float32")
    rng = np.random.default_rng(1)
    k = rng.standard_normal((1, NUM_ROWS, HEADS, HEAD_DIM), np.float32)
    v = rng.standard_normal((1, NUM_ROWS, HEADS, HEAD_DIM), np.float32)
    keys, values = pool.key_layer(0), pool.value_layer(0)
    slots = step.window_slot_indices(0, NUM_ROWS)
    k_copy, v_copy = np.empty_like(k), np.empty_like(v)

    def write_by_index():
        keys[slots] = k[0]
        values[slots] = v[0]

    def copy():
        np.copyto(k_copy, k)
        np.copyto(v_copy, v)

    seconds = interleave(
        {
            "copy": copy,
            "put": lambda: step.put(0, 0, k, v, slots=slots),
            "put, slots made inside": lambda: step.put(0, 0, k, v),
            "NumPy write": write_by_index,
            "get": lambda: step.get(0, NUM_ROWS),
            "NumPy read": lambda: (keys[slots], values[slots]),
        },
        rounds=rounds,
    )
    got_k, got_v = step.get(0, NUM_ROWS)
    np.testing.assert_array_equal(got_k, k)
    np.testing.assert_array_equal(got_v, v)
    floors = {"put": "NumPy write", "put, slots made inside": "NumPy write", "get": "NumPy read"}
    num_bytes = k.nbytes + v.nbytes
    for name, value in seconds.items():
        floor = floors.get(name, "copy")
        table.add(
            f"{name}, K and V of 4,096 rows",
            value * 1e3,
            "ms",
            ratio=value / seconds[floor],
            to=floor,
        )
        table.add("  as bandwidth", num_bytes / value / 1e9, "GB/s")
    pool.close()


def one_row(table, rounds):
    """A decode step writes one row a request: what the call itself costs."""
    pool, step = scattered_pool("float32")
    k = np.ones((1, 1, HEADS, HEAD_DIM), np.float32)
    keys, values = pool.key_layer(0), pool.value_layer(0)
    slots = step.window_slot_indices(0, 1)

    def write_by_index():
        keys[slots] = k[0]
        values[slots] = k[0]

    seconds = interleave(
        {"put": lambda: step.put(0, 0, k, k, slots=slots), "NumPy write": write_by_index},
        rounds=rounds,
        repeat=100,
    )
    table.add(
        "put of one row",
        seconds["put"] * 1e6,
        "us",
        ratio=seconds["put"] / seconds["NumPy write"],
        to="NumPy write",
    )
    pool.close()


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", metavar="FILE", help="also write the table there")
    parser.add_argument("--rounds", type=int, default=40, help="samples a case")
    options = parser.parse_args(argv)
    table = Table("rows of 2 KB, page size 16, scattered pages, medians")
    measure(table, options.rounds)
    one_row(table, options.rounds)
    table.show()
    if options.json:
        table.write_json(options.json)


if __name__ == "__main__":
    main()
