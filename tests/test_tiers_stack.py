"""The stack of tiers: the leading run, verified; what is promoted, what is not written twice."""

import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool import KVCacheLayout
from kvpool.dtypes import KVDType
from kvpool.page_keys import PageKeys
from kvpool.snapshot.fingerprint import Fingerprint
from kvpool.tiers.arena import StagingArena
from kvpool.tiers.breaker import CircuitBreaker
from kvpool.tiers.lane import Lane
from kvpool.tiers.records import PageRecords
from kvpool.tiers.stack import TierStack, runs_of
from tests.helpers.tiers import FAULTS, Faulty, Gated, MemoryTier, opened

PAGE = 4
FINGERPRINT = Fingerprint.of("m", KVCacheLayout(1, 1, 4), PAGE, KVDType.of("float32"), 1.0, 1.0)
KEYS = PageKeys(FINGERPRINT)
RECORDS = PageRecords(FINGERPRINT)
TOKENS = np.arange(10 * PAGE, dtype=np.int32).reshape(10, PAGE)
NAMES = KEYS.of_tokens(TOKENS.ravel(), None)


def records(of=range(10)):
    rows = RECORDS.empty(10)
    RECORDS.kv(rows)[...] = np.arange(1, 11, dtype=np.float32).reshape(10, 1, 1, 1, 1, 1)
    RECORDS.seal(rows, NAMES, TOKENS)
    return {NAMES[i]: rows[i] for i in of}


class Stack:
    """A stack over some tiers, with a list of what it delivered."""

    def __init__(self, *tiers, num_rows=3, timeout_s=20.0):
        arena = StagingArena(2 + 2 * len(tiers), num_rows, RECORDS.record_bytes)
        lanes = [
            Lane(
                tier,
                arena.memory,
                timeout_s=timeout_s,
                max_calls=16,
                breaker=CircuitBreaker(3, 1e-9),
            )
            for tier in tiers
        ]
        self.stack = TierStack(lanes, RECORDS, arena, 100, timeout_s)
        self.delivered = []

    def read(self, num_pages=10):
        def deliver(first, rows):
            assert first == len(self.delivered)
            self.delivered += RECORDS.kv(rows)[:, 0, 0, 0, 0, 0].tolist()
            return True

        found = self.stack.read(NAMES[:num_pages], TOKENS[:num_pages], deliver)
        assert found == len(self.delivered)
        assert self.delivered == list(range(1, found + 1))
        return found

    def settled(self):
        """Counters, once all lanes are idle."""
        deadline = time.monotonic() + 20
        while self.stack.arena.num_free < 2 + 2 * len(self.stack.lanes):
            assert time.monotonic() < deadline
            time.sleep(0.001)
        return self.stack.counters()


@pytest.fixture
def make_stack():
    made = []

    def make(*tiers, **options):
        made.append(Stack(*tiers, **options))
        return made[-1]

    yield make
    for each in made:
        for lane in each.stack.lanes:
            lane.stop()
            assert lane.join(20)


def tier_of(pages, name="memory", **options):
    tier = MemoryTier(name, **options)
    tier.records.update(records(pages))
    return tier


@given(st.lists(st.booleans(), max_size=20))
def test_runs_are_the_stretches_that_are_true(flags):
    found = [False] * len(flags)
    ends = [-1]
    for run in runs_of(np.array(flags, np.bool_)):
        assert run.start > ends[-1]
        ends.append(run.stop)
        found[run] = [True] * (run.stop - run.start)
    assert found == flags


@given(
    first=st.sets(st.integers(0, 9)),
    second=st.sets(st.integers(0, 9)),
    num_rows=st.integers(1, 10),
)
def test_what_is_read_is_the_leading_run_of_the_union(first, second, num_rows):
    upper, lower = tier_of(first, "upper"), tier_of(second, "lower")
    made = Stack(upper, lower, num_rows=num_rows)
    try:
        union = first | second
        expected = next((i for i in range(10) if i not in union), 10)
        assert made.read() == expected
        counters = made.settled()
        # Everything that was used and that the upper tier did not have has come up.
        assert set(upper.records) >= {NAMES[i] for i in range(expected)}
        assert counters[0]["promoted_pages"] == len(set(range(expected)) - first)
        assert set(lower.records) == {NAMES[i] for i in second}
    finally:
        for lane in made.stack.lanes:
            lane.stop()
            lane.join(20)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_tier_that_fails_or_lies_costs_nothing_that_another_has(make_stack, fault):
    liar = Faulty("liar", fault)
    liar.records.update(records())
    made = make_stack(liar, tier_of(range(10), "good"))
    assert made.read() == 10


@pytest.mark.parametrize("fault", FAULTS)
def test_a_tier_that_fails_or_lies_alone_has_nothing(make_stack, fault):
    liar = Faulty("liar", fault)
    if fault != "claims all":
        liar.records.update(records())
    made = make_stack(liar)
    assert made.read() == 0
    counters = made.settled()[0]
    if fault.startswith(("raises", "answers")):
        assert made.stack.lanes[0].stats()["failures"] == 1
    else:
        assert counters["bad_pages"] > 0


def test_a_damaged_record_is_written_again(make_stack):
    tier = Faulty("tier", "one bit")
    tier.records.update(records([0]))
    made = make_stack(tier)
    assert made.read(1) == 0
    tier.fault = ""
    lacks = made.stack.wanting(NAMES[:1])
    assert lacks.tolist() == [[True]], "that it exists is not believed"
    buffer = made.stack.take_buffer()
    buffer.rows[0] = records([0])[NAMES[0]]
    assert made.stack.write(NAMES[:1], buffer, lacks).all()
    buffer.release()
    assert made.stack.wanting(NAMES[:1]).tolist() == [[False]]


def test_a_damaged_record_is_removed(make_stack):
    tier = Faulty("tier", "one bit")
    tier.records.update(records([0]))
    made = make_stack(tier)
    assert made.read(1) == 0
    assert made.stack.wanting(NAMES[:1]).tolist() == [[True]]
    assert not tier.records


def test_a_tier_that_hangs_is_left_and_the_others_are_read(make_stack):
    hanging, good = Gated("hanging"), tier_of(range(10), "good")
    with opened(hanging):
        made = make_stack(hanging, good, timeout_s=0.05)
        assert made.read() == 10
        assert made.stack.lanes[0].stats()["timeouts"] == 1
        assert made.stack.arena.num_free == 5, "it keeps one buffer"


def test_a_tier_that_hangs_behind_another_costs_only_what_the_first_has_not(make_stack):
    hanging, first = Gated("hanging"), tier_of([0, 1, 2, 3, 5], "first")
    with opened(hanging):
        made = make_stack(first, hanging, timeout_s=0.05, num_rows=10)
        assert made.read() == 4


def test_when_all_buffers_hang_the_read_ends(make_stack):
    hanging = Gated("hanging")
    with opened(hanging):
        made = make_stack(hanging, timeout_s=0.02)
        held = [made.stack.arena.take() for _ in range(4)]
        assert made.read() == 0
        for buffer in held:
            buffer.release()


def test_a_reader_that_has_enough_ends_the_read(make_stack):
    made, seen = make_stack(tier_of(range(10)), num_rows=2), []

    def deliver(first, rows):
        seen.append((first, len(rows)))
        return first == 0

    made.stack.read(NAMES, TOKENS, deliver)
    assert seen == [(0, 2), (2, 2)]


def test_only_what_a_tier_lacks_is_written_and_nothing_is_asked_twice(make_stack):
    full, empty = Faulty("full"), Faulty("empty")
    full.records.update(records(range(3)))
    made = make_stack(full, empty)
    lacks = made.stack.wanting(NAMES[:3])
    assert lacks.tolist() == [[False] * 3, [True] * 3]
    buffer = made.stack.take_buffer()
    buffer.rows[:] = [*records(range(3)).values()]
    assert made.stack.write(NAMES[:3], buffer, lacks).tolist() == [True] * 3
    buffer.release()
    assert full.calls == [("exists", 3)]
    assert empty.calls == [("exists", 3), ("write", 3)]
    assert not made.stack.wanting(NAMES[:3]).any()
    assert len(full.calls) + len(empty.calls) == 3, "all is known"


def test_a_page_that_a_tier_lost_is_not_known_any_more(make_stack):
    tier = tier_of([0])
    made = make_stack(tier)
    assert made.read(1) == 1
    tier.records.clear()
    assert not made.stack.wanting(NAMES[:1]).any(), "as far as is known it has it"
    made.delivered.clear()
    assert made.read(1) == 0
    assert made.stack.wanting(NAMES[:1]).all()


def test_a_full_tier_takes_what_it_can(make_stack):
    tier = MemoryTier(max_records=1)
    made = make_stack(tier)
    buffer = made.stack.take_buffer()
    buffer.rows[:] = [*records(range(3)).values()]
    lacks = made.stack.wanting(NAMES[:3])
    assert made.stack.write(NAMES[:3], buffer, lacks).tolist() == [True, False, False]
    buffer.release()
    counters = made.stack.counters()[0]
    assert (counters["written_pages"], counters["unwritten_pages"]) == (1, 2)
    assert made.stack.wanting(NAMES[:3]).tolist() == [[False, True, True]]
