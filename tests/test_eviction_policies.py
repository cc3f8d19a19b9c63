"""Choosing a policy: what there is, and what is refused."""

import numpy as np
import pytest

import kvpool
from kvpool import EVICTION_POLICIES, KVCacheLayout, KVCachePool, KVCacheStateError, RadixCache
from kvpool.requests import RequestTable

LAYOUT = KVCacheLayout(1, 1, 1, max_batch_size=1, max_seq_len=8)

MAKERS = {
    "tree": lambda eviction: RadixCache(4, eviction),
    "table": lambda eviction: RequestTable(4, 4, 1, eviction=eviction).ledger.tree,
    "pool": lambda eviction: KVCachePool(1, 16, 1, 1, page_size=4, eviction=eviction),
    "sized pool": lambda eviction: KVCachePool.allocate(
        LAYOUT, "cpu", "float32", 0.9, 4, eviction=eviction
    ),
}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
@pytest.mark.parametrize("eviction", EVICTION_POLICIES)
def test_make_with_each_policy(make, eviction):
    assert make(eviction).eviction == eviction


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_make_with_an_unknown_policy_lists_those_that_there_are(make):
    for unknown in ("coin", "LRU", ""):
        with pytest.raises(ValueError, match="must be one of 'lru', 'fifo', 'lfu', got") as caught:
            make(unknown)
        assert repr(unknown) in str(caught.value)
    for no_name in (None, 1, b"lru", ["lru"], np.array(["lru"])):
        with pytest.raises(TypeError, match="eviction must be a str, got"):
            make(no_name)


def test_policy_is_lru_where_nobody_chooses():
    assert RadixCache().eviction == RequestTable(1, 1, 1).ledger.tree.eviction == "lru"
    with KVCachePool(1, 16, 1, 1) as pool:
        assert pool.eviction == "lru"
    with pytest.raises(KVCacheStateError, match="closed"):
        _ = pool.eviction
    assert kvpool.EVICTION_POLICIES == EVICTION_POLICIES == ("lru", "fifo", "lfu")


def test_unknown_policy_is_refused_before_a_buffer_is_made():
    """1 PiB of them would not be there."""
    with pytest.raises(ValueError, match="coin"):
        KVCachePool(1, 1 << 46, 1, 1, page_size=1 << 20, eviction="coin")
