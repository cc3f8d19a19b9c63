"""What `attach_tiers` and `prefetch` refuse, before anything has changed."""

import threading

import pytest

from tests.helpers.tiers import (
    PROMPT,
    MemoryTier,
    all_given_back,
    attach,
    tier_pool,
)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"model": ""}, ValueError, "model is empty: tiers outlive the pool"),
        ({"model": 7}, TypeError, "model must be a str, got int"),
        (
            {"write": "always"},
            ValueError,
            "write must be one of insert, evict, none, got 'always'",
        ),
        ({"queue_pages": 0}, ValueError, "queue_pages must be at least 1, got 0"),
        ({"queue_pages": 1.5}, TypeError, "queue_pages must be an int, got float"),
        ({"timeout_s": 0}, ValueError, "timeout_s must be above 0 and finite, got 0"),
        ({"timeout_s": "1"}, TypeError, "timeout_s must be a number, got str"),
        ({"retry_s": float("inf")}, ValueError, "retry_s must be above 0"),
        ({"staging_bytes": 1000}, ValueError, r"staging_bytes must be at least \d+: 4 buffers"),
    ],
)
def test_a_bad_option_is_refused_before_anything_is_made(make_pool, options, error, message):
    pool = tier_pool(make_pool, 32)
    threads = threading.active_count()
    with pytest.raises(error, match=message):
        attach(pool, MemoryTier(), **options)
    assert pool.tiers is None
    if "staging" not in message:
        assert threading.active_count() == threads


def test_bad_tiers_are_refused(make_pool):
    pool = tier_pool(make_pool, 32)
    with pytest.raises(ValueError, match="tiers is empty"):
        attach(pool)
    with pytest.raises(ValueError, match="distinct names, got 'memory', 'memory'"):
        attach(pool, MemoryTier(), MemoryTier())
    with pytest.raises(TypeError, match="a sequence of them, got one MemoryTier"):
        pool.attach_tiers(MemoryTier(), model="m")
    with pytest.raises(TypeError, match=r"write, remove, register.*dict has not"):
        attach(pool, {})


def test_bad_prompts_are_refused(make_pool, tier):
    pool = tier_pool(make_pool, 32)
    attach(pool, tier)
    with pytest.raises(ValueError, match="the prompt is empty"):
        pool.prefetch([])
    with pytest.raises(TypeError):
        pool.prefetch([1.5])
    with pytest.raises(ValueError, match="int32"):
        pool.prefetch([2**31])
    with pytest.raises(TypeError):
        pool.prefetch(PROMPT, 1.5)
    prefetch = pool.prefetch(PROMPT, publish=False)
    with pytest.raises(TypeError):
        prefetch.publish(1.5)
    with pytest.raises(ValueError, match="at least 0"):
        prefetch.publish(-1)
    prefetch.cancel()
    all_given_back(pool)
