"""Poison mode and snapshots together: what a load brings back is known to be written."""

import os

import numpy as np
import pytest

from kvpool import KVCacheCorruptionError, KVCachePool
from kvpool.owners import PageState
from tests.helpers.poison import poison_pages
from tests.helpers.pools import R, assert_ledger, cache_prompt, case_pool

PAGE_SIZE, NUM_PAGES = 4, 8


@pytest.fixture
def saved(make_pool, tmp_path):
    """The path of a snapshot of one cached prompt of two pages, and its tokens."""
    pool = make_pool(2, NUM_PAGES * PAGE_SIZE, 1, 4, page_size=PAGE_SIZE, poison=True)
    tokens = list(range(10))
    request = pool.bind_request(tokens, 12)
    step = pool.activate_step(request)
    rows = np.arange(10 * 4, dtype=np.float32).reshape(1, 10, 1, 4)
    for layer in range(2):
        step.put(layer, 0, rows + layer, -rows)
    pool.finish_request(request, tokens)
    path = tmp_path / "cache"
    pool.save(path)
    return path, tokens


def test_load_into_a_poisoned_pool_poisons_all_other_pages(saved, make_pool):
    path, tokens = saved
    pool = make_pool.keep(KVCachePool.load(path, poison=True))
    assert len(poison_pages(pool)) == NUM_PAGES - 2
    request = pool.bind_request(tokens, 12)
    assert pool.matched_prefix_len(request) == 8
    k, v = pool.activate_step(request).get(1, 8)
    assert k.ravel().tolist() == list(range(1, 33))
    assert v.ravel().tolist() == [-x for x in range(32)]


def test_loaded_page_that_changes_is_found_at_the_next_hit(saved):
    path, tokens = saved
    pool = KVCachePool.load(path, poison=True)
    cached = int(np.flatnonzero(pool.page_owners().states == PageState.EVICTABLE)[0])
    pool.key_cache[1, cached * PAGE_SIZE] += 1
    with pytest.raises(KVCacheCorruptionError, match="changed since it was cached"):
        pool.bind_request(tokens, 12)
    assert pool.bound_request_count == 0


@pytest.mark.parametrize("page", [0, 2])
def test_save_compares_before_it_vouches_for_a_page(make_pool, tmp_path, page):
    pool = case_pool(make_pool, 4, 8, poison=True)
    cache_prompt(pool, R(1, 12))
    path = tmp_path / "cache"
    pool.save(path)
    before = path.read_bytes()
    damaged = int(pool.radix.match_prefix(R(1, 12)).pages[page])
    pool.value_cache[1, 4 * damaged + 3] = 99
    words = f"a save met page {damaged}, which changed since it was cached"
    with pytest.raises(KVCacheCorruptionError, match=words) as caught:
        pool.save(path)
    assert caught.value.page == damaged
    assert os.listdir(tmp_path) == ["cache"]
    assert path.read_bytes() == before
    pool.reset_prefix_cache()
    assert pool.save(path).pages == 0
    assert_ledger(pool)


def test_save_does_not_ask_for_pages_that_it_does_not_write(make_pool, tmp_path):
    """Pages that a reset detached, and those that a request writes, are nobody's to vouch for."""
    pool = case_pool(make_pool, 4, 8, poison=True)
    cache_prompt(pool, R(1, 4))
    held = pool.bind_request(R(1, 8), 8)
    page = int(pool.request(held).page_ids[0])
    pool.reset_prefix_cache()
    pool.key_cache[0, 4 * page] = 99
    assert pool.save(tmp_path / "cache").pages == 0
    pool.unbind_request(held)
