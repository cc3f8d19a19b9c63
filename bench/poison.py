"""What poison mode costs, verb by verb: the same calls on two pools, one of them poisoned.

`python -m bench.poison [--json FILE]` prints microseconds a call without and with poison. A look
at a page costs as much as reading it, so the price goes with the bytes of the pages that a call
moves or hits; a table for pages as in tests, one for pages as of a model. `--off` measures the
plain pool only: run it in two checkouts to compare them.
"""

import argparse
from typing import NamedTuple

import numpy as np

from bench.clock import Table, interleave
from kvpool import KVCachePool

US = 1e6
PAGE_SIZE = 16
NUM_PAGES = 96
PROMPT = np.arange(32 * PAGE_SIZE, dtype=np.int32)  # 32 pages
ASKED = np.append(PROMPT, np.int32(7))
CAPACITY = ASKED.size + PAGE_SIZE


class Shape(NamedTuple):
    """Geometry of a pool."""

    words: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: str

    @property
    def page_bytes(self):
        itemsize = 4 if self.dtype == "float32" else 2
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * itemsize * PAGE_SIZE


SHAPES = (
    Shape("as in tests", 2, 2, 8, "float32"),
    Shape("as of a small model", 16, 8, 64, "float16"),
)


class Subject:
    """A pool, and each verb as `(setup, call)`."""

    def __init__(self, shape, **options):
        self.pool = KVCachePool(
            shape.num_layers,
            NUM_PAGES * PAGE_SIZE,
            shape.num_kv_heads,
            shape.head_dim,
            page_size=PAGE_SIZE,
            dtype=shape.dtype,
            **options,
        )
        dtype = np.dtype(shape.dtype)
        self.rows = np.ones((1, PROMPT.size, shape.num_kv_heads, shape.head_dim), dtype)

    def verbs(self):
        return {
            "bind and unbind, nothing cached": (self.forget, self.bind_and_unbind),
            "bind and unbind, a hit of 32 pages": (self.remember, self.bind_and_unbind),
            "bind that evicts 32 pages, and unbind": (self.fill_up, self.bind_and_unbind),
            "finish that publishes 32 pages": (self.written, self.finish),
            "put of a prompt, one layer": (self.entered, self.put_prompt),
            "put of a token, one layer": (self.entered, self.put_token),
            "get of a prompt, one layer": (self.written, self.get),
            "page table of a prompt": (self.written, self.page_table),
        }

    # ---- set-ups

    def forget(self):
        self.pool.unbind_requests()
        self.pool.reset_prefix_cache()
        return ASKED

    def cache(self, tokens):
        request = self.written(tokens)
        self.pool.finish_request(request, tokens)

    def remember(self):
        self.forget()
        self.cache(PROMPT)
        return ASKED

    def fill_up(self):
        self.forget()
        for i in range(NUM_PAGES // 32):
            self.cache(PROMPT + 1000 * (i + 1))
        return ASKED[: PROMPT.size]

    def entered(self, tokens=PROMPT):
        self.pool.unbind_requests()
        self.pool.reset_prefix_cache()
        request = self.pool.bind_request(tokens, CAPACITY)
        self.pool.activate_step(request)
        self.pool.step.put(0, 0, self.rows, self.rows)
        return request

    def written(self, tokens=PROMPT):
        self.pool.unbind_requests()
        if tokens is PROMPT:
            self.pool.reset_prefix_cache()
        request = self.pool.bind_request(tokens, tokens.size)
        step = self.pool.activate_step(request)
        for layer in range(self.pool.num_layers):
            step.put(layer, 0, self.rows, self.rows)
        return request

    # ---- calls

    def bind_and_unbind(self, tokens):
        self.pool.unbind_request(self.pool.bind_request(tokens, tokens.size))

    def finish(self, request):
        self.pool.finish_request(request, PROMPT)

    def put_prompt(self, _request):
        self.pool.step.put(0, 0, self.rows, self.rows)

    def put_token(self, _request):
        self.pool.step.put(0, 1, self.rows[:, :1], self.rows[:, :1])

    def get(self, _request):
        self.pool.step.get(0, PROMPT.size)

    def page_table(self, _request):
        self.pool.step.clear_page_table()
        self.pool.step.page_table(PROMPT.size)


def measure(table, shape, rounds, ways):
    subjects = {way: Subject(shape, **options) for way, options in ways.items()}
    for verb in subjects["off"].verbs():
        cases = {way: subject.verbs()[verb] for way, subject in subjects.items()}
        found = interleave(cases, rounds=rounds)
        off = found["off"]
        if "on" in found:
            name = f"{verb:38} {US * off:9.1f} us without,"
            table.add(name, US * found["on"], "us with", ratio=found["on"] / off, to="without")
        else:
            table.add(verb, US * off, "us")
        table.rows[-1] |= {"shape": shape.words, "verb": verb, "seconds": found}
    for subject in subjects.values():
        subject.pool.close()


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", metavar="FILE", help="also write the tables there, as one")
    parser.add_argument("--rounds", type=int, default=30, help="calls of each kind")
    parser.add_argument("--off", action="store_true", help="the plain pool only")
    options = parser.parse_args(argv)
    ways = {"off": {}} if options.off else {"off": {"poison": False}, "on": {"poison": True}}
    rows = []
    for shape in SHAPES:
        table = Table(
            f"Poison mode, pages {shape.words}: {shape.page_bytes / 1024:.0f} KiB each, us a call"
        )
        measure(table, shape, options.rounds, ways)
        table.show()
        rows += table.rows
    if options.json:
        table.rows = rows
        table.write_json(options.json)


if __name__ == "__main__":
    main()
