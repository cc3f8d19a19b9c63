"""LRUIndex against a list of entries in order of their use."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool.tiers.index import LRUIndex

KEYS = st.sampled_from([bytes([i]) for i in range(6)])
STEPS = st.one_of(
    st.tuples(st.sampled_from(["put", "put_new"]), KEYS, st.integers(0, 12)),
    st.tuples(st.sampled_from(["get", "touch", "discard", "evict"]), KEYS, st.just(0)),
)


class Slow:
    """Entries, the least recently used first."""

    def __init__(self, capacity):
        self.capacity, self.entries, self.num_evicted = capacity, [], 0

    def find(self, key):
        return next((entry for entry in self.entries if entry[0] == key), None)

    def get(self, key):
        entry = self.find(key)
        if entry:
            self.entries.remove(entry)
            self.entries.append(entry)
        return entry and entry[1]

    def put(self, key, value, size):
        if self.capacity is not None and size > self.capacity:
            return None
        old, gone = self.find(key), []
        if old:
            self.entries.remove(old)
            gone.append(old[1])
        self.entries.append((key, value, size))
        while (
            self.capacity is not None and sum(entry[2] for entry in self.entries) > self.capacity
        ):
            gone.append(self.entries.pop(0)[1])
            self.num_evicted += 1
        return gone

    def evict(self, key):
        if not self.entries:
            return None
        self.num_evicted += 1
        return self.entries.pop(0)[1]

    def discard(self, key):
        entry = self.find(key)
        if entry:
            self.entries.remove(entry)
        return entry and entry[1]


@given(capacity=st.one_of(st.none(), st.integers(0, 20)), steps=st.lists(STEPS, max_size=40))
def test_index_is_the_slow_one(capacity, steps):
    index, slow = LRUIndex(capacity), Slow(capacity)
    for number, (step, key, size) in enumerate(steps, 1):
        if step == "put":
            assert index.put(key, number, size) == slow.put(key, number, size)
        elif step == "put_new":
            keys = [key, bytes(1), key]
            index.put_new(keys, number, size)
            for each in keys:
                if slow.find(each) is None:
                    slow.put(each, number, size)
        elif step == "touch":
            assert index.touch(key) == (slow.get(key) is not None)
        elif step == "evict":
            assert index.evict() == slow.evict(key)
        else:
            assert getattr(index, step)(key) == getattr(slow, step)(key)
        assert index.num_bytes == sum(entry[2] for entry in slow.entries)
        assert len(index) == len(slow.entries)
        assert index.num_evicted == slow.num_evicted
        assert all((k in index) == (slow.find(k) is not None) for k in map(bytes, zip(range(6))))


def test_capacity_is_checked():
    with pytest.raises(ValueError, match="capacity_bytes"):
        LRUIndex(-1)
