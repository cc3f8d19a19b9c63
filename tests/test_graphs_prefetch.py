"""A capture ahead of its step: it reads the live pages, writes to scratch, and leaves no trace."""

import numpy as np
import pytest

from kvpool import KVCacheExhaustedError, KVCacheStateError
from tests.helpers.graphs import (
    Captured,
    batch_pool,
    put_tokens,
    scratch_slots,
    slots_at,
    tokens_at,
)
from tests.helpers.pools import unchanged
from tests.helpers.speculation import (
    COMMITTED,
    REJECTED,
    addresses,
    arrays,
    expected_arrays,
    expected_keys,
    keys,
    table_addresses,
)

PAGE_SIZES = [1, 4, 16]
pytestmark = pytest.mark.parametrize("page_size", PAGE_SIZES)


def prepared(make_pool, page_size, rows=3):
    """A pool, ids, their step, and the lengths after one decode is prepared for and done."""
    lengths = [page_size + row for row in range(rows)]
    pool, ids = batch_pool(make_pool, page_size, lengths, room=2 * page_size + 2)
    step = pool.activate_step(*ids)
    with pool.decode_graph as graph:
        lengths = [n + 1 for n in lengths]
        graph.prepare(lengths, [n - 1 for n in lengths])
        put_tokens(pool, step, [n - 1 for n in lengths])
    return pool, ids, step, lengths


def test_prefetch_shows_the_live_pages_at_its_length(make_pool, page_size):
    """The next page bucket: where a captured graph of the step before ends."""
    pool, ids, _, lengths = prepared(make_pool, page_size)
    ahead = max(lengths) + page_size
    with pool.decode_graph as graph, graph.prefetch(ahead, ahead - 1, 3) as table:
        assert arrays(table) == expected_arrays(pool, ids, [ahead] * 3, graph.bucket(3))
        assert table is graph.page_table(3)
        assert table.is_fixed


def test_prefetch_writes_to_scratch_only(make_pool, page_size):
    pool, ids, step, lengths = prepared(make_pool, page_size)
    ahead = max(lengths) + 1
    graph = pool.decode_graph
    with graph, unchanged(pool, *ids), graph.prefetch(ahead, ahead - 1, 3) as table:
        slots = graph.write_slots(3)
        assert set(slots.tolist()) <= set(scratch_slots(pool))
        Captured(pool, table, slots).write([ahead - 1] * 3, base=REJECTED)
        put_tokens(pool, step, [ahead - 1] * 3, base=REJECTED)
    for layer in range(pool.num_layers):
        start = pool.num_slots if pool.poison else 0
        assert np.isfinite(pool.layer_with_scratch(layer)[0][start:]).all()


def test_prefetch_declares_nothing(make_pool, page_size):
    pool, ids, _, lengths = prepared(make_pool, page_size)
    ahead = max(lengths) + 1
    with pool.decode_graph as graph, graph.prefetch(ahead, ahead - 1, 3):
        assert [pool.valid_len(i) for i in ids] == lengths
    assert [pool.valid_len(i) for i in ids] == lengths


@pytest.mark.parametrize("raises", [False, True])
def test_prefetch_at_its_end_brings_back_what_was_prepared(make_pool, page_size, raises):
    """Also when the capture fails half-way."""
    pool, ids, step, lengths = prepared(make_pool, page_size)
    ahead = max(lengths) + page_size
    after = [n + 1 for n in lengths]
    with pool.decode_graph as graph:
        table = graph.prepare(after, lengths)
        slots = graph.write_slots(3)
        before = arrays(table), slots.tolist(), table.lengths_host.tolist()
        where = table_addresses(table), addresses(slots)
        try:
            with graph.prefetch(ahead, ahead - 1, 3):
                assert arrays(table) != before[0]
                if raises:
                    raise RuntimeError("capture failed")
        except RuntimeError:
            assert raises
        assert (arrays(table), slots.tolist(), table.lengths_host.tolist()) == before
        assert (table_addresses(graph.page_table(3)), addresses(graph.write_slots(3))) == where
        assert step.page_table(after) is table
        put_tokens(pool, step, lengths)
    for i, n in zip(ids, after, strict=True):
        assert pool.valid_len(i) == n
        np.testing.assert_array_equal(keys(pool, i, n), expected_keys(pool, (0, n, COMMITTED)))


def test_prefetch_has_the_addresses_that_a_prepare_uses(make_pool, page_size):
    """A graph captured in a prefetch must be right for each later replay."""
    pool, ids, _, lengths = prepared(make_pool, page_size)
    ahead = max(lengths) + 1
    with pool.decode_graph as graph:
        with graph.prefetch(ahead, ahead - 1, 3) as table:
            captured = Captured(pool, table, graph.write_slots(3))
        for _ in range(page_size + 1):
            graph.prepare([n + 1 for n in lengths], lengths)
            captured.write(lengths)
            lengths = [n + 1 for n in lengths]
            for row, n in enumerate(lengths):
                expected = expected_keys(pool, (0, n, COMMITTED))[0]
                np.testing.assert_array_equal(captured.read(row, 0), expected)
    for i, n in zip(ids, lengths, strict=True):
        np.testing.assert_array_equal(keys(pool, i, n), expected_keys(pool, (0, n, COMMITTED)))


def test_prefetch_before_any_prepare_leaves_the_graph_unprepared(make_pool, page_size):
    pool, ids = batch_pool(make_pool, page_size, [page_size] * 2, room=4)
    step = pool.activate_step(*ids)
    with pool.decode_graph as graph:
        with graph.prefetch(page_size + 1, page_size, 2) as table:
            assert arrays(table) == expected_arrays(pool, ids, [page_size + 1] * 2, 2)
        with unchanged(pool, *ids), pytest.raises(KVCacheStateError, match="prepare"):
            step.put(0, page_size, *tokens_at(pool, [page_size] * 2, 1, 0))
        with pytest.raises(KVCacheStateError, match="prepare"):
            graph.page_table(2)


def test_prefetch_of_a_wrong_batch_or_position_is_refused(make_pool, page_size):
    pool, ids, _, lengths = prepared(make_pool, page_size)
    ahead = max(lengths) + 1
    with pool.decode_graph as graph:
        with unchanged(pool, *ids), pytest.raises(ValueError, match=r"2"):
            graph.prefetch(ahead, ahead - 1, 2).__enter__()
        with unchanged(pool, *ids), pytest.raises(ValueError, match=r"\d"):
            graph.prefetch(page_size + 1, page_size + 1, 3).__enter__()
        with unchanged(pool, *ids), pytest.raises(KVCacheExhaustedError, match=r"\d"):
            graph.prefetch(1000 * page_size, 1, 3).__enter__()


# ---- install


def test_install_makes_a_prefetched_table_the_steps(make_pool, page_size):
    """All rows are now at the length that was captured ahead."""
    pool, ids = batch_pool(make_pool, page_size, [page_size] * 3, room=2 * page_size + 2)
    step = pool.activate_step(*ids)
    ahead = page_size + 1
    with pool.decode_graph as graph:
        graph.prepare(page_size, page_size - 1) if page_size > 1 else graph.prepare(2, 1)
        with graph.prefetch(ahead, ahead - 1, 3) as table:
            where = table_addresses(table)
        graph.install(table, ahead)
        assert step.current_page_table is table
        assert step.page_table(ahead) is table
        assert table_addresses(table) == where
        assert arrays(table) == expected_arrays(pool, ids, [ahead] * 3, graph.bucket(3))


def test_install_then_prepare_replays_over_the_same_addresses(make_pool, page_size):
    pool, ids = batch_pool(make_pool, page_size, [page_size] * 3, room=2 * page_size + 2)
    step = pool.activate_step(*ids)
    ahead = page_size + 1
    with pool.decode_graph as graph:
        with graph.prefetch(ahead, ahead - 1, 3) as table:
            captured = Captured(pool, table, graph.write_slots(3))
        graph.install(table, ahead)
        assert graph.prepare(ahead, ahead - 1) is table
        assert step.page_table(ahead) is table
        captured.write([ahead - 1] * 3)
        assert graph.write_slots(3).tolist()[:3] == [
            slots_at(pool, i, ahead - 1, ahead)[0] for i in ids
        ]
    for i in ids:
        np.testing.assert_array_equal(
            keys(pool, i, ahead), expected_keys(pool, (0, ahead, COMMITTED))
        )
