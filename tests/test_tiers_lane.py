"""A lane: answers, time-outs, buffers of calls that hang, order, and the end."""

import threading
import time

import numpy as np
import pytest

from kvpool.tiers.arena import StagingArena
from kvpool.tiers.breaker import CircuitBreaker
from kvpool.tiers.calls import TierCall
from kvpool.tiers.lane import Lane
from tests.helpers.tiers import Faulty, Gated, MemoryTier

KEYS = [bytes([i]) * 32 for i in range(8)]
RECORD = 64


@pytest.fixture
def arena():
    return StagingArena(3, 8, RECORD)


@pytest.fixture
def make_lane(arena):
    lanes = []

    def make(tier, timeout_s=20.0, max_calls=8, max_failures=3, retry_s=3600.0):
        breaker = CircuitBreaker(max_failures, retry_s)
        lane = Lane(tier, arena.memory, timeout_s=timeout_s, max_calls=max_calls, breaker=breaker)
        lanes.append(lane)
        return lane

    yield make
    for lane in lanes:
        lane.stop()
        if isinstance(lane.tier, Gated):
            lane.tier.open()
        assert lane.join(20)


def write(lane, arena, keys=KEYS):
    buffer = arena.take()
    buffer.rows[: len(keys)] = np.arange(len(keys))[:, None]
    try:
        return lane.ask(TierCall("write", keys, buffer.rows[: len(keys)], buffer))
    finally:
        buffer.release()


def test_a_lane_answers_what_the_tier_says(make_lane, arena):
    tier = MemoryTier()
    lane = make_lane(tier)
    assert write(lane, arena) == [True] * 8
    assert lane.ask(TierCall("exists", [KEYS[3], b"?" * 32])) == [True, False]
    buffer = arena.take()
    assert lane.ask(TierCall("read", KEYS, buffer.rows, buffer)) == [True] * 8
    assert (buffer.rows == np.arange(8)[:, None]).all()
    assert not buffer.is_shared
    assert lane.ask(TierCall("stats")) == {"records": 8}
    assert lane.ask(TierCall("remove", [KEYS[3], b"?" * 32])) == [True, False]
    assert lane.stats()["calls"] == 5
    assert tier.registered == 1


def test_an_error_is_no_answer_and_said(make_lane):
    lane = make_lane(Faulty(fault="raises"), max_failures=2)
    assert lane.ask(TierCall("exists", KEYS)) is None
    assert lane.last_error == "exists: OSError: no route"
    assert lane.stats()["is_open"] == 0
    assert lane.ask(TierCall("exists", KEYS)) is None
    stats = lane.stats()
    assert (stats["failures"], stats["opened"], stats["is_open"]) == (2, 1, 1)
    assert lane.ask(TierCall("exists", KEYS)) is None
    assert lane.stats()["refused"] == 1


@pytest.mark.parametrize("fault", ["answers nothing", "answers too few", "raises system exit"])
def test_no_answer_at_all_is_a_failure(make_lane, arena, fault):
    lane = make_lane(Faulty(fault=fault))
    buffer = arena.take()
    assert lane.ask(TierCall("read", KEYS, buffer.rows, buffer)) is None
    assert lane.stats()["failures"] == 1
    assert lane.ask(TierCall("exists", KEYS)) == [False] * 8, "the thread lives on"


def test_a_register_that_fails_is_tried_again(make_lane, monkeypatch):
    tier, failing = MemoryTier(), [True]

    def register(buffer):
        if failing:
            raise OSError("no memory can be pinned")

    monkeypatch.setattr(tier, "register", register)
    lane = make_lane(tier)
    assert lane.ask(TierCall("exists", KEYS)) is None
    failing.clear()
    assert lane.ask(TierCall("exists", KEYS)) == [False] * 8


def test_a_call_that_hangs_keeps_its_buffer_and_shuts_the_lane(make_lane, arena):
    tier = Gated(verbs=["read"])
    lane = make_lane(tier, timeout_s=0.05, retry_s=1e-9)
    buffer = arena.take()
    assert lane.ask(TierCall("read", KEYS, buffer.rows, buffer)) is None
    assert buffer.is_shared, "the tier may still write to it"
    buffer.release()
    assert arena.num_free == 2
    # The pause is over at once, but the call has not come back.
    started = time.monotonic()
    assert lane.ask(TierCall("exists", KEYS)) is None
    assert time.monotonic() - started < 10
    stats = lane.stats()
    assert (stats["timeouts"], stats["refused"], stats["opened"]) == (1, 1, 1)
    tier.open()
    assert arena.take(20) is not None
    assert arena.take(20) is not None
    assert arena.take(20) is not None, "all three are back"
    deadline = time.monotonic() + 20
    while lane.ask(TierCall("exists", KEYS)) is None:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    assert lane.stats()["late_returns"] == 1


def test_a_call_that_nobody_waits_for_is_let_go_of_too(make_lane, arena):
    tier = Gated(verbs=["write"])
    lane = make_lane(tier, timeout_s=0.05)
    ended = []
    buffer = arena.take()
    call = TierCall("write", KEYS, buffer.rows, buffer, ended.append)
    assert lane.send(call)
    assert tier.entered.acquire(timeout=20)
    buffer.release()
    # Waits for its turn behind the one that hangs, and is answered as soon as that is abandoned.
    assert lane.ask(TierCall("exists", KEYS)) is None
    assert lane.stats()["timeouts"] == 1
    # Only the call that hangs keeps its buffer, and nobody is told of its answer any more.
    assert arena.num_free == 2
    tier.open()
    while lane.stats()["late_returns"] == 0:
        time.sleep(0.001)
    assert ended == []


def test_reads_go_before_writes_and_a_full_queue_refuses(make_lane, arena):
    tier = Gated(verbs=["exists"])
    lane = make_lane(tier, max_calls=3)
    assert lane.send(TierCall("exists", KEYS))
    assert tier.entered.acquire(timeout=20)
    order = []
    buffer = arena.take()
    for verb in ("write", "write", "read"):
        rows = buffer.rows
        assert lane.send(
            TierCall(verb, KEYS, rows, buffer, lambda _, verb=verb: order.append(verb))
        )
    assert not lane.send(TierCall("exists", KEYS))
    assert lane.stats()["crowded_out"] == 1
    tier.open()
    deadline = time.monotonic() + 20
    while len(order) < 3:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    assert order == ["read", "write", "write"]


def test_stop_answers_everybody_at_once(make_lane, arena):
    tier = Gated(verbs=["read", "exists"])
    lane = make_lane(tier, timeout_s=3600.0)
    answers = []

    def ask(call):
        answers.append(lane.ask(call))

    buffer = arena.take()
    threads = [
        threading.Thread(target=ask, args=[call])
        for call in (TierCall("read", KEYS, buffer.rows, buffer), TierCall("exists", KEYS))
    ]
    threads[0].start()
    assert tier.entered.acquire(timeout=20)
    threads[1].start()
    lane.stop()
    for thread in threads:
        thread.join(20)
    assert answers == [None, None]
    assert not lane.join(0.01), "the tier has not returned"
    assert lane.ask(TierCall("exists", KEYS)) is None
    tier.open()
    assert lane.join(20)
    assert tier.registered == 0


def test_an_arena_lends_aligned_rows_and_waits_for_those_that_come_back(arena):
    buffers = [arena.take() for _ in range(3)]
    assert arena.memory.ctypes.data % 4096 == 0
    assert all(buffer.rows.flags.c_contiguous for buffer in buffers)
    assert arena.take(0.001) is None
    threading.Timer(0.01, buffers[1].release).start()
    assert arena.take(20).rows is buffers[1].rows
