"""Tiers that raise, lie, hang, are slow or full: costs hits, never correctness or progress."""

import threading
import time

import numpy as np
import pytest

from kvpool.tiers.file import FileTier
from tests.helpers.pools import R
from tests.helpers.tiers import (
    FAULTS,
    MODEL,
    Faulty,
    Gated,
    MemoryTier,
    all_given_back,
    attach,
    expected_prints,
    fill_tiers,
    matches,
    opened,
    serve_prints,
    tier_pool,
)

PROMPT = R(1, 41)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_tier_that_fails_or_lies_gives_misses_and_right_answers(make_pool, fault):
    tier = Faulty()
    fill_tiers(make_pool, [PROMPT], tier)
    tier.fault = fault
    if fault == "claims all":
        tier.records.clear()
    pool = tier_pool(make_pool)
    attach(pool, tier)
    found = pool.prefetch(PROMPT).wait(20)
    assert found == 0
    answer, matched = serve_prints(pool, PROMPT)
    assert matched == 0
    assert (answer == expected_prints(PROMPT)).all()
    pool.tiers.flush(20)
    all_given_back(pool)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_good_tier_below_makes_up_for_it_and_the_bad_one_recovers(make_pool, fault):
    upper, lower = Faulty("upper"), MemoryTier("lower")
    fill_tiers(make_pool, [PROMPT], upper, lower)
    upper.fault = fault
    pool = tier_pool(make_pool)
    attach(pool, upper, lower)
    assert pool.prefetch(PROMPT).wait(20) == 40
    assert matches(pool, PROMPT) == 40
    assert pool.tiers.flush(20), "what comes up again is written by then"
    pool.close()
    upper.fault = ""
    # What had been damaged was brought up again, or was sound all the time.
    deadline = time.monotonic() + 20
    found = 0
    while found < 40 and time.monotonic() < deadline:
        pool = tier_pool(make_pool)
        attach(pool, upper, write="none")
        found = pool.prefetch(PROMPT).wait(20)
        assert matches(pool, PROMPT) == found
        pool.close()
    assert found == 40


def test_stale_records_of_another_model_are_misses(make_pool):
    """A store that mixes up models gives K and V that are whole, and of no use."""
    tier = MemoryTier()
    fill_tiers(make_pool, [PROMPT], tier, model="weights-0")
    others = list(tier.records.values())
    tier.records.clear()
    fill_tiers(make_pool, [PROMPT], tier)
    for key, other in zip(tier.records, others, strict=True):
        tier.records[key] = other
    pool = tier_pool(make_pool)
    attach(pool, tier)
    assert pool.prefetch(PROMPT).wait(20) == 0


def test_a_tier_that_recovers_is_asked_again(make_pool):
    tier = Faulty("tier", "raises")
    fill_tiers(make_pool, [], tier)
    pool = tier_pool(make_pool)
    attached = attach(pool, tier, write="none", max_failures=1, retry_s=0.001)
    assert pool.prefetch(PROMPT).wait(20) == 0
    assert attached.stats_by_tier()["tier"]["opened"] == 1
    tier.fault = ""
    other = MemoryTier()
    fill_tiers(make_pool, [PROMPT], other)
    tier.records = other.records
    deadline = time.monotonic() + 20
    while pool.prefetch(PROMPT).wait(20) == 0:
        assert time.monotonic() < deadline
        time.sleep(0.002)
    assert matches(pool, PROMPT) == 40


@pytest.mark.parametrize("verbs", [["read"], ["write"], ["exists"], ["read", "write", "exists"]])
def test_while_a_tier_hangs_everything_goes_on(make_pool, verbs):
    hanging = Gated(verbs=verbs)
    good = MemoryTier("good")
    fill_tiers(make_pool, [PROMPT], good)
    hanging.records = {}
    with opened(hanging):
        pool = tier_pool(make_pool)
        attached = attach(pool, hanging, good, timeout_s=0.05, retry_s=3600.0)
        assert pool.prefetch(PROMPT).wait(20) == 40
        for i in range(5):
            prompt = R(100 * i, 100 * i + 30)
            found, _ = serve_prints(pool, prompt)
            assert (found == expected_prints(prompt)).all()
            pool.check()
        assert matches(pool, PROMPT) in (0, 40)
        assert attached.flush(20)
        assert len(good.records) >= 10 + 5 * 7
        assert attached.stats_by_tier()["gated"]["timeouts"] == 1
        all_given_back(pool)


class SlowRegister(MemoryTier):
    def register(self, buffer):
        raise OSError("cannot pin")


def test_a_tier_that_cannot_register_is_never_used(make_pool):
    pool, tier = tier_pool(make_pool), SlowRegister()
    attached = attach(pool, tier)
    assert pool.prefetch(PROMPT).wait(20) == 0
    serve_prints(pool, PROMPT)
    assert attached.flush(20)
    assert not tier.records


def test_a_late_write_into_an_old_buffer_harms_nobody(make_pool):
    """A read that was given up on comes back, and fills its rows while others are verified."""
    late, good = Gated("late"), MemoryTier("good")
    fill_tiers(make_pool, [PROMPT, R(101, 141)], good)
    late.records = {key: np.full_like(record, 0x5A) for key, record in good.records.items()}
    with opened(late):
        pool = tier_pool(make_pool, 128)
        attach(pool, late, good, timeout_s=0.02)
        first = pool.prefetch(PROMPT)
        first.wait(20)
        late.open()
        second = pool.prefetch(R(101, 141))
        assert (first.wait(20), second.wait(20)) == (40, 40)
        assert matches(pool, PROMPT) == 40
        assert matches(pool, R(101, 141)) == 40


def test_pools_in_threads_share_one_tier(make_pool):
    tier, errors = MemoryTier(), []
    pools = [tier_pool(make_pool) for _ in range(3)]
    for pool in pools:
        attach(pool, tier)

    def serve(pool, seed):
        try:
            rng = np.random.default_rng(seed)
            for _ in range(40):
                prompt = [*R(1, 4 * int(rng.integers(1, 9))), *rng.integers(0, 3, 5).tolist()]
                pool.prefetch(prompt).wait(20 if rng.random() < 0.5 else 0)
                found, _ = serve_prints(pool, prompt)
                assert (found == expected_prints(prompt)).all()
            pool.check()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=serve, args=(pool, i)) for i, pool in enumerate(pools)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert not errors, errors
    assert sum(pool.tiers.stats()["prefetch_published_pages"] for pool in pools) > 0
    for pool in pools:
        pool.tiers.flush(20)
        pool.poll_tiers()


def test_stats_may_be_read_from_any_thread_meanwhile(make_pool):
    tier = MemoryTier()
    fill_tiers(make_pool, [PROMPT], tier)
    pool = tier_pool(make_pool)
    attached = attach(pool, tier)
    stop, found = threading.Event(), []

    def read():
        while not stop.is_set():
            stats = pool.stats()
            parts = ("free", "private", "tree", "taken")
            found.append(sum(stats[f"pages_{part}"] for part in parts) == pool.num_pages)
            found.append(stats["pages_fetching"] <= stats["pages_taken"])
            attached.stats()
            attached.stats_by_tier()

    thread = threading.Thread(target=read)
    thread.start()
    for i in range(60):
        prefetch = pool.prefetch([*PROMPT[:36], i])
        if i % 3 == 0:
            prefetch.cancel()
        serve_prints(pool, [*PROMPT[:36], i])
        if i % 10 == 9:
            pool.reset_prefix_cache()
            attached.resume()
    stop.set()
    thread.join(20)
    assert found
    assert all(found)


def test_a_directory_that_loses_its_files_is_a_miss(make_pool, tmp_path):
    tier = FileTier(tmp_path, 1 << 20)
    fill_tiers(make_pool, [PROMPT], tier)
    for i, path in enumerate(sorted(p for p in tmp_path.rglob("*") if p.is_file())):
        if i % 2:
            path.write_bytes(b"")
    pool = tier_pool(make_pool)
    attach(pool, tier)
    found = pool.prefetch(PROMPT).wait(20)
    assert matches(pool, PROMPT) == found < 40
    serve_prints(pool, PROMPT)
    assert pool.tiers.flush(20)
    other = tier_pool(make_pool)
    attach(other, tier, model=MODEL)
    again = other.prefetch(PROMPT).wait(20)
    assert matches(other, PROMPT) == again >= found
    tier.close()
    # Closed under the pool: an error a call, and no more.
    assert other.prefetch([*PROMPT[:4], 9, 9, 9, 9, 9]).wait(20) == 4
