"""Fixed buffers of a captured step: where they lie, and what is in them after each prepare."""

import numpy as np
import pytest

from tests.helpers.graphs import Captured, batch_pool, put_tokens, scratch_slots, slots_at
from tests.helpers.pools import assert_ledger
from tests.helpers.speculation import (
    COMMITTED,
    PAGE_SIZES,
    addresses,
    arrays,
    expected_arrays,
    expected_keys,
    keys,
    table_addresses,
)

pytestmark = pytest.mark.parametrize("page_size", PAGE_SIZES)


def one_step(pool, graph, ids, lengths):
    """Decode one token of each row through `put`; the lengths after it."""
    step = pool.activate_step(*ids)
    after = [length + 1 for length in lengths]
    graph.prepare(after, lengths)
    put_tokens(pool, step, lengths)
    return after


def test_decode_over_page_boundaries_keeps_every_address(make_pool, page_size):
    """Three rows (one of them ragged by a page and a bit) cross two boundaries each."""
    lengths = [page_size, 2 * page_size + 1, 1]
    num_steps = 2 * page_size + 1
    pool, ids = batch_pool(make_pool, page_size, lengths, room=num_steps)
    with pool.decode_graph as graph:
        seen = set()
        for _ in range(num_steps):
            lengths = one_step(pool, graph, ids, lengths)
            table, slots = graph.page_table(3), graph.write_slots(3)
            seen.add((*table_addresses(table), *addresses(slots)))
            assert table.is_fixed
            assert arrays(table) == expected_arrays(pool, ids, lengths, graph.bucket(3))
            assert table.batch_size == graph.bucket(3) == 4
            assert table.lengths_host.tolist() == [*lengths, 0]
            assert slots.tolist()[:3] == [
                slots_at(pool, i, n - 1, n)[0] for i, n in zip(ids, lengths, strict=True)
            ]
        assert len(seen) == 1
    for i, length in zip(ids, lengths, strict=True):
        assert pool.valid_len(i) == length
        np.testing.assert_array_equal(
            keys(pool, i, length), expected_keys(pool, (0, length, COMMITTED))
        )
    assert_ledger(pool)


def test_decode_with_other_buckets_in_between_keeps_every_address(make_pool, page_size):
    lengths = [page_size] * 5
    pool, ids = batch_pool(make_pool, page_size, lengths, room=40)
    with pool.decode_graph as graph:
        seen = {}
        for round_ in range(12):
            batch = (1, 5, 2, 3)[round_ % 4]
            lengths[:batch] = one_step(pool, graph, ids[:batch], lengths[:batch])
            table, slots = graph.page_table(batch), graph.write_slots(batch)
            here = (*table_addresses(table), *addresses(slots))
            assert seen.setdefault(graph.bucket(batch), here) == here
            assert arrays(table) == expected_arrays(
                pool, ids[:batch], lengths[:batch], graph.bucket(batch)
            )
        assert sorted(seen) == [1, 2, 4, 8]
        assert len({address for found in seen.values() for address in found}) == 16


def test_replay_of_a_capture_decodes_as_the_eager_loop(make_pool, page_size):
    """What a captured kernel keeps is taken once; afterwards only prepare is called."""
    lengths = [page_size - 1, 2 * page_size, 3, page_size + 1]
    lengths = [max(1, n) for n in lengths]
    num_steps = 64 if page_size > 1 else 8
    pool, ids = batch_pool(make_pool, page_size, lengths, room=num_steps)
    pool.activate_step(*ids)
    with pool.decode_graph as graph:
        graph.prepare([n + 1 for n in lengths], lengths)
        captured = Captured(pool, graph.page_table(4), graph.write_slots(4))
        for _ in range(num_steps):
            graph.prepare([n + 1 for n in lengths], lengths)
            captured.write(lengths)
            lengths = [n + 1 for n in lengths]
            for row, length in enumerate(lengths):
                for layer in range(pool.num_layers):
                    expected = expected_keys(pool, (0, length, COMMITTED))[layer]
                    np.testing.assert_array_equal(captured.read(row, layer), expected)
    assert [pool.valid_len(i) for i in ids] == lengths


def test_replay_of_a_captured_window_verifies_as_the_eager_loop(make_pool, page_size):
    """Windows of 3, of which 1 or 2 tokens are kept, for three rows in a bucket of four."""
    lengths = [page_size, 2 * page_size + 1, 1]
    pool, ids = batch_pool(make_pool, page_size, lengths, room=40)
    step = pool.activate_step(*ids)
    with pool.verify_graph as graph:
        graph.prepare([n + 3 for n in lengths], lengths, 3)
        captured = Captured(pool, graph.page_table(), graph.write_slots())
        before = captured.addresses()
        for round_ in range(16):
            graph.prepare([n + 3 for n in lengths], lengths, 3)
            captured.write(lengths, 3)
            for row, length in enumerate(lengths):
                expected = expected_keys(pool, (0, length + 3, COMMITTED))[1]
                np.testing.assert_array_equal(captured.read(row, 1), expected)
            ends = [n + 3 for n in lengths]
            lengths = [n + 1 + (round_ + row) % 2 for row, n in enumerate(lengths)]
            step.truncate_to(lengths, ends)
        now = Captured(pool, graph.page_table(), graph.write_slots())
        assert now.addresses() == before
        assert not graph.take_reallocated()
    assert [pool.valid_len(i) for i in ids] == lengths
    for i, length in zip(ids, lengths, strict=True):
        np.testing.assert_array_equal(
            keys(pool, i, length + 1),
            expected_keys(pool, (0, length, COMMITTED), (length, length + 1, None)),
        )


def test_prepare_uniform_with_plain_ints_is_prepare_with_a_list(make_pool, page_size):
    pool, ids = batch_pool(make_pool, page_size, [page_size] * 3, room=8)
    pool.activate_step(*ids)
    with pool.decode_graph as graph:
        graph.prepare(page_size + 1, page_size)
        uniform = arrays(graph.page_table(3)), graph.write_slots(3).tolist()
        graph.prepare(np.full(3, page_size + 1, np.int32), np.full(3, page_size, np.int32))
        assert (arrays(graph.page_table(3)), graph.write_slots(3).tolist()) == uniform


def test_version_of_a_fixed_table_grows_with_each_prepare(make_pool, page_size):
    pool, ids = batch_pool(make_pool, page_size, [page_size], room=8)
    pool.activate_step(*ids)
    with pool.decode_graph as graph:
        versions = [graph.prepare(page_size + 1 + n, page_size + n).version for n in range(5)]
        assert versions == sorted(set(versions))
        table = graph.page_table(1)
        table_of_step = pool.step.page_table(page_size + 5)
        assert table_of_step is table


@pytest.mark.parametrize("batch", [1, 2, 3, 4, 5, 8])
def test_padded_rows_have_scratch_slots_and_no_pages(make_pool, page_size, batch):
    pool, ids = batch_pool(make_pool, page_size, [page_size] * batch, room=8)
    pool.activate_step(*ids)
    with pool.decode_graph as graph:
        table = graph.prepare(page_size + 1, page_size)
        bucket = graph.bucket(batch)
        slots = graph.write_slots(batch)
        assert slots.shape == (bucket,)
        assert slots.dtype == np.int64
        assert set(slots.tolist()[batch:]) <= set(scratch_slots(pool))
        assert (table.indptr[batch:] == table.indptr[batch]).all()
        assert table.last_page_len.tolist()[batch:] == [0] * (bucket - batch)
        assert table.indptr_host.dtype == table.last_page_len_host.dtype == np.int32
        assert table.lengths_host.dtype == np.int64
        assert table.indptr.dtype == table.indices.dtype == table.last_page_len.dtype == np.int32


def test_bucket_is_the_next_power_of_two_unless_set(make_pool, page_size):
    pool, ids = batch_pool(make_pool, page_size, [1] * 3, room=8)
    graph = pool.decode_graph
    assert [graph.bucket(n) for n in (1, 2, 3, 5, 64, 65)] == [1, 2, 4, 8, 64, 128]
    graph.batch_buckets = (3, 6)
    assert [graph.bucket(n) for n in (1, 3, 4, 6)] == [3, 3, 6, 6]
    pool.activate_step(*ids)
    with graph:
        assert graph.prepare(2, 1).batch_size == 3


def test_batch_past_every_bucket_grows(make_pool, page_size):
    pool, ids = batch_pool(make_pool, page_size, [1] * 5, room=8)
    pool.activate_step(*ids)
    graph = pool.decode_graph
    graph.batch_buckets = (1, 2)
    with graph:
        table = graph.prepare(2, 1)
        assert table.batch_size >= 5
        assert arrays(table) == expected_arrays(pool, ids, [2] * 5, table.batch_size)


def test_graph_objects_are_one_each_per_pool(make_pool, page_size):
    pool, _ = batch_pool(make_pool, page_size, [1], room=8)
    assert pool.decode_graph is pool.decode_graph
    assert pool.verify_graph is pool.verify_graph
    assert pool.decode_graph is not pool.verify_graph
