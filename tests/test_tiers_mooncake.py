"""Pools over a real Mooncake Store: shared prefixes, and a master or a lender that goes.

Answers equal those without a tier, the pool's `check()` holds, and nothing hangs.
"""

import contextlib
import time

import pytest

from tests.helpers.mooncake import Lender, Master, skip_without_mooncake
from tests.helpers.pools import R
from tests.helpers.tiers import (
    all_given_back,
    attach,
    expected_prints,
    matches,
    serve_prints,
    tier_pool,
)

skip_without_mooncake()

from kvpool.tiers.mooncake import MooncakeTier  # noqa: E402

pytestmark = pytest.mark.slow
PROMPT = R(1, 41)


@pytest.fixture
def store(tmp_path):
    """A master, and a process that lends memory to the store."""
    with Master(tmp_path) as master, Lender(master, 64 << 20) as lender:
        yield master, lender


@contextlib.contextmanager
def tier_of(master):
    tier = MooncakeTier(master.metadata, master.address, timeout_s=1.0)
    try:
        yield tier
    finally:
        tier.close()


def still_serves(pool):
    """Whatever became of the store: right answers, and a ledger that adds up."""
    for i in range(4):
        prompt = [*PROMPT[:20], *R(100 * i, 100 * i + 20)]
        started = time.monotonic()
        pool.prefetch(prompt).wait(60)
        assert time.monotonic() - started < 30
        found, _ = serve_prints(pool, prompt)
        assert (found == expected_prints(prompt)).all()
        pool.check()
    pool.tiers.flush(30)
    pool.poll_tiers()
    all_given_back(pool)


def test_a_second_pool_gets_the_pages_of_the_first(make_pool, store):
    master, _ = store
    with tier_of(master) as tier:
        first = tier_pool(make_pool)
        attach(first, tier)
        serve_prints(first, PROMPT)
        assert first.tiers.flush(30)
        second = tier_pool(make_pool)
        attach(second, tier)
        assert second.prefetch(PROMPT).wait(30) == 40
        assert matches(second, PROMPT) == 40
        still_serves(second)
        first.close()
        second.close()


@pytest.mark.parametrize("who", ["master", "lender"])
def test_answers_are_right_when_one_is_killed_in_the_middle(make_pool, store, who):
    master, lender = store
    with tier_of(master) as tier:
        pool = tier_pool(make_pool, 256)
        attach(pool, tier, timeout_s=2.0, retry_s=0.1)
        serve_prints(pool, PROMPT)
        assert pool.tiers.flush(30)
        # Reads and writes are under way.
        prefetches = [pool.prefetch([7, *R(100 * i, 100 * i + 40)]) for i in range(3)]
        for i in range(8):
            serve_prints(pool, R(100 * i, 100 * i + 40))
        (master if who == "master" else lender).kill()
        still_serves(pool)
        assert all(prefetch.wait(60) >= 0 for prefetch in prefetches)
        pool.poll_tiers()
        all_given_back(pool)
        pool.close()
