"""Fixed page tables when the pages behind them change, or are more than there is room for."""

import numpy as np
import pytest

from kvpool import KVCacheStateError
from tests.helpers.graphs import batch_pool, put_tokens, tokens_at
from tests.helpers.pools import R, case_pool, unchanged, write
from tests.helpers.speculation import (
    COMMITTED,
    PAGE_SIZES,
    arrays,
    expected_arrays,
    expected_keys,
    keys,
    prompt_of,
    table_addresses,
)

pytestmark = pytest.mark.parametrize("page_size", PAGE_SIZES)


def test_prepare_after_shrink_and_extend_lists_the_new_pages(make_pool, page_size):
    """Same step, same lengths, other pages: another request took what was given back."""
    pool = case_pool(make_pool, page_size, 8)
    a = pool.bind_request(R(1, page_size), 3 * page_size)
    write(pool, a, 0, page_size - 1)
    pool.activate_step(a)
    with pool.decode_graph as graph:
        table = graph.prepare(3 * page_size, page_size - 1)
        before = pool.request(a).page_ids.tolist()
        pool.shrink_request(a, page_size)
        pool.bind_request(R(100, 100 + page_size), 2 * page_size)
        pool.extend_request(a, 3 * page_size)
        assert pool.request(a).page_ids.tolist() != before
        assert graph.prepare(3 * page_size, page_size - 1) is table
        assert arrays(table) == expected_arrays(pool, [a], [3 * page_size])


def lose_pages(pool, request_id, pages):
    """Give all but the first page back, let another request have them, and take others."""
    size = pool.page_size
    pool.shrink_request(request_id, size)
    pool.bind_request(R(100, 100 + size), (pages - 1) * size)
    pool.extend_request(request_id, pages * size)


def test_put_after_pages_were_given_back_waits_for_a_prepare(make_pool, page_size):
    """The slots may be those of a page that another request has now."""
    pool = case_pool(make_pool, page_size, 8)
    a = pool.bind_request(R(1, page_size), 3 * page_size)
    write(pool, a, 0, page_size - 1)
    step = pool.activate_step(a)
    with pool.decode_graph as graph:
        graph.prepare(3 * page_size, page_size - 1)
        lose_pages(pool, a, 3)
        with unchanged(pool, a), pytest.raises(KVCacheStateError, match="prepare"):
            step.put(0, 0, *tokens_at(pool, [page_size - 1], 1, 0))
        graph.prepare(page_size, page_size - 1)
        put_tokens(pool, step, [page_size - 1])
    found = keys(pool, a, page_size)
    np.testing.assert_array_equal(found, expected_keys(pool, (0, page_size, COMMITTED)))


def test_seal_after_pages_were_given_back_is_no_bump(make_pool, page_size):
    """As many pages as before, but others: a table that lists the old ones must not survive."""
    pool = case_pool(make_pool, page_size, 8)
    a = pool.bind_request(R(1, page_size), 3 * page_size)
    write(pool, a, 0, page_size - 1)
    step = pool.activate_step(a)
    with pool.decode_graph as graph:
        graph.prepare(3 * page_size, page_size - 1)
        lose_pages(pool, a, 3)
        assert step.seal_length(3 * page_size) is False
        table = step.current_page_table
        if table is not None:
            assert arrays(table) == expected_arrays(pool, [a], [3 * page_size])


def test_prepare_for_a_request_in_the_place_of_an_ended_one_lists_its_pages(make_pool, page_size):
    """Continuous batching: row 1 ends, another request of the same length comes in its place."""
    pool, ids = batch_pool(make_pool, page_size, [page_size] * 3, room=page_size)
    pool.activate_step(*ids)
    with pool.decode_graph as graph:
        table = graph.prepare(page_size + 1, page_size)
    taken = pool.alloc(page_size)  # so that the newcomer cannot have the same pages
    pool.unbind_request(ids[1])
    ids[1] = pool.bind_request(prompt_of(7, page_size), 2 * page_size)
    write(pool, ids[1], 0, page_size)
    step = pool.activate_step(*ids)
    with graph:
        assert graph.prepare(page_size + 1, page_size) is table
        assert arrays(table) == expected_arrays(pool, ids, [page_size + 1] * 3, 4)
        put_tokens(pool, step, [page_size] * 3)
    pool.free(taken)
    for i in ids:
        np.testing.assert_array_equal(
            keys(pool, i, page_size + 1), expected_keys(pool, (0, page_size + 1, COMMITTED))
        )


def test_prepare_with_rows_in_another_order_lists_them_so(make_pool, page_size):
    pool, ids = batch_pool(make_pool, page_size, [page_size] * 2, room=page_size)
    with pool.decode_graph as graph:
        for order in (ids, ids[::-1], ids):
            pool.activate_step(*order)
            table = graph.prepare(page_size + 1, page_size)
            assert arrays(table) == expected_arrays(pool, order, [page_size + 1] * 2)


def test_prepare_after_a_checkpoint_lists_the_pages_that_stay(make_pool, page_size):
    pool, ids = batch_pool(make_pool, page_size, [2 * page_size], room=page_size)
    pool.activate_step(*ids)
    with pool.decode_graph as graph:
        table = graph.prepare(2 * page_size + 1, 2 * page_size)
        put_tokens(pool, pool.step, [2 * page_size])
        pool.checkpoint_request(ids[0], prompt_of(0, 2 * page_size))
        before = arrays(table)
        graph.prepare(2 * page_size + 1, 2 * page_size)
        assert arrays(table) == before == expected_arrays(pool, ids, [2 * page_size + 1])


def test_prepare_after_an_extend_reaches_the_new_pages(make_pool, page_size):
    pool = case_pool(make_pool, page_size, 8)
    a = pool.bind_request(R(1, page_size), page_size)
    write(pool, a, 0, page_size)
    step = pool.activate_step(a)
    with pool.decode_graph as graph:
        where = table_addresses(graph.prepare(page_size, page_size - 1))
        put_tokens(pool, step, [page_size - 1])
        for length in range(page_size, 4 * page_size):
            pool.extend_request(a, length + 1)
            table = graph.prepare(length + 1, length)
            put_tokens(pool, step, [length])
            assert arrays(table) == expected_arrays(pool, [a], [length + 1])
            assert table_addresses(table) == where
    found = keys(pool, a, 4 * page_size)
    np.testing.assert_array_equal(found, expected_keys(pool, (0, 4 * page_size, COMMITTED)))


# ---- room


def test_decode_past_max_seq_len_is_refused_and_changes_nothing(make_pool, page_size):
    """Its addresses are for the life of the pool, so its buffers cannot grow: say so in time."""
    limit = 2 * page_size
    pool, ids = batch_pool(make_pool, page_size, [limit] * 2, room=page_size, max_seq_len=limit)
    pool.activate_step(*ids)
    with pool.decode_graph as graph:
        table = graph.prepare(limit, limit - 1)
        before = arrays(table), table.version
        with unchanged(pool, *ids), pytest.raises(ValueError, match="max_seq_len"):
            graph.prepare(limit + 1, limit)
        assert (arrays(table), table.version) == before
        put_tokens(pool, pool.step, [limit - 1] * 2)


def test_verify_past_max_seq_len_grows_and_tells(make_pool, page_size):
    limit = 2 * page_size
    pool, ids = batch_pool(
        make_pool, page_size, [limit] * 2, room=2 * page_size, max_seq_len=limit
    )
    step = pool.activate_step(*ids)
    with pool.verify_graph as graph:
        graph.prepare(limit, limit - 1, 1)
        graph.take_reallocated()
        before = table_addresses(graph.page_table())
        table = graph.prepare(limit + page_size + 1, limit, page_size + 1)
        assert graph.take_reallocated() is True
        assert table_addresses(table) != before
        assert arrays(table) == expected_arrays(pool, ids, [limit + page_size + 1] * 2)
        put_tokens(pool, step, [limit] * 2, page_size + 1)
        before = table_addresses(table)
        graph.prepare(limit, limit - 1, 1)
        assert table_addresses(graph.page_table()) == before
        assert graph.take_reallocated() is False
    for i in ids:
        end = limit + page_size + 1
        np.testing.assert_array_equal(keys(pool, i, end), expected_keys(pool, (0, end, COMMITTED)))


def test_block_table_of_a_fixed_table_pads_with_the_scratch_page(make_pool, page_size):
    """FlashAttention's form: padding rows list nothing but scratch."""
    lengths = [page_size, 2 * page_size, 1]
    pool, ids = batch_pool(make_pool, page_size, lengths, room=2)
    pool.activate_step(*ids)
    with pool.decode_graph as graph:
        table = graph.prepare([n + 1 for n in lengths], lengths)
        dense = table.block_table()
    scratch = pool.num_pages
    counts = [-(-(n + 1) // page_size) for n in lengths]
    assert dense.shape == (4, max(counts))
    for row, (i, count) in enumerate(zip(ids, counts, strict=True)):
        own = pool.request(i).page_ids.tolist()[:count]
        assert dense[row].tolist() == own + [scratch] * (max(counts) - count)
    assert dense[3].tolist() == [scratch] * max(counts)
