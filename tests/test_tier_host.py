"""HostTier: what it keeps against a slow twin, its memory, and readers beside writers."""

import sys
import threading
from collections import OrderedDict
from importlib.util import find_spec
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool.device import pinned
from kvpool.tiers.host import HostTier

RECORD_BYTES = 64
NUM_SLOTS = 4
NAMES = st.lists(st.integers(0, 7), min_size=1, max_size=3)
STEPS = st.lists(st.tuples(st.sampled_from(["write", "read", "remove"]), NAMES), max_size=30)


def key(number):
    return bytes([number]) * 32


def rows_of(*values):
    """A row of each value, which it has in every byte."""
    return np.repeat(np.array(values, np.uint8)[:, None], RECORD_BYTES, axis=1)


class Slow:
    """Values by key, the least recently used first; one record at a time."""

    def __init__(self, num_slots):
        self.num_slots, self.values, self.num_evicted = num_slots, OrderedDict(), 0

    def write(self, number, value):
        self.values.pop(number, None)
        if len(self.values) == self.num_slots:
            self.values.popitem(last=False)
            self.num_evicted += 1
        self.values[number] = value

    def read(self, number):
        if number in self.values:
            self.values.move_to_end(number)
        return self.values.get(number)


@given(steps=STEPS)
def test_tier_is_the_slow_one(steps):
    tier, slow = HostTier(NUM_SLOTS * RECORD_BYTES), Slow(NUM_SLOTS)
    value = 0
    for step, numbers in steps:
        numbers = list(dict.fromkeys(numbers))
        keys = [key(number) for number in numbers]
        rows = np.zeros((len(keys), RECORD_BYTES), np.uint8)
        if step == "write":
            values = [value + i for i in range(len(keys))]
            value += len(keys)
            # What a call replaces makes room first, so that a full tier evicts nothing for it.
            for number in numbers:
                if len(slow.values) + len(numbers) > NUM_SLOTS:
                    slow.values.pop(number, None)
            for number, each in zip(numbers, values, strict=True):
                slow.write(number, each)
            assert tier.write(keys, rows_of(*values)) == [True] * len(keys)
        elif step == "remove":
            gone = [slow.values.pop(number, None) is not None for number in numbers]
            assert tier.remove(keys) == gone
        else:
            expected = [slow.read(number) for number in numbers]
            answers = tier.read(keys, rows)
            assert answers == [each is not None for each in expected]
            assert all(
                (row == each).all()
                for row, each in zip(rows, expected, strict=True)
                if each is not None
            )
        everything = [key(number) for number in range(8)]
        assert tier.exists(everything) == [number in slow.values for number in range(8)]
        stats = tier.stats()
        assert stats["records"] == len(slow.values)
        assert stats["bytes"] == len(slow.values) * RECORD_BYTES
        assert stats["evicted_records"] == slow.num_evicted


def test_more_records_than_fit_leave_the_last_ones():
    tier = HostTier(NUM_SLOTS * RECORD_BYTES + 63)
    keys = [key(i) for i in range(10)]
    assert tier.write(keys, rows_of(*range(10))) == [True] * 10
    assert tier.exists(keys) == [False] * 6 + [True] * 4
    assert tier.stats()["bytes"] == NUM_SLOTS * RECORD_BYTES


def test_an_overwrite_in_a_full_tier_evicts_nothing():
    tier = HostTier(2 * RECORD_BYTES)
    tier.write([key(0), key(1)], rows_of(0, 1))
    tier.write([key(1)], rows_of(9))
    found = rows_of(0, 0)
    assert tier.read([key(0), key(1)], found) == [True, True]
    assert (found == rows_of(0, 9)).all()
    assert tier.stats()["evicted_records"] == 0


@pytest.mark.parametrize("capacity_bytes", [0, RECORD_BYTES - 1])
def test_a_record_larger_than_the_tier_finds_no_room(capacity_bytes):
    tier = HostTier(capacity_bytes)
    assert tier.write([key(0)], rows_of(0)) == [False]
    assert tier.exists([key(0)]) == tier.read([key(0)], rows_of(0)) == [False]
    assert tier.stats()["refused_records"] == 1


def test_records_of_another_length_are_refused_with_both_lengths():
    tier = HostTier(1 << 10)
    tier.write([key(0)], rows_of(0))
    for call in (tier.read, tier.write):
        with pytest.raises(ValueError, match="64 bytes, got 128"):
            call([key(1)], np.zeros((1, 128), np.uint8))
    assert tier.exists([key(0), key(1)]) == [True, False]


def test_too_much_memory_fails_where_the_tier_is_made():
    with pytest.raises(MemoryError, match=f"{1 << 60} bytes"):
        HostTier(1 << 60)
    with pytest.raises(ValueError, match="capacity_bytes"):
        HostTier(-1)


@pytest.mark.skipif(sys.platform != "linux", reason="reads what Linux says of a process")
def test_memory_comes_as_records_do():
    def resident_bytes():
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * 4096

    before = resident_bytes()
    tier = HostTier(256 << 20)
    rows = np.ones((4, 1 << 20), np.uint8)
    tier.write([key(i) for i in range(4)], rows)
    # Four records of 1 MiB, and pages of the system of 2 MiB around them.
    assert resident_bytes() - before < 64 << 20
    tier.close()


def test_pinned_memory_says_what_it_needs():
    if find_spec("cupy") is not None:
        pytest.skip("CuPy is installed")
    with pytest.raises(ValueError, match="CuPy"):
        HostTier(1 << 10, pinned=True)


def test_pinned_memory_is_used_where_it_can_be_had(monkeypatch):
    asked = []

    class PinnedMemory:
        def __init__(self, num_bytes):
            asked.append(num_bytes)
            self.array = np.zeros(num_bytes, np.uint8)

    # What `pinned_bytes` uses of CuPy.
    memory = SimpleNamespace(
        PinnedMemory=PinnedMemory,
        PinnedMemoryPointer=lambda memory, offset: memory.array[offset:].data,
    )
    runtime = SimpleNamespace(CUDARuntimeError=ArithmeticError)
    cuda = SimpleNamespace(pinned_memory=memory, runtime=runtime)
    device = SimpleNamespace(array_namespace=SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(pinned, "device_of", lambda name: device)
    tier = HostTier(4 * RECORD_BYTES, pinned=True)
    assert asked == [4 * RECORD_BYTES]
    assert tier.write([key(3)], rows_of(3)) == [True]
    found = rows_of(0)
    assert tier.read([key(3)], found) == [True]
    assert (found == 3).all()

    def refuse(self, num_bytes):
        raise ArithmeticError("no memory")

    monkeypatch.setattr(PinnedMemory, "__init__", refuse)
    with pytest.raises(MemoryError, match="256 bytes"):
        HostTier(4 * RECORD_BYTES, pinned=True)


def test_readers_keep_their_slots_while_records_go():
    """Three slots for five keys: each write takes the slot of a record that may be being read."""
    length = 1 << 16
    tier = HostTier(3 * length)
    problems, done = [], threading.Event()

    def write():
        try:
            for i in range(300):
                tier.write([key(i % 5)], np.full((1, length), i % 5, np.uint8))
        finally:
            done.set()

    def read():
        rows = np.zeros((5, length), np.uint8)
        while not done.is_set():
            for i, is_there in enumerate(tier.read([key(i) for i in range(5)], rows)):
                if is_there and (rows[i] != i).any():
                    problems.append(i)

    threads = [threading.Thread(target=each) for each in (write, read, read)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not problems
    # No slot was lost on the way.
    assert tier.write([key(i) for i in range(3)], np.zeros((3, length), np.uint8)) == [True] * 3
    assert tier.exists([key(i) for i in range(3)]) == [True] * 3


def test_a_close_beside_calls_ends_them_or_lets_them_finish():
    tier = HostTier(1 << 20)
    ends = []

    def work():
        rows = rows_of(1, 2, 3)
        try:
            while True:
                tier.write([key(1), key(2), key(3)], rows)
                tier.read([key(1), key(2), key(3)], rows)
        except RuntimeError as error:
            ends.append(str(error))

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    tier.close()
    for thread in threads:
        thread.join(10)
    assert ends == ["tier 'host' is closed: make another one"] * 3
