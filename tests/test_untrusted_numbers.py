"""Numbers of callers: whatever they are, an error that says so, or the truth.

Never an OverflowError, a wrapped or silently clipped number, a crash, or memory of such a size.
"""

import numpy as np
import pytest

from kvpool import KVCacheError
from tests.helpers.untrusted import (
    ANSWERS,
    HUGE,
    NEGATIVE,
    NO_INTEGERS,
    ONE_A_ROW,
    OPTIONAL,
    POOL_CALLS,
    Parts,
    described,
    every,
    scalars,
)

REFUSALS = (TypeError, ValueError, KVCacheError)


def refusal(call, parts, value):
    """The error of a call; complain where it is another than those that are meant."""
    try:
        answer = call(parts, value)
    except REFUSALS as error:
        return error, None
    except MemoryError:
        return MemoryError("no memory"), None
    return None, answer


def figures(pool):
    """Figures but for refused binds, and all bytes."""
    stats = {k: v for k, v in pool.stats().items() if not k.startswith("bind_failures")}
    return stats, pool.key_cache.tobytes()


def is_answer(name, value, answer):
    """Whether a call may have answered: to a huge number of pages or tokens, and the truth."""
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, np.integer)):
        return False
    expected = ANSWERS.get(name)
    if name not in ANSWERS or value < 0:
        return False
    return isinstance(answer, expected) if isinstance(expected, type) else answer == expected


def may_be(name, value, parts):
    """Whether a number is no nonsense to a call, so that its answer proves nothing."""
    if isinstance(value, (list, tuple)):
        return name in ONE_A_ROW
    if value is None:
        return name in OPTIONAL
    if isinstance(value, (bool, np.bool_)):
        return name == "attention qo_indptr"  # NumPy makes integers of a list of both
    if isinstance(value, (int, np.integer)) and name.endswith("priority"):
        return -(2**31) <= value < 2**31
    return (
        name.endswith("lock_ref")
        and type(value) is int
        and value == parts.pool.radix.match_prefix([]).node
    )


@pytest.mark.parametrize("name", POOL_CALLS)
def test_a_number_that_cannot_be_is_refused(make_pool, name):
    call, _, _ = POOL_CALLS[name]
    parts = Parts(make_pool)
    before = figures(parts.pool)
    wrong = []
    for value in (*every((*NEGATIVE, *HUGE)), *NO_INTEGERS):
        if may_be(name, value, parts):
            continue
        error, answer = refusal(call, parts, value)
        if error is None:
            if not is_answer(name, value, answer):
                wrong.append((described(value), answer))
            parts = Parts(make_pool)
            before = figures(parts.pool)
            continue
        if len(str(error)) > 1000:
            wrong.append((described(value), f"a message of {len(str(error))} characters"))
        if figures(parts.pool) != before:
            wrong.append((described(value), f"{error!r}, and something changed"))
    assert wrong == []


@pytest.mark.parametrize("name", [name for name, row in POOL_CALLS.items() if row[1] is not None])
def test_numpy_integers_of_every_width_are_integers(make_pool, name):
    call, good, zero_too = POOL_CALLS[name]
    for value in (good, 0) if zero_too else (good,):
        expected = None
        for number in (value, *scalars(value)):
            if name == "attention qo_indptr" and isinstance(number, np.uint64):
                continue  # NumPy makes floats of a list of it and an int
            parts = Parts(make_pool)
            call(parts, number)
            found = figures(parts.pool)
            expected = found if expected is None else expected
            assert found == expected, described(number)


@pytest.mark.parametrize(
    "name", [name for name, row in POOL_CALLS.items() if row[1] is not None and row[2] is False]
)
def test_zero_where_it_is_no_number_is_refused_or_does_nothing(make_pool, name):
    parts = Parts(make_pool)
    before = figures(parts.pool)
    error, _ = refusal(POOL_CALLS[name][0], parts, 0)
    if error is not None:
        assert figures(parts.pool) == before
