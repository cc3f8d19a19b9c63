"""What the pool refuses, with which numbers, and that a refused call has changed nothing."""

import numpy as np
import pytest

from kvpool import (
    KVCacheExhaustedError,
    KVCachePool,
    KVCacheStateError,
    UnknownRequestError,
)
from tests.helpers.pools import (
    R,
    cache_prompt,
    case_pool,
    slots_of_pages,
    st,
    unchanged,
    write,
)

UNKNOWN = 99


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"num_slots": 30}, "30"),  # not a multiple of the page size 4
        ({"num_slots": 0}, "0"),
        ({"num_slots": -4}, "-4"),
        ({"num_layers": 0}, "0"),
        ({"num_layers": -1}, "-1"),
        ({"num_kv_heads": 0}, "0"),
        ({"head_dim": 0}, "0"),
        ({"head_dim": -8}, "-8"),
        ({"page_size": 0}, "0"),
        ({"page_size": -4}, "-4"),
        ({"max_batch_size": 0}, "0"),
        ({"max_seq_len": 0}, "0"),
        ({"dtype": "int8"}, "int8"),
        ({"dtype": "float64"}, "float64"),
        ({"dtype": "float7"}, "float7"),
        ({"compute_dtype": "float8_e4m3fn"}, "float8_e4m3fn"),
        ({"k_scale": 0.5}, "0.5"),  # a scale needs an FP8 dtype
        ({"v_scale": 2.0}, "2.0"),
        ({"k_scale": [1.0, 0.5]}, "0.5"),
        ({"k_scale": float("nan")}, "nan"),
        ({"k_scale": float("inf")}, "inf"),
        ({"v_scale": 0.0}, "0"),
        ({"v_scale": -1.0}, "-1"),
        ({"k_scale": [1.0, 1.0, 1.0]}, "3"),  # two layers
        ({"k_scale": [1.0, -2.0]}, "-2"),
        ({"device": "tpu"}, "tpu"),
        ({"device": ""}, "device"),
    ],
)
def test_construct_with_bad_argument_raises(overrides, message):
    arguments = {"num_layers": 2, "num_slots": 32, "num_kv_heads": 2, "head_dim": 8}
    arguments |= {"page_size": 4} | overrides
    with pytest.raises(ValueError, match=message):
        KVCachePool(**arguments)


@pytest.mark.parametrize(
    ("tokens", "error"),
    [
        ([True, False], TypeError),
        ([1, True], TypeError),
        ([1.0, 2.0], TypeError),
        ([1, 2.5], TypeError),
        ("abc", TypeError),
        (["a"], TypeError),
        ([None], TypeError),
        (None, TypeError),
        (np.array([1.0, 2.0]), TypeError),
        (np.array([True, False]), TypeError),
        (np.array(["a"]), TypeError),
        ([2**31], ValueError),
        ([-(2**31) - 1], ValueError),
        (np.array([2**31], np.int64), ValueError),
        (np.array([2**31], np.uint32), ValueError),
        (np.array([2**63], np.uint64), ValueError),
        (range(2**31 - 1, 2**31 + 1), ValueError),
        (np.zeros((2, 2), np.int32), ValueError),
        (np.zeros((), np.int32), ValueError),
        ([], ValueError),
        (np.array([], np.int32), ValueError),
    ],
)
def test_bind_with_bad_tokens_changes_nothing(make_pool, tokens, error):
    pool = case_pool(make_pool, 4, 4)
    held = pool.bind_request(R(1, 4), 4)
    for call in (
        lambda: pool.bind_request(tokens, 8),
        lambda: pool.bind_with_prefix(tokens, 8),
        lambda: pool.would_fit(tokens, 8),
    ):
        with unchanged(pool, held), pytest.raises(error):
            call()
    assert pool.is_bound(held)


@pytest.mark.parametrize("key", [1.5, True, (1, 2), [1], object()])
def test_bind_with_extra_key_of_wrong_type_raises(make_pool, key):
    pool = case_pool(make_pool, 4, 4)
    held = pool.bind_request(R(1, 4), 4)
    for bind in (pool.bind_request, pool.bind_with_prefix, pool.would_fit):
        with unchanged(pool, held), pytest.raises(TypeError):
            bind(R(1, 4), 8, extra_key=key)


@pytest.mark.parametrize("priority", [1.5, "high", None, [1]])
def test_bind_with_priority_of_wrong_type_raises(make_pool, priority):
    pool = case_pool(make_pool, 4, 4)
    with unchanged(pool), pytest.raises(TypeError):
        pool.bind_request(R(1, 4), 8, priority=priority)


@pytest.mark.parametrize("capacity", [8.0, "8", None])
def test_bind_with_capacity_of_wrong_type_raises(make_pool, capacity):
    pool = case_pool(make_pool, 4, 4)
    with unchanged(pool), pytest.raises(TypeError):
        pool.bind_request(R(1, 4), capacity)


def test_bind_capacity_below_prompt_names_both(make_pool):
    pool = case_pool(make_pool, 4, 4)
    for bind in (pool.bind_request, pool.bind_with_prefix, pool.would_fit):
        with unchanged(pool), pytest.raises(ValueError, match=r"9.*5|5.*9"):
            bind(R(1, 9), 5)


def test_bind_failing_in_token_conversion_changes_nothing(make_pool):
    pool = case_pool(make_pool, 4, 6)
    cache_prompt(pool, R(1, 8))
    with unchanged(pool), pytest.raises(TypeError):
        pool.bind_request([*R(1, 8), "nine"], 12)


def test_bind_that_can_never_fit_changes_nothing(make_pool):
    pool = case_pool(make_pool, 4, 6)
    cache_prompt(pool, R(1, 8))
    with unchanged(pool), pytest.raises(KVCacheExhaustedError) as caught:
        pool.bind_request(R(1, 9), 28)  # 7 pages of 6, 2 of them matched
    error = caught.value
    assert (error.needed_pages, error.total_pages, error.can_ever_fit) == (5, 6, False)
    assert pool.stats()["bind_failures"] == 1


def test_bind_short_with_a_partial_match_splits_evicts_and_touches_nothing(make_pool):
    pool = case_pool(make_pool, 4, 6)
    cache_prompt(pool, R(1, 8))  # two pages, the oldest
    cache_prompt(pool, R(50, 53))  # one page, newer
    held = pool.bind_request(R(90, 93), 12)  # the other three
    oldest_tail = int(pool.radix.match_prefix(R(1, 8)).pages[1])
    pool.radix.match_prefix(R(50, 53))  # newer again
    assert st(pool) == (0, 12, 12, 0)
    # matches one page of R(1, 8); three more are needed, two are evictable beside it
    prompt = [1, 2, 3, 4, 70, 71]
    assert not pool.would_fit(prompt, 16)
    with unchanged(pool, held), pytest.raises(KVCacheExhaustedError) as caught:
        pool.bind_request(prompt, 16)
    assert (caught.value.needed_pages, caught.value.free_pages) == (3, 0)
    assert caught.value.can_ever_fit
    assert pool.radix.num_nodes == 2  # not split
    # the first to go is still the oldest's tail page: the refused bind was no access
    assert pool.radix.evict(1).tolist() == [oldest_tail]
    pool.free(slots_of_pages(pool, [oldest_tail]))
    assert pool.would_fit(prompt, 12)


def test_exclusive_bind_that_fails_keeps_the_other_bindings(make_pool):
    pool = case_pool(make_pool, 4, 4)
    a = pool.bind_request(R(1, 4), 8)
    step = write(pool, a, 0, 4)
    with unchanged(pool, a), pytest.raises(ValueError, match="17"):
        pool.bind_with_prefix(R(1, 17), 20)  # 16 slots in all
    with unchanged(pool, a), pytest.raises(KVCacheExhaustedError) as caught:
        pool.bind_requests(5, 4)  # five rows, four pages
    assert not caught.value.can_ever_fit
    for batch_size, capacity in ((0, 4), (-1, 4), (1, 0), (1, -4)):
        with unchanged(pool, a), pytest.raises(ValueError, match=r"\d"):
            pool.bind_requests(batch_size, capacity)
    step.require(8)  # the step lives


def test_calls_on_unknown_ids_raise_and_change_nothing(make_pool):
    pool = case_pool(make_pool, 4, 4)
    done = pool.bind_request(R(1, 4), 4)
    pool.unbind_request(done)
    held = pool.bind_request(R(1, 4), 4)
    for request_id in (done, UNKNOWN, 0, -1):
        for call in (
            lambda i=request_id: pool.unbind_request(i),
            lambda i=request_id: pool.finish_request(i, R(1, 4)),
            lambda i=request_id: pool.checkpoint_request(i, R(1, 4)),
            lambda i=request_id: pool.extend_request(i, 8),
            lambda i=request_id: pool.shrink_request(i, 4),
            lambda i=request_id: pool.fork_request(i, 8),
            lambda i=request_id: pool.mark_written(i, 4),
            lambda i=request_id: pool.valid_len(i),
            lambda i=request_id: pool.request(i),
            lambda i=request_id: pool.activate_step(i),
            lambda i=request_id: pool.activate_step(held, i),
        ):
            with unchanged(pool, held), pytest.raises(UnknownRequestError, match=str(request_id)):
                call()
        assert not pool.is_bound(request_id)
        assert pool.matched_prefix_len(request_id) == 0
    with unchanged(pool, held), pytest.raises(ValueError, match=r"."):
        pool.activate_step()


def test_finish_with_tokens_that_contradict_the_prompt_raises(make_pool):
    pool = case_pool(make_pool, 4, 8)
    a = pool.bind_request(R(1, 6), 8)
    write(pool, a, 0, 8)
    wrong = [1, 2, 3, 4, 5, 60, 7, 8]
    for call in (pool.finish_request, pool.checkpoint_request):
        with unchanged(pool, a), pytest.raises(ValueError, match="5"):  # position 5 differs
            call(a, wrong)
    with unchanged(pool, a), pytest.raises(ValueError, match="5"):
        pool.finish_active(wrong)
    with unchanged(pool, a), pytest.raises(TypeError):
        pool.finish_request(a, [1.5])
    assert pool.finish_request(a, R(1, 5)) == 4  # shorter is fine


def test_capacity_changes_that_cannot_be_raise(make_pool):
    pool = case_pool(make_pool, 4, 4)
    a = pool.bind_request(R(1, 6), 8)
    b = pool.bind_request(R(50, 53), 4)
    write(pool, a, 0, 6)
    with unchanged(pool, a, b), pytest.raises(KVCacheExhaustedError) as caught:
        pool.extend_request(a, 16)  # two pages more, one is free
    assert (caught.value.needed_pages, caught.value.free_pages) == (2, 1)
    assert caught.value.can_ever_fit
    with unchanged(pool, a, b), pytest.raises(KVCacheExhaustedError) as caught:
        pool.extend_request(a, 20)
    assert not caught.value.can_ever_fit
    with unchanged(pool, a, b), pytest.raises(KVCacheExhaustedError) as caught:
        pool.fork_request(a, 16)  # shares one page, needs three, one is free
    assert (caught.value.needed_pages, caught.value.free_pages) == (3, 1)
    with unchanged(pool, a, b), pytest.raises(ValueError, match="5"):
        pool.fork_request(a, 5)  # six tokens are written
    with unchanged(pool, a, b), pytest.raises((KVCacheExhaustedError, ValueError), match="8"):
        pool.mark_written(a, 9)  # capacity 8
    with unchanged(pool, a, b), pytest.raises(ValueError, match="-1"):
        pool.mark_written(a, -1)


def test_no_active_step_raises(make_pool):
    pool = case_pool(make_pool, 4, 4)
    with pytest.raises(KVCacheStateError):
        _ = pool.step
    a = pool.bind_request(R(1, 4), 4)
    assert list(pool.step.request_ids) == [a]
    pool.unbind_request(a)
    with pytest.raises(KVCacheStateError):
        _ = pool.step
    assert pool.request_capacity == 0


@pytest.mark.parametrize(
    ("call", "cause"),
    [
        (lambda pool, bound: pool.bind_request(R(50, 53), 28), "no_pages"),  # 7 pages, 6 are free
        (lambda pool, bound: pool.bind_request(R(50, 53), 36), "too_large"),  # 9 pages of 8
        (lambda pool, bound: pool.bind_requests(8, 4), "no_pages"),  # 7 without the taken one
        (lambda pool, bound: pool.bind_requests(9, 4), "too_large"),
        (lambda pool, bound: pool.fork_request(bound, 32), "fork"),  # 8 pages, 1 shared
        (lambda pool, bound: pool.fork_request(bound, 36), "too_large"),
    ],
)
def test_stats_counts_a_failure_once_by_its_cause(call, cause, make_pool):
    pool = case_pool(make_pool, 4, 8)
    pool.alloc(4)
    bound = pool.bind_request(R(1, 4), 4)
    pool.mark_written(bound, 4)
    with pytest.raises(KVCacheExhaustedError):
        call(pool, bound)
    failures = {k: v for k, v in pool.stats().items() if k.startswith("bind_failures")}
    assert failures == {
        "bind_failures": 1,
        "bind_failures_no_pages": cause == "no_pages",
        "bind_failures_too_large": cause == "too_large",
        "bind_failures_fork": cause == "fork",
    }
