"""What raw pages, the tree and a closed pool refuse, and that nothing changes by it."""

import numpy as np
import pytest

from kvpool import (
    KVCacheExhaustedError,
    KVCacheLayout,
    KVCachePool,
    KVCacheStateError,
    PageAllocator,
    RadixCache,
)
from tests.helpers.pools import (
    R,
    cache_prompt,
    case_pool,
    slots,
    slots_of_pages,
    unchanged,
    window,
    write,
)


@pytest.mark.parametrize("num_tokens", [0, -1])
def test_alloc_of_nothing_raises(make_pool, num_tokens):
    pool = case_pool(make_pool, 4, 4)
    with unchanged(pool), pytest.raises(ValueError, match=str(num_tokens)):
        pool.alloc(num_tokens)


def test_alloc_past_free_and_evictable_pages_raises(make_pool):
    pool = case_pool(make_pool, 4, 4)
    cache_prompt(pool, R(1, 4))
    a = pool.bind_request(R(50, 53), 8)
    with unchanged(pool, a), pytest.raises(KVCacheExhaustedError) as caught:
        pool.alloc(9)  # three pages; one free, one evictable
    error = caught.value
    assert (error.needed_pages, error.free_pages, error.evictable_pages) == (3, 1, 1)
    assert error.can_ever_fit
    with unchanged(pool, a), pytest.raises(KVCacheExhaustedError) as caught:
        pool.alloc(17)
    assert not caught.value.can_ever_fit


def test_free_of_pages_not_taken_names_page_and_owner(make_pool):
    pool = case_pool(make_pool, 4, 8)
    cache_prompt(pool, R(1, 4))
    a = pool.bind_request(R(50, 53), 4)
    taken = pool.alloc(4)
    in_tree = int(pool.radix.match_prefix(R(1, 4)).pages[0])
    owned = int(pool.request(a).page_ids[0])
    free = next(p for p in range(8) if "free" in pool.page_owner(p))
    for page, owner in ((in_tree, "tree"), (owned, "request"), (free, "free")):
        foreign = slots_of_pages(pool, [page])
        with unchanged(pool, a), pytest.raises(ValueError, match=rf"\b{page}\b.*{owner}"):
            pool.free(foreign)
        with unchanged(pool, a), pytest.raises(ValueError, match=rf"\b{page}\b.*{owner}"):
            pool.free(np.concatenate([taken, foreign]))  # the good page stays taken
    with unchanged(pool, a), pytest.raises(ValueError, match="32"):
        pool.free(slots_of_pages(pool, [8]))  # the scratch page
    pool.free(taken)


def test_free_of_parts_and_repeats_raises(make_pool):
    pool = case_pool(make_pool, 4, 4)
    taken = pool.alloc(8)
    for bad in (
        taken[:3],  # not a whole page
        taken[1:5],
        np.concatenate([taken, taken[:4]]),  # one page twice
        np.array([-4, -3, -2, -1]),
        np.array([16, 17, 18, 19]),  # num_slots is 16
        np.array([10**6]),
    ):
        with unchanged(pool), pytest.raises(ValueError, match=r"\d"):
            pool.free(bad)
    with unchanged(pool), pytest.raises((TypeError, ValueError)):
        pool.free(taken.astype(np.float32))
    pool.free(taken)
    assert pool.free_pages == 4


def test_radix_insert_of_pages_not_taken_raises(make_pool):
    pool = case_pool(make_pool, 4, 8)
    cache_prompt(pool, R(1, 4))
    a = pool.bind_request(R(50, 53), 4)
    taken = int(pool.alloc(4)[0]) // 4
    in_tree = int(pool.radix.match_prefix(R(1, 4)).pages[0])
    owned = int(pool.request(a).page_ids[0])
    free = next(p for p in range(8) if "free" in pool.page_owner(p))
    for page in (in_tree, owned, free, 8, -1, 10**6):
        with unchanged(pool, a), pytest.raises(ValueError, match=str(page)):
            pool.radix.insert(R(70, 73), [page])
        with unchanged(pool, a), pytest.raises(ValueError, match=str(page)):
            pool.radix.insert(R(70, 77), [taken, page])
    with unchanged(pool, a), pytest.raises(ValueError, match=str(taken)):
        pool.radix.insert(R(70, 77), [taken, taken])
    pool.free(slots_of_pages(pool, [taken]))


def test_page_allocator_with_bad_pages_raises():
    with pytest.raises(ValueError, match="-1"):
        PageAllocator(-1)
    ledger = PageAllocator(4)
    pages = ledger.take(3)
    assert ledger.take(2) is None  # one is left: all or nothing
    assert ledger.num_free == 1
    free = next(page for page in range(4) if ledger.is_free(page))
    for bad in ([free], [-1], [4], [int(pages[0]), int(pages[0])], [int(pages[0]), free]):
        with pytest.raises(ValueError, match=str(bad[-1])):
            ledger.give(bad)
        assert ledger.num_free == 1
        assert not ledger.is_free(int(pages[0]))
    with pytest.raises(ValueError, match="-1"):
        ledger.take(-1)
    ledger.give(pages)
    assert ledger.num_free == 4
    ledger.check()


def test_radix_cache_with_stale_or_unbalanced_handles_raises():
    tree = RadixCache(page_size=4)
    node = tree.insert(R(1, 8), [0, 1]).node
    with pytest.raises(ValueError, match=r"."):
        tree.dec_lock_ref(node)  # below zero
    tree.inc_lock_ref(node)
    assert (tree.evictable_size, tree.protected_size) == (0, 8)
    tree.dec_lock_ref(node)
    with pytest.raises(ValueError, match=r"."):
        tree.dec_lock_ref(node)
    assert tree.evict(8).tolist() == [1, 0]  # tail first
    for call in (tree.inc_lock_ref, tree.dec_lock_ref):
        with pytest.raises(ValueError, match=r"."):
            call(node)
    tree.insert(R(50, 57), [0, 1])  # a new node in the old one's place is not the old one
    for call in (tree.inc_lock_ref, tree.dec_lock_ref):
        with pytest.raises(ValueError, match=r"."):
            call(node)
    assert (tree.evictable_size, tree.protected_size) == (8, 0)
    root = tree.match_prefix([77]).node
    tree.inc_lock_ref(root)  # a no-op
    tree.dec_lock_ref(root)
    tree.check()


def test_radix_cache_with_bad_arguments_raises():
    for arguments in ({"page_size": 0}, {"page_size": -1}, {"eviction": "coin"}):
        with pytest.raises(ValueError, match=str(next(iter(arguments.values())))):
            RadixCache(**arguments)
    tree = RadixCache(page_size=4)
    with pytest.raises(ValueError, match=r"2.*1|1.*2"):
        tree.insert(R(1, 8), [0])  # two whole pages, one id
    with pytest.raises(ValueError, match="-1"):
        tree.insert(R(1, 4), [-1])
    for tokens, error in (([1.5], TypeError), ([True], TypeError), ([2**31], ValueError)):
        with pytest.raises(error):
            tree.insert(tokens, [])
        with pytest.raises(error):
            tree.match_prefix(tokens)
    with pytest.raises(TypeError):
        tree.match_prefix(R(1, 4), 1.5)
    with pytest.raises(ValueError, match="-1"):
        tree.evict(-1)
    assert (tree.total_size, tree.num_nodes) == (0, 0)
    tree.check()


def test_closed_pool_refuses_every_method():
    pool = KVCachePool(2, 32, 2, 8, page_size=4)
    a = pool.bind_request(R(1, 4), 8)
    step = write(pool, a, 0, 4)
    taken = pool.alloc(4)
    own = np.array(slots(pool, a, 4))
    k, v = window(pool, 0, 1, 100)
    pool.close()
    pool.close()  # idempotent
    for call in (
        lambda: pool.bind_request(R(1, 4), 8),
        lambda: pool.bind_with_prefix(R(1, 4), 8),
        lambda: pool.bind_requests(1, 4),
        lambda: pool.would_fit(R(1, 4), 8),
        lambda: pool.extend_request(a, 12),
        lambda: pool.shrink_request(a, 4),
        lambda: pool.fork_request(a, 8),
        lambda: pool.checkpoint_request(a, R(1, 4)),
        lambda: pool.mark_written(a, 8),
        lambda: pool.finish_request(a, R(1, 4)),
        lambda: pool.finish_active(R(1, 4)),
        lambda: pool.unbind_request(a),
        lambda: pool.unbind_requests(),
        lambda: pool.activate_step(a),
        lambda: pool.step,
        lambda: pool.alloc(4),
        lambda: pool.free(taken),
        lambda: pool.reset_prefix_cache(),
        lambda: pool.key_layer(0),
        lambda: pool.value_layer(0),
        lambda: pool.key_cache,
        lambda: pool.value_cache,
        lambda: step.put(0, 0, k, v),
        lambda: step.get(0, 1),
        lambda: step.slot_indices(1),
        lambda: step.window_slot_indices(0, 1),
        lambda: step.page_table(1),
        lambda: step.build_page_table(1),
        lambda: step.seal_length(1),
        lambda: step.invalidate_range(0, 1),
        lambda: step.truncate_to(0, 1),
        lambda: step.require(1),
    ):
        with pytest.raises(KVCacheStateError, match="closed"):
            call()
    assert len(own) == 4


def test_with_block_closes_the_pool():
    with KVCachePool(2, 32, 2, 8, page_size=4) as pool:
        a = pool.bind_request(R(1, 4), 8)
    with pytest.raises(KVCacheStateError, match="closed"):
        pool.unbind_request(a)


def test_layer_views_of_layers_out_of_range_raise(make_pool):
    pool = case_pool(make_pool, 4, 4)
    for layer in (-1, 2):
        with pytest.raises(ValueError, match=str(layer)):
            pool.key_layer(layer)
        with pytest.raises(ValueError, match=str(layer)):
            pool.value_layer(layer)


def test_page_owner_of_a_page_out_of_range_raises(make_pool):
    pool = case_pool(make_pool, 4, 4)
    for page in (-1, 5):  # page 4 is the scratch page
        with pytest.raises(ValueError, match=str(page)):
            pool.page_owner(page)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"num_layers": 0}, "0"),
        ({"num_kv_heads": -2}, "-2"),
        ({"head_dim": 0}, "0"),
        ({"max_batch_size": 0}, "0"),
        ({"max_seq_len": -1}, "-1"),
    ],
)
def test_layout_with_bad_sizes_raises(overrides, message):
    with pytest.raises(ValueError, match=message):
        KVCacheLayout(**({"num_layers": 2, "num_kv_heads": 2, "head_dim": 8} | overrides))
