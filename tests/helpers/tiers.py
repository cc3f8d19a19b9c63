"""Tiers for tests: a plain one, one that can be told to misbehave, and pools to attach them to."""

import threading
from contextlib import contextmanager

import numpy as np

from tests.helpers.pools import R
from tests.oracles.prints import k_prints, k_rows

LAYERS, HEADS, DIM, PAGE = 2, 1, 4, 4
MODEL = "weights-1"
PROMPT = R(1, 41)  # ten whole pages of four, and one token


class MemoryTier:
    """A dict: the slow twin of every tier."""

    def __init__(self, name="memory", max_records=None):
        self.name, self.max_records = name, max_records
        self.records = {}
        self.lock = threading.Lock()
        self.registered = 0
        self.closed = False

    def exists(self, keys):
        with self.lock:
            return [key in self.records for key in keys]

    def read(self, keys, rows):
        with self.lock:
            found = [self.records.get(key) for key in keys]
        for row, record in zip(rows, found, strict=True):
            if record is not None:
                row[:] = record
        return [record is not None for record in found]

    def write(self, keys, rows):
        answers = []
        with self.lock:
            for key, row in zip(keys, rows, strict=True):
                full = self.max_records is not None and len(self.records) >= self.max_records
                if not full or key in self.records:
                    self.records[key] = row.copy()
                answers.append(not full or key in self.records)
        return answers

    def remove(self, keys):
        with self.lock:
            return [self.records.pop(key, None) is not None for key in keys]

    def register(self, buffer):
        self.registered += 1

    def unregister(self, buffer):
        self.registered -= 1

    def stats(self):
        return {"records": len(self.records)}

    def close(self):
        self.closed = True


class Gated(MemoryTier):
    """Waits in a verb until it is let through: a tier that hangs, or that a test steps."""

    def __init__(self, name="gated", verbs=("read",), **options):
        super().__init__(name, **options)
        self.verbs = set(verbs)
        self.permits = threading.Semaphore(0)
        self.entered = threading.Semaphore(0)
        self.num_waiting = 0

    def pass_through(self, verb):
        if verb in self.verbs:
            self.entered.release()
            self.permits.acquire()

    def read(self, keys, rows):
        self.pass_through("read")
        return super().read(keys, rows)

    def write(self, keys, rows):
        self.pass_through("write")
        return super().write(keys, rows)

    def exists(self, keys):
        self.pass_through("exists")
        return super().exists(keys)

    def open(self):
        """Let everything through from now on."""
        self.verbs = set()
        for _ in range(1000):
            self.permits.release()


class Faulty(MemoryTier):
    """Raises, or lies, in the way that `fault` says; ``""``: it behaves."""

    def __init__(self, name="faulty", fault="", **options):
        super().__init__(name, **options)
        self.fault = fault
        self.calls = []

    def exists(self, keys):
        self.calls.append(("exists", len(keys)))
        if self.fault == "raises":
            raise OSError("no route")
        if self.fault == "claims all":
            return [True] * len(keys)
        return super().exists(keys)

    def write(self, keys, rows):
        self.calls.append(("write", len(keys)))
        if self.fault == "raises":
            raise OSError("no route")
        return super().write(keys, rows)

    def read(self, keys, rows):
        self.calls.append(("read", len(keys)))
        fault = self.fault
        if fault == "raises":
            raise OSError("no route")
        if fault == "raises system exit":
            raise SystemExit(3)
        if fault == "answers nothing":
            return None
        if fault == "answers too few":
            return super().read(keys, rows)[:-1]
        found = super().read(keys, rows)
        for i, there in enumerate(found):
            if there and fault == "torn":
                rows[i, rows.shape[1] // 2 :] = 0
            elif there and fault == "one bit":
                rows[i, -70] ^= 1
            elif there and fault == "another page":
                rows[i] = list(self.records.values())[-1 - i % len(self.records)]
                if len(self.records) == 1:
                    rows[i] = 0
            elif there and fault == "zeros":
                rows[i] = 0
            elif fault == "claims all":
                found[i] = True
        return found


FAULTS = (
    "raises",
    "raises system exit",
    "answers nothing",
    "answers too few",
    "torn",
    "one bit",
    "another page",
    "zeros",
    "claims all",
)


def tier_pool(make_pool, num_pages=64, **options):
    """Two layers, one head, four dims, pages of four tokens."""
    return make_pool(LAYERS, num_pages * PAGE, HEADS, DIM, page_size=PAGE, **options)


def attach(pool, *tiers, **options):
    """Attach with short times; the `PoolTiers`."""
    options = {"model": MODEL, "timeout_s": 20.0, "retry_s": 0.01} | options
    return pool.attach_tiers(list(tiers), **options)


def serve_prints(pool, prompt, capacity=None, extra_key=None):
    """Bind, write and finish; what `get` read as K of all layers, and the matched length."""
    prompt = list(prompt)
    request = pool.bind_request(prompt, capacity or len(prompt), extra_key=extra_key)
    matched = pool.matched_prefix_len(request)
    step = pool.activate_step(request)
    prints = k_prints(prompt, extra_key, LAYERS)
    for layer in range(LAYERS):
        k = k_rows(prints[layer, matched:], DIM)[None]
        step.put(layer, matched, k, -k)
    found = read_prints(pool, request, len(prompt))
    pool.finish_request(request, prompt)
    return found, matched


def read_prints(pool, request, length):
    """K of all layers ``[layers, length, heads, dim]``, V compared with it."""
    step = pool.activate_step(request)
    found = []
    for layer in range(LAYERS):
        k, v = step.get(layer, length)
        assert (v == -k).all()
        found.append(k[0])
    return np.array(found)


def expected_prints(prompt, extra_key=None):
    """What `read_prints` must give."""
    return k_rows(k_prints(list(prompt), extra_key, LAYERS), DIM)


def matches(pool, prompt, extra_key=None):
    """Tokens that a bind of `prompt` matches, each verified; nothing stays bound."""
    prompt = list(prompt)
    request = pool.bind_request(prompt, len(prompt), extra_key=extra_key)
    matched = pool.matched_prefix_len(request)
    if matched:
        pool.mark_written(request, matched)
        found = read_prints(pool, request, matched)
        assert (found == expected_prints(prompt, extra_key)[:, :matched]).all()
    pool.unbind_request(request)
    return matched


def fill_tiers(make_pool, prompts, *tiers, extra_key=None, **options):
    """Have another pool write `prompts` to the tiers."""
    pool = tier_pool(make_pool, 256)
    attached = attach(pool, *tiers, **options)
    for prompt in prompts:
        serve_prints(pool, prompt, extra_key=extra_key)
    assert attached.flush(20)
    pool.close()


def all_given_back(pool):
    """Nothing is fetched, taken or locked, and the ledger adds up."""
    stats = pool.stats()
    assert stats["pages_fetching"] == stats["pages_taken"] == 0, stats
    assert pool.radix.protected_size == 0
    pool.check()


@contextmanager
def opened(*gated):
    """Around a test with tiers that hang: whatever happens, they are let through at the end."""
    try:
        yield
    finally:
        for tier in gated:
            tier.open()
