"""Who has each page, at once for all, beside the slow look at each page on its own."""

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvpool.inspect
from kvpool import KVCacheStateError
from kvpool.owners import PageState, page_owners
from kvpool.requests import RequestTable
from tests.helpers.driven import drive, driven
from tests.helpers.pools import R, cache_prompt, case_pool


def owner_in_words(pool, page):
    """State and request of one page, out of the words of `page_owner` and of `nodes()`."""
    words = pool.page_owner(page)
    if words == "free":
        return PageState.FREE, None
    if words == "taken by alloc":
        return PageState.TAKEN, None
    if words.startswith("tree"):
        (view,) = [view for view in pool.radix.nodes() if page in view.pages]
        return PageState.LOCKED if view.lock_ref else PageState.EVICTABLE, None
    return PageState.PRIVATE, int(re.match(r"request (\d+), ", words)[1])


def assert_owners_are_those_of_page_owner(pool):
    owners = pool.page_owners()
    expected = [owner_in_words(pool, page) for page in range(pool.num_pages)]
    assert owners.states.tolist() == [state for state, _ in expected]
    assert owners.request_ids.tolist() == [request_id or 0 for _, request_id in expected]


@settings(max_examples=15)
@given(seed=st.integers(0, 2**32 - 1), num_calls=st.integers(1, 120))
def test_page_owners_of_a_driven_pool_are_those_of_page_owner(seed, num_calls):
    twin = driven(seed, num_calls)
    assert_owners_are_those_of_page_owner(twin.pool)
    twin.pool.close()


@pytest.mark.parametrize("seed", range(3))
def test_page_owners_after_each_call_agree_with_the_model_and_the_stats(seed):
    for twin in drive(seed, 150, num_pages=60, page_size=1):
        model, owners = twin.model, twin.pool.page_owners()
        held = [len(model.holders.get(page, ())) for page in range(model.num_pages)]
        assert owners.num_holders.tolist() == held
        first = [min(model.holders.get(page, ()), default=0) for page in range(model.num_pages)]
        assert owners.request_ids.tolist() == first
        assert set(np.flatnonzero(owners.states == PageState.FREE).tolist()) == model.free
        assert set(np.flatnonzero(owners.states == PageState.TAKEN).tolist()) == model.taken
        counts = kvpool.inspect.page_map(twin.pool).counts()
        assert counts.pop("pages_locked") == model.tree.protected
        assert counts.items() <= twin.pool.stats().items()
    twin.pool.close()


def test_page_owners_of_a_fork_name_the_first_holder(make_pool):
    pool = case_pool(make_pool, 2, 8)
    first = pool.bind_request(R(1, 4), 4)
    pool.mark_written(first, 4)
    second = pool.fork_request(first, 6)
    owners = pool.page_owners()
    shared = pool.request(first).page_ids
    assert owners.request_ids[shared].tolist() == [first, first]
    assert owners.num_holders[shared].tolist() == [2, 2]
    assert owners.request_ids[pool.request(second).page_ids[2]] == second


def test_page_owners_are_a_copy_and_of_an_empty_pool_all_free(make_pool):
    pool = case_pool(make_pool, 2, 5)
    owners = pool.page_owners()
    assert owners.counts() == {state: 5 * (state == PageState.FREE) for state in PageState}
    cache_prompt(pool, R(1, 4))
    assert owners.counts()[PageState.FREE] == 5
    assert page_owners(RequestTable(0, 1, 1).ledger).states.size == 0


def test_page_owners_of_a_closed_pool_raises(make_pool):
    pool = case_pool(make_pool, 2, 5)
    pool.close()
    with pytest.raises(KVCacheStateError, match="closed"):
        pool.page_owners()
    with pytest.raises(KVCacheStateError, match="closed"):
        kvpool.inspect.page_map(pool)


def test_page_owners_of_a_ledger_out_of_sync_names_the_page():
    table = RequestTable(4, 1, 1)
    table.bind([1, 2], 2, None, 0, True)
    table.ledger.leases.clear()
    with pytest.raises(RuntimeError, match="page 0 has no owner"):
        page_owners(table.ledger)
