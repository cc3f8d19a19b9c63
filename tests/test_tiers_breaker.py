"""The circuit breaker: when a tier that failed is asked again."""

import time

import pytest

from kvpool.tiers.breaker import LONGEST_PAUSE_S, CircuitBreaker


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def test_failures_in_a_row_open_it(clock):
    breaker = CircuitBreaker(3, 1.0, clock)
    for failures in (1, 2):
        assert not breaker.failed()
        assert breaker.allows(), failures
    assert breaker.failed()
    assert (breaker.state, breaker.allows(), breaker.num_opened) == ("open", False, 1)


def test_a_success_forgets_the_failures_before(clock):
    breaker = CircuitBreaker(2, 1.0, clock)
    for _ in range(5):
        assert not breaker.failed()
        breaker.succeeded()
    assert breaker.state == "closed"


def test_one_time_out_opens_it(clock):
    breaker = CircuitBreaker(100, 1.0, clock)
    assert breaker.trip()
    assert not breaker.allows()


def test_half_open_lets_one_try(clock):
    breaker = CircuitBreaker(1, 1.0, clock)
    breaker.failed()
    clock.now += 0.99
    assert not breaker.allows()
    clock.now += 0.02
    assert breaker.allows()
    assert breaker.state == "half-open"
    assert not breaker.allows(), "only one tries"
    breaker.withdraw()
    assert breaker.allows(), "the one before was never made"
    breaker.succeeded()
    assert breaker.state == "closed"
    assert breaker.allows()


def test_each_try_that_fails_waits_twice_as_long(clock):
    breaker = CircuitBreaker(1, 1.0, clock)
    breaker.failed()
    pause = 1.0
    for _ in range(10):
        clock.now += pause - 0.01
        assert not breaker.allows()
        clock.now += 0.02
        assert breaker.allows()
        assert not breaker.failed(), "it was open already"
        pause = min(LONGEST_PAUSE_S, 2 * pause)
    assert breaker.num_opened == 1
    clock.now += LONGEST_PAUSE_S
    assert breaker.allows()
    breaker.succeeded()
    breaker.failed()
    clock.now += 1.01
    assert breaker.allows(), "a success made the pause short again"


def test_a_wall_clock_that_jumps_changes_nothing(monkeypatch):
    breaker = CircuitBreaker(1, 3600.0)
    breaker.failed()
    before = time.time()
    monkeypatch.setattr(time, "time", lambda: before + 1e9)
    assert not breaker.allows()
    monkeypatch.setattr(time, "time", lambda: before - 1e9)
    assert not breaker.allows()
    assert breaker.state == "open"
