"""Seal and truncate after a captured window: the fixed table follows in place, and tells when.

The windows are those of `tests/test_flow_speculative.py`.
"""

import numpy as np
import pytest

from tests.helpers.graphs import Captured
from tests.helpers.pools import assert_ledger, unchanged
from tests.helpers.speculation import (
    BATCHES,
    CAPACITY,
    COMMITTED,
    PAGE_SIZES,
    REJECTED,
    addresses,
    arrays,
    batch_rows,
    cached_tokens,
    expected_arrays,
    expected_keys,
    keys,
    prompt_of,
    rows_of,
    speculation_pool,
    stays_in_place,
    table_addresses,
    window_len,
)

pytestmark = pytest.mark.parametrize("page_size", PAGE_SIZES)
batches = pytest.mark.parametrize("batch", BATCHES)
verbs = pytest.mark.parametrize("verb", ["seal_length", "truncate_to"])


def sealed(rows):
    return [row.sealed for row in rows]


def ends(rows):
    return [row.end for row in rows]


def prepare(graph, rows):
    return graph.prepare(ends(rows), [row.start for row in rows], rows[0].end - rows[0].start)


def take_back(step, rows, verb):
    return getattr(step, verb)(sealed(rows), *([ends(rows)] if verb == "truncate_to" else []))


def put_windows(pool, step, rows):
    for layer in range(pool.num_layers):
        step.put(layer, 0, *batch_rows(pool, rows, layer))


@batches
@verbs
def test_take_back_a_captured_tail_tells_whether_the_table_was_bumped(
    make_pool, page_size, batch, verb
):
    rows = rows_of(batch, page_size)
    pool, ids = speculation_pool(make_pool, page_size, rows)
    step = pool.activate_step(*ids)
    with pool.verify_graph as graph:
        table = prepare(graph, rows)
        before, version = table_addresses(table), table.version
        put_windows(pool, step, rows)
        answer = take_back(step, rows, verb)
        assert answer is stays_in_place(rows, page_size)
        assert table_addresses(graph.page_table()) == before  # for the life of the pool
        now = step.page_table(sealed(rows))
        bucket = now.batch_size
        assert arrays(now) == expected_arrays(pool, ids, sealed(rows), bucket)
        if answer:
            assert now is table
            assert table.version > version
            assert now.lengths_host.tolist() == sealed(rows) + [0] * (bucket - len(rows))


@batches
@verbs
def test_take_back_a_captured_tail_lowers_what_was_declared(make_pool, page_size, batch, verb):
    rows = rows_of(batch, page_size)
    pool, ids = speculation_pool(make_pool, page_size, rows)
    step = pool.activate_step(*ids)
    with pool.verify_graph as graph:
        prepare(graph, rows)
        assert [pool.valid_len(i) for i in ids] == ends(rows)
        take_back(step, rows, verb)
    assert [pool.valid_len(i) for i in ids] == sealed(rows)


@batches
@pytest.mark.parametrize("zero_rejected_kv", [True, False])
def test_truncate_after_a_replay_keeps_the_accepted_and_zeroes_if_told_to(
    make_pool, page_size, batch, zero_rejected_kv
):
    """The replay wrote behind the pool's back: only what prepare declared is known."""
    rows = rows_of(batch, page_size)
    pool, ids = speculation_pool(make_pool, page_size, rows, zero_rejected_kv=zero_rejected_kv)
    step = pool.activate_step(*ids)
    with pool.verify_graph as graph:
        prepare(graph, rows)
        slots = graph.write_slots()
        for layer in range(pool.num_layers):
            for cache, new in zip(
                pool.layer_with_scratch(layer), batch_rows(pool, rows, layer), strict=True
            ):
                cache[slots[: len(rows) * window_len(page_size)]] = new.reshape(
                    -1, *cache.shape[1:]
                )
        step.truncate_to(sealed(rows), ends(rows))
    tail = None if zero_rejected_kv else REJECTED
    for i, row in zip(ids, rows, strict=True):
        np.testing.assert_array_equal(
            keys(pool, i, row.end),
            expected_keys(pool, (0, row.sealed, COMMITTED), (row.sealed, row.end, tail)),
        )


@batches
def test_invalidate_after_a_captured_window_takes_its_range_back(make_pool, page_size, batch):
    rows = rows_of(batch, page_size)
    pool, ids = speculation_pool(make_pool, page_size, rows)
    step = pool.activate_step(*ids)
    with pool.verify_graph as graph:
        prepare(graph, rows)
        put_windows(pool, step, rows)
        step.invalidate_range(sealed(rows), ends(rows))
    assert [pool.valid_len(i) for i in ids] == sealed(rows)
    for i, row in zip(ids, rows, strict=True):
        kept = expected_keys(pool, (0, row.sealed, COMMITTED), (row.sealed, row.end, None))
        np.testing.assert_array_equal(keys(pool, i, row.end), kept)


@batches
def test_finish_after_a_captured_reject_caches_the_accepted_pages_only(
    make_pool, page_size, batch
):
    rows = rows_of(batch, page_size)
    pool, ids = speculation_pool(make_pool, page_size, rows)
    step = pool.activate_step(*ids)
    with pool.verify_graph as graph:
        prepare(graph, rows)
        put_windows(pool, step, rows)
        step.truncate_to(sealed(rows), ends(rows))
    floors = [row.sealed // page_size * page_size for row in rows]
    for n, (i, row) in enumerate(zip(ids, rows, strict=True)):
        tokens = prompt_of(n, row.sealed) + [9_000_000] * (row.end - row.sealed)
        assert pool.finish_request(i, tokens) == floors[n]
    expected = sorted(t for n, floor in enumerate(floors) for t in prompt_of(n, floor))
    assert cached_tokens(pool) == expected
    assert_ledger(pool)


@batches
def test_decode_graph_after_a_captured_reject_goes_on_from_there(make_pool, page_size, batch):
    """Verify, reject, then one decode step a row through the other graph."""
    rows = rows_of(batch, page_size)
    pool, ids = speculation_pool(make_pool, page_size, rows)
    step = pool.activate_step(*ids)
    with pool.verify_graph as graph:
        prepare(graph, rows)
        put_windows(pool, step, rows)
        step.truncate_to(sealed(rows), ends(rows))
    with pool.decode_graph as graph:
        starts = sealed(rows)
        table = graph.prepare([n + 1 for n in starts], starts)
        captured = Captured(pool, table, graph.write_slots(len(ids)))
        captured.write(starts)
        for row, start in enumerate(starts):
            expected = expected_keys(pool, (0, start + 1, COMMITTED))[0]
            np.testing.assert_array_equal(captured.read(row, 0), expected)
    assert [pool.valid_len(i) for i in ids] == [n + 1 for n in starts]


def test_seal_that_moves_a_page_from_row_to_row_is_no_bump(make_pool, page_size):
    """As many pages as before, but row 1 has one more and row 0 one less."""
    rows = rows_of("uniform: whole page rejected", page_size)[:2]
    pool, ids = speculation_pool(make_pool, page_size, rows)
    step = pool.activate_step(*ids)
    start = rows[0].start
    with pool.decode_graph as graph:
        graph.prepare([start + 1, start], [start, start - 1])
        assert step.seal_length([start, start + 1]) is False
        table = step.page_table([start, start + 1])
        assert arrays(table) == expected_arrays(pool, ids, [start, start + 1])


def test_bump_reaches_what_a_capture_holds(make_pool, page_size):
    """The captured arrays themselves show the sealed length, without another prepare."""
    rows = rows_of("single: last token rejected", page_size)
    pool, ids = speculation_pool(make_pool, page_size, rows)
    step = pool.activate_step(*ids)
    with pool.verify_graph as graph:
        table = prepare(graph, rows)
        captured = Captured(pool, table, graph.write_slots())
        before = captured.addresses()
        put_windows(pool, step, rows)
        if step.truncate_to(sealed(rows), ends(rows)):
            expected = expected_keys(pool, (0, rows[0].sealed, COMMITTED))[0]
            np.testing.assert_array_equal(captured.read(0, 0), expected)
            assert captured.addresses() == before
        else:
            assert page_size == 1  # every rejected token is a page


@batches
@verbs
def test_shared_table_after_the_block_shows_nothing_that_was_taken_back(
    make_pool, page_size, batch, verb
):
    """A table from before the block must not let attention see the rejected tail again."""
    rows = rows_of(batch, page_size)
    pool, ids = speculation_pool(make_pool, page_size, rows)
    step = pool.activate_step(*ids)
    step.page_table(ends(rows))
    with pool.verify_graph as graph:
        prepare(graph, rows)
        put_windows(pool, step, rows)
        take_back(step, rows, verb)
    table = step.current_page_table
    if table is not None:
        assert table.lengths_host.tolist() == sealed(rows)
    assert arrays(step.page_table(sealed(rows))) == expected_arrays(pool, ids, sealed(rows))


@pytest.mark.parametrize(
    "call",
    [
        lambda step, p: step.seal_length(CAPACITY * p + 1),
        lambda step, p: step.truncate_to(3 * p, 3 * p - 1),
        lambda step, p: step.truncate_to(3 * p, CAPACITY * p + 1),
        lambda step, p: step.invalidate_range(-1, 3 * p),
    ],
)
def test_refused_take_back_leaves_the_graph_as_it_was(make_pool, page_size, call):
    rows = rows_of("uniform: last token rejected", page_size)
    pool, ids = speculation_pool(make_pool, page_size, rows)
    step = pool.activate_step(*ids)
    with pool.verify_graph as graph:
        table = prepare(graph, rows)
        slots = graph.write_slots()
        before = arrays(table), table.version, slots.tolist(), addresses(slots)
        with unchanged(pool, *ids), pytest.raises(ValueError, match=r"\d"):
            call(step, page_size)
        assert (arrays(table), table.version, slots.tolist(), addresses(slots)) == before
        put_windows(pool, step, rows)
