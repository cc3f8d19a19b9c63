"""Poison mode and snapshots together: what a load brings back is known to be written."""

import numpy as np
import pytest

from kvpool import KVCacheCorruptionError, KVCachePool
from kvpool.owners import PageState
from tests.helpers.poison import poison_pages

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
