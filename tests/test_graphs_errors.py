"""Captured steps that are refused, and that nothing has changed then."""

import contextlib

import numpy as np
import pytest

from kvpool import KVCacheExhaustedError, KVCacheStateError
from tests.helpers.graphs import batch_pool, put_tokens, tokens_at
from tests.helpers.pools import cache_prompt, case_pool, unchanged, write
from tests.helpers.speculation import COMMITTED, expected_keys, keys, prompt_of, table_addresses

PAGE_SIZES = [1, 4, 16]
pytestmark = pytest.mark.parametrize("page_size", PAGE_SIZES)
either = pytest.mark.parametrize("name", ["decode_graph", "verify_graph"])


def unprepared():
    return pytest.raises(KVCacheStateError, match="prepare")


def is_verify(graph):
    return hasattr(graph, "qo_indptr")


def prepare(graph, ends, starts):
    """The same call of either graph: a window of one token is a decode."""
    return graph.prepare(ends, starts, *([1] if is_verify(graph) else []))


def table_of(graph, batch):
    return graph.page_table() if is_verify(graph) else graph.page_table(batch)


def slots_of(graph, batch):
    return graph.write_slots() if is_verify(graph) else graph.write_slots(batch)


def contents(graph, batch):
    """All that a refused prepare must leave as it was."""
    table, slots = table_of(graph, batch), slots_of(graph, batch)
    found = (table.indptr, table.indices, table.last_page_len, slots, table.lengths_host)
    return [a.tolist() for a in found], table_addresses(table), table.version


# ---- without prepare


@either
def test_read_of_buffers_without_prepare_is_refused(make_pool, page_size, name):
    pool, ids = batch_pool(make_pool, page_size, [1, 1, 1], room=4)
    pool.activate_step(*ids)
    with getattr(pool, name) as graph:
        for read in (table_of, slots_of):
            with unprepared():
                read(graph, 3)


def test_page_table_of_another_batch_than_prepared_is_refused(make_pool, page_size):
    pool, ids = batch_pool(make_pool, page_size, [1, 1, 1], room=4)
    pool.activate_step(*ids)
    with pool.decode_graph as graph:
        graph.prepare(2, 1)
        for batch in (1, 2, 5, 8):
            with unprepared():
                graph.page_table(batch)


@either
def test_put_while_enabled_without_prepare_is_refused(make_pool, page_size, name):
    pool, ids = batch_pool(make_pool, page_size, [1, 1], room=4)
    step = pool.activate_step(*ids)
    with (
        unchanged(pool, *ids),
        getattr(pool, name),
        unprepared(),
    ):
        step.put(0, 1, *tokens_at(pool, [1, 1], 1, 0))


@either
def test_put_of_a_step_that_was_not_prepared_is_refused(make_pool, page_size, name):
    """Otherwise the tokens of one batch would go to the slots of another."""
    pool, ids = batch_pool(make_pool, page_size, [1, 1], room=4)
    with getattr(pool, name) as graph:
        pool.activate_step(ids[0])
        prepare(graph, 2, 1)
        other = pool.activate_step(ids[1])
        with unchanged(pool, *ids), unprepared():
            other.put(0, 1, *tokens_at(pool, [1], 1, 0))
        prepare(graph, 2, 1)
        put_tokens(pool, other, [1])
    np.testing.assert_array_equal(keys(pool, ids[1], 2), expected_keys(pool, (0, 2, COMMITTED)))


@either
def test_put_in_a_later_block_without_prepare_is_refused(make_pool, page_size, name):
    """Positions of the last block are not those of this one."""
    pool, ids = batch_pool(make_pool, page_size, [1], room=4)
    step = pool.activate_step(*ids)
    with getattr(pool, name) as graph:
        prepare(graph, 2, 1)
        put_tokens(pool, step, [1])
    put_tokens(pool, step, [2])
    with (
        unchanged(pool, *ids),
        getattr(pool, name),
        unprepared(),
    ):
        step.put(0, 3, *tokens_at(pool, [3], 1, 0))


# ---- no step


@either
def test_prepare_without_a_step_is_refused(make_pool, page_size, name):
    pool = case_pool(make_pool, page_size, 8)
    with (
        unchanged(pool),
        getattr(pool, name) as graph,
        pytest.raises(KVCacheStateError, match="step"),
    ):
        prepare(graph, 2, 1)


@either
def test_prepare_with_a_dead_step_is_refused(make_pool, page_size, name):
    pool, ids = batch_pool(make_pool, page_size, [1, 1], room=4)
    pool.activate_step(*ids)
    with getattr(pool, name) as graph:
        prepare(graph, 2, 1)
        before = contents(graph, 2)
        pool.unbind_request(ids[0])
        with unchanged(pool, ids[1]), pytest.raises(KVCacheStateError, match="step"):
            prepare(graph, 3, 2)
        assert contents(graph, 2) == before
        step = pool.activate_step(ids[1])
        prepare(graph, 3, 2)
        put_tokens(pool, step, [2])


@either
def test_put_after_a_row_of_the_step_ended_is_refused(make_pool, page_size, name):
    pool, ids = batch_pool(make_pool, page_size, [1, 1], room=4)
    step = pool.activate_step(*ids)
    with getattr(pool, name) as graph:
        prepare(graph, 2, 1)
        pool.unbind_request(ids[0])
        with unchanged(pool, ids[1]), pytest.raises(KVCacheStateError, match="dead"):
            step.put(0, 1, *tokens_at(pool, [1, 1], 1, 0))


@either
def test_close_within_the_block_ends_it_quietly(make_pool, page_size, name):
    pool, ids = batch_pool(make_pool, page_size, [1], room=4)
    step = pool.activate_step(*ids)
    with getattr(pool, name) as graph:
        prepare(graph, 2, 1)
        pool.close()
        with pytest.raises(KVCacheStateError, match="closed"):
            prepare(graph, 3, 2)
        with pytest.raises(KVCacheStateError, match="closed"):
            step.put(0, 1, *tokens_at(pool, [1], 1, 0))
    assert not graph.enabled


# ---- positions


# Ends and starts of the two rows; row 1's good ones are 2 P + 1 and 2 P.
BAD = {
    "past the capacity": (KVCacheExhaustedError, lambda p: ([2 * p + 1] * 2, [2 * p] * 2)),
    "length past it": (KVCacheExhaustedError, lambda p: ([2 * p + 1] * 2, [p, 2 * p])),
    "behind the length": (ValueError, lambda p: ([p, 2 * p + 1], [p, 2 * p])),
    "negative": (ValueError, lambda p: ([p, 2 * p + 1], [-1, 2 * p])),
    "on a shared page": (ValueError, lambda p: ([p + 1, p], [p, p - 1])),
    "too few rows": (ValueError, lambda p: ([p + 1], [p])),
    "too many rows": (ValueError, lambda p: ([2 * p] * 3, [2 * p - 1] * 3)),
}


@either
@pytest.mark.parametrize("circumstance", BAD)
def test_prepare_with_a_bad_position_changes_nothing(make_pool, page_size, name, circumstance):
    """Row 0 has two pages of its own; row 1 shares the first of its four with the tree."""
    error, make = BAD[circumstance]
    pool = case_pool(make_pool, page_size, 12)
    cache_prompt(pool, prompt_of(1, page_size))
    ids = [
        pool.bind_request(prompt_of(0, page_size), 2 * page_size),
        pool.bind_request(prompt_of(1, 2 * page_size), 4 * page_size),
    ]
    write(pool, ids[0], 0, page_size)
    write(pool, ids[1], page_size, 2 * page_size)
    pool.activate_step(*ids)
    with getattr(pool, name) as graph:
        prepare(graph, [page_size + 1, 2 * page_size + 1], [page_size, 2 * page_size])
        before = contents(graph, 2)
        with unchanged(pool, *ids), pytest.raises(error, match=r"\d"):
            prepare(graph, *make(page_size))
        assert contents(graph, 2) == before


@pytest.mark.parametrize("window_len", [0, -1])
def test_prepare_of_an_empty_window_is_refused(make_pool, page_size, window_len):
    pool, ids = batch_pool(make_pool, page_size, [1], room=4)
    pool.activate_step(*ids)
    with unchanged(pool, *ids), pool.verify_graph as graph, pytest.raises(ValueError, match=r"\d"):
        graph.prepare(2, 1, window_len)


def test_prepare_of_a_window_past_the_length_is_refused(make_pool, page_size):
    """cache lengths include the window: [1, 5) does not fit into 4."""
    pool, ids = batch_pool(make_pool, page_size, [1], room=8)
    pool.activate_step(*ids)
    with unchanged(pool, *ids), pool.verify_graph as graph, pytest.raises(ValueError, match="4"):
        graph.prepare(4, 1, 4)


@either
def test_put_of_another_number_of_rows_is_refused(make_pool, page_size, name):
    """Neither the three rows of the batch nor the four of the bucket."""
    pool, ids = batch_pool(make_pool, page_size, [1, 1, 1], room=4)
    step = pool.activate_step(*ids)
    with getattr(pool, name) as graph:
        prepare(graph, 2, 1)
        for rows in (1, 2, 5):
            k = np.ones((rows, 1, 2, 8), np.float32)
            with unchanged(pool, *ids), pytest.raises(ValueError, match=str(rows)):
                step.put(0, 1, k, -k)


# ---- blocks


@either
def test_leave_the_block_by_an_exception_turns_it_off(make_pool, page_size, name):
    pool, _ = batch_pool(make_pool, page_size, [1], room=4)
    with contextlib.suppress(ZeroDivisionError), getattr(pool, name):
        _ = 1 / 0
    assert not getattr(pool, name).enabled


@either
def test_nest_a_graph_in_itself_stays_enabled_to_the_outer_end(make_pool, page_size, name):
    pool, ids = batch_pool(make_pool, page_size, [1], room=4)
    step = pool.activate_step(*ids)
    with getattr(pool, name) as graph:
        with getattr(pool, name) as inner:
            assert inner is graph
        assert graph.enabled
        prepare(graph, 2, 1)
        put_tokens(pool, step, [1])
    assert not graph.enabled


def test_overlap_both_graphs_writes_where_the_latest_prepare_said(make_pool, page_size):
    """A draft step within a verify block: prepare comes first, whichever graph it is."""
    pool, ids = batch_pool(make_pool, page_size, [1, 1], room=8)
    step = pool.activate_step(*ids)
    with pool.verify_graph as verify:
        with pool.decode_graph as decode:
            assert (verify.enabled, decode.enabled) == (True, True)
            decode.prepare(2, 1)
            put_tokens(pool, step, [1, 1])
        assert (verify.enabled, decode.enabled) == (True, False)
        verify.prepare(5, 2, 3)
        put_tokens(pool, step, [2, 2], 3)
    assert (verify.enabled, decode.enabled) == (False, False)
    for i in ids:
        np.testing.assert_array_equal(keys(pool, i, 5), expected_keys(pool, (0, 5, COMMITTED)))
