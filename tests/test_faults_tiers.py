"""Injected failures of calls that have to do with tiers; `tests.faults` does it at every point."""

import pytest

from kvpool_ext import faults
from tests.faults import sweep_kind, sweep_tier_calls
from tests.helpers.fault_tier_calls import TIER_CALLS
from tests.helpers.fault_tiers import all_prints, give_all_back, tiered_scene

needs_c_hook = pytest.mark.skipif(not faults.AVAILABLE, reason="not the debug build")


@needs_c_hook
def test_calls_beside_prefetches_without_c_memory_leave_no_trace():
    found = sweep_kind("c-memory", policies=["lru"], calls=set(TIER_CALLS))
    assert found.violations == []
    assert found.raised > 5


# An object that was never finished has a finalizer nonetheless.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("first", [0, 3])
def test_interrupts_between_prefetches_tree_and_free_list_lose_no_page(first):
    names = set(list(TIER_CALLS)[first % 2 :: 2])
    found = sweep_tier_calls("interrupts", ["lru"], 5, names, True)
    assert found.violations == []
    assert found.raised == found.runs > 20


def test_attach_without_enough_threads_leaves_none_behind():
    found = sweep_tier_calls("threads", ["lru"], 1, set(), True)
    assert found.violations == []
    assert found.raised == found.runs == 4  # follower, lane, prefetches, write-back


def test_scenes_with_tiers_are_equal_and_give_all_back():
    at, other = tiered_scene(arrived=True), tiered_scene(arrived=True)
    assert all_prints(at.pool) == all_prints(other.pool)
    assert at.pool.stats()["pages_fetching"] == 6
    assert give_all_back(at) == []


def test_sweep_notices_pages_that_stay_with_a_prefetch():
    at = tiered_scene()
    at.held._fetch.ended = True  # so that nobody would give them back
    at.pool._prefetching._fetches.clear()
    assert "stay with prefetches" in give_all_back(at)[0]
