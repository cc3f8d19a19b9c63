"""What a captured step writes, and what counts as written after it."""

import numpy as np
import pytest

from tests.helpers.graphs import (
    Captured,
    batch_pool,
    put_tokens,
    scratch_slots,
    slots_at,
    tokens_at,
)
from tests.helpers.pools import assert_ledger, st
from tests.helpers.speculation import (
    COMMITTED,
    PAGE_SIZES,
    REJECTED,
    arrays,
    cached_tokens,
    expected_arrays,
    expected_keys,
    keys,
    prompt_of,
)

pytestmark = pytest.mark.parametrize("page_size", PAGE_SIZES)


def bytes_of(pool):
    """All K and V behind the public views: everything but the scratch page."""
    return pool.key_cache.tobytes(), pool.value_cache.tobytes()


# ---- prepare declares


def test_prepare_declares_its_writes_without_a_put(make_pool, page_size):
    """Ragged rows, page by page; finish then caches what the replays wrote."""
    lengths = [page_size, 2 * page_size + 1]
    pool, ids = batch_pool(make_pool, page_size, lengths, room=3 * page_size)
    pool.activate_step(*ids)
    with pool.decode_graph as graph:
        for _ in range(2 * page_size):
            graph.prepare([n + 1 for n in lengths], lengths)
            captured = Captured(pool, graph.page_table(2), graph.write_slots(2))
            captured.write(lengths)
            lengths = [n + 1 for n in lengths]
            assert [pool.valid_len(i) for i in ids] == lengths
    for row, (i, length) in enumerate(zip(ids, lengths, strict=True)):
        floor = length // page_size * page_size
        assert pool.finish_request(i, prompt_of(row, length)) == floor
        assert pool.radix.match_prefix(prompt_of(row, length)).length == floor
    assert_ledger(pool)


def test_prepare_of_a_window_declares_all_of_it(make_pool, page_size):
    lengths = [page_size, 2 * page_size + 1, 1]
    pool, ids = batch_pool(make_pool, page_size, lengths, room=page_size + 2)
    pool.activate_step(*ids)
    with pool.verify_graph as graph:
        graph.prepare([n + page_size + 2 for n in lengths], lengths, page_size + 2)
    assert [pool.valid_len(i) for i in ids] == [n + page_size + 2 for n in lengths]


def test_prepare_past_a_gap_declares_nothing_for_that_row(make_pool, page_size):
    """Row 1 starts one past what it wrote: as a put there, it advances nothing."""
    lengths = [page_size, page_size]
    pool, ids = batch_pool(make_pool, page_size, lengths, room=4)
    pool.activate_step(*ids)
    with pool.decode_graph as graph:
        graph.prepare([page_size + 1, page_size + 2], [page_size, page_size + 1])
    assert [pool.valid_len(i) for i in ids] == [page_size + 1, page_size]


def test_prepare_within_what_is_written_lowers_nothing(make_pool, page_size):
    pool, ids = batch_pool(make_pool, page_size, [2 * page_size], room=4)
    pool.activate_step(*ids)
    with pool.decode_graph as graph:
        graph.prepare(page_size + 1, page_size)
    assert pool.valid_len(ids[0]) == 2 * page_size


def test_prepare_may_read_more_than_it_writes(make_pool, page_size):
    """cache_len past the token written is legal: it is what attention reads, no declaration."""
    pool, ids = batch_pool(make_pool, page_size, [page_size], room=4)
    pool.activate_step(*ids)
    with pool.decode_graph as graph:
        table = graph.prepare(page_size + 3, page_size)
        bucket = graph.bucket(1)
        assert arrays(table) == expected_arrays(pool, ids, [page_size + 3], bucket)
    assert pool.valid_len(ids[0]) == page_size + 1


def test_prepare_zeroes_the_rest_of_a_page_that_it_enters(make_pool, page_size):
    """NaN of an earlier owner must not reach attention through 0 * NaN."""
    pool, _ = batch_pool(make_pool, page_size, [1], room=1)
    for layer in range(pool.num_layers):
        pool.key_layer(layer)[:] = pool.value_layer(layer)[:] = np.nan
    pool.unbind_requests()
    a = pool.bind_request(prompt_of(0, page_size), 3 * page_size)
    step = pool.activate_step(a)
    put_tokens(pool, step, [0], page_size)
    with pool.decode_graph as graph:
        graph.prepare(page_size + 1, page_size)
        Captured(pool, graph.page_table(1), graph.write_slots(1)).write([page_size])
    slots = slots_at(pool, a, 0, 2 * page_size)
    for layer in range(pool.num_layers):
        assert np.isfinite(pool.key_layer(layer)[slots]).all()
        assert np.isfinite(pool.value_layer(layer)[slots]).all()
        assert not pool.key_layer(layer)[slots][page_size + 1 :].any()


# ---- padded rows


def test_padded_rows_write_scratch_only_and_declare_nothing(make_pool, page_size):
    """Three rows in a bucket of four, beside a fourth request that is bound but not active."""
    lengths = [page_size, page_size + 1, 1, page_size]
    pool, ids = batch_pool(make_pool, page_size, lengths, room=4)
    step = pool.activate_step(*ids[:3])
    with pool.decode_graph as graph:
        graph.prepare([n + 1 for n in lengths[:3]], lengths[:3])
        slots = graph.write_slots(3)
        assert len(slots) == 4
        assert slots[3] in scratch_slots(pool)
        before = bytes_of(pool)
        captured = Captured(pool, graph.page_table(3), slots)
        captured.write(lengths[:3])
        expected = [a.copy() for a in (pool.key_cache, pool.value_cache)]
        pool.key_cache[:] = np.frombuffer(before[0], np.float32).reshape(expected[0].shape)
        pool.value_cache[:] = np.frombuffer(before[1], np.float32).reshape(expected[1].shape)
        put_tokens(pool, step, lengths[:3])  # the same through put: nothing else was touched
        np.testing.assert_array_equal(pool.key_cache, expected[0])
        np.testing.assert_array_equal(pool.value_cache, expected[1])
    assert [pool.valid_len(i) for i in ids] == [page_size + 1, page_size + 2, 2, page_size]


def test_put_takes_the_rows_of_the_batch_or_of_the_bucket(make_pool, page_size):
    """A captured model works on bucket rows; what pads them goes to scratch."""
    lengths = [page_size, page_size + 1, 1]
    pool, ids = batch_pool(make_pool, page_size, lengths, room=4)
    step = pool.activate_step(*ids)
    with pool.decode_graph as graph:
        for padding in (0, 1):
            graph.prepare([n + 1 for n in lengths], lengths)
            for layer in range(pool.num_layers):
                k, v = tokens_at(pool, lengths, 1, layer)
                pad = np.full((padding, 1, 2, 8), -7, np.float32)
                step.put(layer, lengths, np.concatenate([k, pad]), np.concatenate([v, pad]))
            lengths = [n + 1 for n in lengths]
    for i, length in zip(ids, lengths, strict=True):
        expected = expected_keys(pool, (0, length, COMMITTED))
        np.testing.assert_array_equal(keys(pool, i, length), expected)
    assert not (pool.key_cache == -7).any()
    for layer in range(pool.num_layers):
        start = pool.num_slots if pool.poison else 0
        assert np.isfinite(pool.layer_with_scratch(layer)[0][start:]).all()


# ---- put reads the graph's slots


def test_put_while_enabled_reads_neither_start_nor_slots(make_pool, page_size):
    lengths = [page_size, 2 * page_size]
    pool, ids = batch_pool(make_pool, page_size, lengths, room=4)
    step = pool.activate_step(*ids)
    elsewhere = step.window_slot_indices([page_size + 2, 2 * page_size + 2], 1)
    with pool.decode_graph as graph:
        graph.prepare([n + 1 for n in lengths], lengths)
        for layer in range(pool.num_layers):
            k, v = tokens_at(pool, lengths, 1, layer)
            step.put(layer, 0, k, v, slots=elsewhere)
    for i, n in zip(ids, lengths, strict=True):
        expected = expected_keys(pool, (0, n + 1, COMMITTED))
        np.testing.assert_array_equal(keys(pool, i, n + 1), expected)


def test_put_after_the_block_reads_its_arguments_again(make_pool, page_size):
    pool, ids = batch_pool(make_pool, page_size, [page_size], room=4)
    step = pool.activate_step(*ids)
    with pool.decode_graph as graph:
        assert graph.enabled
        graph.prepare(page_size + 1, page_size)
        put_tokens(pool, step, [page_size])
    assert not pool.decode_graph.enabled
    put_tokens(pool, step, [page_size + 1])
    expected = expected_keys(pool, (0, page_size + 2, COMMITTED))
    np.testing.assert_array_equal(keys(pool, ids[0], page_size + 2), expected)


def test_step_hands_out_the_graphs_table_and_slots(make_pool, page_size):
    lengths = [page_size, page_size + 1, 1]
    pool, ids = batch_pool(make_pool, page_size, lengths, room=4)
    step = pool.activate_step(*ids)
    with pool.decode_graph as graph:
        table = graph.prepare([n + 1 for n in lengths], lengths)
        assert table is graph.page_table(3)
        assert step.page_table([n + 1 for n in lengths]) is table
        assert step.current_page_table is table
        handed = step.window_slot_indices(lengths, 1)
        assert np.shares_memory(handed, graph.write_slots(3))
        assert handed.tolist()[:3] == graph.write_slots(3).tolist()[:3]


def test_finish_after_prepared_and_rejected_windows_caches_the_accepted(make_pool, page_size):
    """prepare is an upper bound: truncate may come later, and then nothing of the tail stays."""
    pool, ids = batch_pool(make_pool, page_size, [page_size], room=3 * page_size + 3)
    step = pool.activate_step(*ids)
    with pool.verify_graph as graph:
        graph.prepare(2 * page_size + 2, page_size, page_size + 2)
        captured = Captured(pool, graph.page_table(), graph.write_slots())
        captured.write([page_size], page_size + 2, REJECTED)
        step.truncate_to(page_size + 1, 2 * page_size + 2)
    tokens = prompt_of(0, 3 * page_size)
    floor = (page_size + 1) // page_size * page_size
    assert pool.finish_request(ids[0], tokens) == floor
    assert cached_tokens(pool) == prompt_of(0, floor)
    assert st(pool)[0] == pool.num_pages - floor // page_size
