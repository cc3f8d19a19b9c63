"""What poison mode finds, how it says so, and that what it stops has changed nothing."""

import pickle

import numpy as np
import pytest

from kvpool import KVCacheCorruptionError
from kvpool.attention import PagedAttention, paged_attention
from tests.helpers.poison import poison_pages
from tests.helpers.pools import R, assert_ledger, cache_prompt, case_pool, snapshot, write


@pytest.fixture
def pool(make_pool):
    return case_pool(make_pool, 4, 8, poison=True)


def test_read_through_a_stale_table_names_page_owner_and_position(pool):
    a = pool.bind_request(R(1, 6), 8)
    write(pool, a, 0, 6)
    table = pool.step.build_page_table(6)
    attention = PagedAttention(pool, table)
    q = np.ones((1, 2, 8), np.float32)
    attention.run(0, q)
    page = int(pool.request(a).page_ids[0])
    pool.unbind_request(a)
    words = rf"row 0, position 0 of layer 1 is on page {page}, .* \(owner: free\)"
    with pytest.raises(KVCacheCorruptionError, match=words) as caught:
        attention.run(1, q)
    assert caught.value.page == page
    with pytest.raises(KVCacheCorruptionError, match="freed or never written"):
        paged_attention(q, pool, 0, table)
    assert pickle.loads(pickle.dumps(caught.value)).page == page


def test_read_of_positions_that_were_declared_and_never_written(pool):
    a = pool.bind_request(R(1, 6), 8)
    pool.mark_written(a, 6)
    with pytest.raises(
        KVCacheCorruptionError, match=rf"request {a}, position 0 of layer 1 .* request {a}, pos"
    ):
        pool.step.get(1, 6)
    with pytest.raises(KVCacheCorruptionError, match="position 0 of layer 0 was declared written"):
        pool.fork_request(a, 8)
    assert pool.bound_request_count == 1
    assert_ledger(pool)


def test_put_and_get_with_the_slots_of_another_request(pool):
    a, b = pool.bind_request(R(1, 4), 4), pool.bind_request(R(1, 4), 4)
    theirs = np.arange(4) + 4 * pool.request(a).page_ids[0]
    ones = np.ones((1, 4, 2, 8), np.float32)
    step = pool.activate_step(b)
    for call in (
        lambda: step.put(0, 0, ones, ones, slots=theirs.astype(np.int64)),
        lambda: step.get(0, 4, slots=theirs.astype(np.int64)),
    ):
        with pytest.raises(KVCacheCorruptionError, match=rf"none of theirs \(owner: request {a},"):
            call()
    assert poison_pages(pool) == list(range(8))
    taken = pool.alloc(4)
    step.put(0, 0, ones, ones, slots=taken)  # the caller's own pages, through the same kernel
    assert (step.get(0, 4, slots=taken)[0] == 1).all()
    pool.key_cache[1, taken], pool.value_cache[1, taken] = 1, 1
    pool.radix.insert(R(1, 4), [int(taken[0]) // 4])


def test_page_written_after_it_was_freed_is_found_when_it_is_handed_out(pool):
    a = pool.bind_request(R(1, 6), 8)
    page = int(pool.request(a).page_ids[1])
    slots = pool.step.window_slot_indices(4, 1)
    pool.unbind_request(a)
    pool.value_layer(1)[slots] = 7
    with pytest.raises(KVCacheCorruptionError, match=f"page {page} is free and was written"):
        pool.check()
    with pytest.raises(
        KVCacheCorruptionError, match=f"page {page} was written after it was given back.*request 2"
    ):
        pool.bind_request(R(1, 6), 8)
    assert (pool.bound_request_count, pool.free_pages) == (0, 8)
    assert pool.bind_request(R(1, 6), 8) == 3  # said once: it is poison again
    assert_ledger(pool)


@pytest.mark.parametrize("verb", ["extend", "alloc", "bind_requests", "fork", "bind_with_prefix"])
def test_every_hand_out_looks_and_gives_back_what_it_took(pool, verb):
    a = pool.bind_request(R(1, 4), 4)
    write(pool, a, 0, 4)
    free = [page for page in range(8) if page not in pool.request(a).page_ids]
    pool.key_cache[0, [4 * page for page in free]] = 7
    calls = {
        "extend": lambda: pool.extend_request(a, 12),
        "alloc": lambda: pool.alloc(8),
        "bind_requests": lambda: pool.bind_requests(2, 4),
        "fork": lambda: pool.fork_request(a, 12),
        "bind_with_prefix": lambda: pool.bind_with_prefix(R(1, 4), 12),
    }
    with pytest.raises(KVCacheCorruptionError, match="was written after it was given back"):
        calls[verb]()
    if verb in ("extend", "alloc", "fork"):
        assert (pool.bound_request_count, pool.free_pages) == (1, 7)
        assert pool.request(a).capacity == 4
    pool.unbind_requests()
    with pytest.raises(KVCacheCorruptionError, match="was written"):
        pool.alloc(8 * 4)  # what the call above did not take
    pool.alloc(8 * 4)  # each damage is said once
    assert len(poison_pages(pool)) == 8


def test_exclusive_batch_that_meets_damage_leaves_nothing_bound(pool):
    pool.key_cache[1, 4 * 5] = 7  # a page of the third request
    with pytest.raises(KVCacheCorruptionError, match=r"page 5 was written .* request 3"):
        pool.bind_requests(4, 8)
    assert (pool.bound_request_count, pool.free_pages) == (0, 8)
    assert pool.bind_requests(4, 8) == [5, 6, 7, 8]


def test_hit_of_a_page_that_changed_is_refused_and_undone(pool):
    cache_prompt(pool, R(1, 12))
    found = pool.radix.match_prefix(R(1, 12))
    before = snapshot(pool)
    pool.value_cache[1, 4 * int(found.pages[1]) + 2, 1, 3] += 1
    words = rf"page {found.pages[1]}, which changed since it was cached .*\[4, 8\).*\[5, 6, 7, 8\]"
    with pytest.raises(KVCacheCorruptionError, match=words):
        pool.bind_request(R(1, 12), 16)
    with pytest.raises(KVCacheCorruptionError, match="a bind of request"):
        pool.bind_with_prefix(R(1, 12), 16)
    with pytest.raises(KVCacheCorruptionError, match="match_prefix met page"):
        pool.radix.match_prefix(R(1, 12))
    assert pool.would_fit(R(1, 12), 16)
    assert pool.bound_request_count == 0
    assert pool.radix.protected_size == 0
    assert snapshot(pool)[0] == before[0]
    assert pool.matched_prefix_len(pool.bind_request(R(1, 5), 8)) == 4  # the page before is fine
    with pytest.raises(KVCacheCorruptionError, match="cached, and its bytes changed"):
        pool.check()
    pool.unbind_requests()
    pool.reset_prefix_cache()
    assert_ledger(pool)


def test_publishing_what_was_not_written_is_refused_and_changes_nothing(pool):
    a = pool.bind_request(R(1, 12), 16)
    write(pool, a, 0, 5)
    pool.mark_written(a, 12)
    page = int(pool.request(a).page_ids[2])
    before = snapshot(pool, a)
    words = rf"publishing request {a}: position 8 of layer 0 .* page {page} holds poison"
    for verb in (pool.finish_request, pool.checkpoint_request):
        with pytest.raises(KVCacheCorruptionError, match=words):
            verb(a, R(1, 12))
        assert snapshot(pool, a)[:6] == before[:6]
    assert pool.finish_request(a, R(1, 8)) == 8  # what was written is fine


def test_raw_insert_of_pages_that_nobody_wrote_is_refused(pool):
    slots = pool.alloc(8)
    pages = slots[::4] // 4
    with pytest.raises(KVCacheCorruptionError, match="insert: position 0 of layer 0 was declared"):
        pool.radix.insert(R(1, 8), pages)
    assert pool.radix.total_size == 0
    pool.key_cache[:, slots], pool.value_cache[:, slots] = 1, 2
    pool.radix.insert(R(1, 8), pages)
    again = pool.alloc(4)
    pool.radix.insert(R(1, 4), again[::4] // 4)  # cached already: it stays the caller's, unread
    pool.free(again)
    with pytest.raises(ValueError, match="was not taken"):
        pool.radix.insert(R(11, 14), [pages[0]])
    pool.key_cache[0, slots[5]] = 9
    with pytest.raises(KVCacheCorruptionError, match="changed since"):
        pool.bind_request(R(1, 9), 12)
    pool.reset_prefix_cache()


def test_graphs_on_a_cpu(pool):
    a = pool.bind_request(R(1, 3), 8)
    write(pool, a, 0, 4)
    q, one = np.ones((1, 2, 8), np.float32), np.ones((1, 1, 2, 8), np.float32)
    graph = pool.decode_graph
    # A prefetch reads ahead of what is written, and nobody uses what comes out.
    with graph.prefetch(5, 4, 1) as table:
        paged_attention(q, pool, 0, table)
    table = graph.prepare(5, 4)
    with graph:
        for layer in range(2):
            pool.step.put(layer, 4, one, one)
            paged_attention(q, pool, layer, table)
    assert pool.valid_len(a) == 5
    pool.unbind_request(a)
    with pytest.raises(KVCacheCorruptionError, match="freed or never written"):
        paged_attention(q, pool, 0, table)
