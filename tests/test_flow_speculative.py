"""Taking tokens back after a speculative reject, eagerly: seal, truncate, invalidate.

`tests/test_graphs_speculative.py` does the same with captured windows.
"""

import numpy as np
import pytest

from kvpool import KVCacheExhaustedError
from tests.helpers.pools import R, assert_ledger, cache_prompt, case_pool, unchanged, write
from tests.helpers.speculation import (
    BATCHES,
    CAPACITY,
    COMMITTED,
    PAGE_SIZES,
    REJECTED,
    arrays,
    expected_arrays,
    expected_keys,
    keys,
    prompt_of,
    rows_of,
    speculate,
    speculation_pool,
    stays_in_place,
    table_addresses,
)

pytestmark = [
    pytest.mark.parametrize("page_size", PAGE_SIZES),
]
batches = pytest.mark.parametrize("batch", BATCHES)
zeroing = pytest.mark.parametrize("zero_rejected_kv", [True, False])


def sealed(rows):
    return [row.sealed for row in rows]


def ends(rows):
    return [row.end for row in rows]


# ---- the page table


@batches
@pytest.mark.parametrize("verb", ["seal_length", "truncate_to"])
def test_take_back_a_tail_tells_whether_the_table_was_bumped(make_pool, page_size, batch, verb):
    rows = rows_of(batch, page_size)
    pool, ids = speculation_pool(make_pool, page_size, rows)
    step = speculate(pool, ids, rows)
    table = step.current_page_table
    before, version = table_addresses(table), table.version
    extra = (ends(rows),) if verb == "truncate_to" else ()
    answer = getattr(step, verb)(sealed(rows), *extra)
    assert answer is stays_in_place(rows, page_size)
    now = step.current_page_table
    assert arrays(now) == expected_arrays(pool, ids, sealed(rows))
    assert now.lengths_host.tolist() == sealed(rows)
    assert step.page_table(sealed(rows)) is now
    if answer:
        assert now is table
        assert table_addresses(now) == before
        assert now.version > version


@batches
def test_rebuild_of_a_table_leaves_the_old_one_as_it_was(make_pool, page_size, batch):
    rows = rows_of(batch, page_size)
    pool, ids = speculation_pool(make_pool, page_size, rows)
    step = speculate(pool, ids, rows)
    table = step.current_page_table
    if not step.truncate_to(sealed(rows), ends(rows)):
        assert step.current_page_table is not table
        assert arrays(table) == expected_arrays(pool, ids, ends(rows))


@batches
def test_take_back_a_tail_without_a_table_answers_false(make_pool, page_size, batch):
    rows = rows_of(batch, page_size)
    pool, ids = speculation_pool(make_pool, page_size, rows)
    step = speculate(pool, ids, rows)
    step.clear_page_table()
    assert step.truncate_to(sealed(rows), ends(rows)) is False
    assert step.seal_length(sealed(rows)) is False
    assert step.current_page_table is None
    assert [pool.valid_len(i) for i in ids] == sealed(rows)


def test_bump_after_the_tail_grew_again_is_true_only_within_the_page(make_pool, page_size):
    """The table goes 1 token back and P - 1 forward, then over the boundary."""
    pool = case_pool(make_pool, page_size, 6)
    a = pool.bind_request(R(1, 2 * page_size), 6 * page_size)
    step = write(pool, a, 0, 2 * page_size)
    step.page_table(2 * page_size)
    assert step.seal_length(2 * page_size - 1) is (page_size > 1)
    assert step.seal_length(2 * page_size) is (page_size > 1)
    assert step.seal_length(2 * page_size + 1) is False
    assert arrays(step.current_page_table) == expected_arrays(pool, [a], [2 * page_size + 1])


def test_seal_that_moves_a_page_from_row_to_row_is_no_bump(make_pool, page_size):
    """As many pages as before, but row 1 has one more and row 0 one less."""
    pool = case_pool(make_pool, page_size, 8)
    ids = [pool.bind_request(prompt_of(i, 2 * page_size), 3 * page_size) for i in range(2)]
    for i in ids:
        write(pool, i, 0, 2 * page_size)
    step = pool.activate_step(*ids)
    step.page_table([2 * page_size + 1, 2 * page_size])
    after = [2 * page_size, 2 * page_size + 1]
    assert step.seal_length(after) is False
    assert arrays(step.current_page_table) == expected_arrays(pool, ids, after)


# ---- what is read, and what counts as written


@batches
@zeroing
def test_truncate_keeps_what_was_accepted_and_zeroes_if_told_to(
    make_pool, page_size, batch, zero_rejected_kv
):
    rows = rows_of(batch, page_size)
    pool, ids = speculation_pool(make_pool, page_size, rows, zero_rejected_kv=zero_rejected_kv)
    speculate(pool, ids, rows).truncate_to(sealed(rows), ends(rows))
    tail = None if zero_rejected_kv else REJECTED
    for i, row in zip(ids, rows, strict=True):
        assert pool.valid_len(i) == row.sealed
        assert pool.request(i).capacity == CAPACITY * page_size
        np.testing.assert_array_equal(
            keys(pool, i, row.end),
            expected_keys(pool, (0, row.sealed, COMMITTED), (row.sealed, row.end, tail)),
        )
    assert_ledger(pool)


@batches
def test_seal_lowers_valid_and_changes_no_byte(make_pool, page_size, batch):
    rows = rows_of(batch, page_size)
    pool, ids = speculation_pool(make_pool, page_size, rows)
    step = speculate(pool, ids, rows)
    bytes_before = pool.key_cache.tobytes(), pool.value_cache.tobytes()
    step.seal_length(sealed(rows))
    assert (pool.key_cache.tobytes(), pool.value_cache.tobytes()) == bytes_before
    assert [pool.valid_len(i) for i in ids] == sealed(rows)


@batches
@zeroing
def test_invalidate_zeroes_its_range_whatever_the_pool_says(
    make_pool, page_size, batch, zero_rejected_kv
):
    """From the last accepted token on, so that committed data is taken back too."""
    rows = rows_of(batch, page_size)
    pool, ids = speculation_pool(make_pool, page_size, rows, zero_rejected_kv=zero_rejected_kv)
    step = speculate(pool, ids, rows)
    table = arrays(step.current_page_table)
    spans = [(row.sealed - 1, max(row.sealed, row.end - 1)) for row in rows]
    step.invalidate_range(*(list(side) for side in zip(*spans, strict=True)))
    assert arrays(step.current_page_table) == table  # the page table is not its business
    for i, row, (start, end) in zip(ids, rows, spans, strict=True):
        assert pool.valid_len(i) == start
        kept = [(0, start, COMMITTED), (start, end, None), (end, row.end, REJECTED)]
        np.testing.assert_array_equal(keys(pool, i, row.end), expected_keys(pool, *kept))


@batches
def test_write_after_a_reject_replaces_the_tail_and_goes_on(make_pool, page_size, batch):
    rows = rows_of(batch, page_size)
    pool, ids = speculation_pool(make_pool, page_size, rows)
    speculate(pool, ids, rows).truncate_to(sealed(rows), ends(rows))
    for i, row in zip(ids, rows, strict=True):
        write(pool, i, row.sealed, row.end + 1, COMMITTED)
        assert pool.valid_len(i) == row.end + 1
        np.testing.assert_array_equal(
            keys(pool, i, row.end + 1), expected_keys(pool, (0, row.end + 1, COMMITTED))
        )


def test_truncate_of_one_layers_window_leaves_the_others_shorter(make_pool, page_size):
    """Layer 1 never wrote the window: it is taken back to where it was, and no further."""
    pool = case_pool(make_pool, page_size, 6)
    a = pool.bind_request(R(1, page_size), 6 * page_size)
    step = write(pool, a, 0, page_size)
    k = np.ones((1, page_size + 2, 2, 8), np.float32)
    step.put(0, page_size, k, -k)
    step.truncate_to(page_size + 1, 2 * page_size + 2)
    assert pool.valid_len(a) == page_size
    step.put(1, page_size, k, -k)
    assert pool.valid_len(a) == page_size + 1


@pytest.mark.parametrize("verb", ["seal_length", "truncate_to", "invalidate_range"])
@pytest.mark.parametrize("layer", [0, 1])
def test_write_of_one_layer_after_a_reject_brings_nothing_back(make_pool, page_size, verb, layer):
    """The tail is taken back on every layer, so it counts again when every layer wrote it."""
    rows = rows_of("ragged", page_size)
    pool, ids = speculation_pool(make_pool, page_size, rows)
    step = speculate(pool, ids, rows)
    extra = (ends(rows),) if verb != "seal_length" else ()
    getattr(step, verb)(sealed(rows), *extra)
    lens = [row.end - row.sealed for row in rows]
    k = np.ones((sum(lens), 2, 8), np.float32)
    indptr = np.concatenate([[0], np.cumsum(lens)])
    step.put(layer, sealed(rows), k, -k, qo_indptr=indptr)
    assert [pool.valid_len(i) for i in ids] == sealed(rows)
    step.put(1 - layer, sealed(rows), k, -k, qo_indptr=indptr)
    assert [pool.valid_len(i) for i in ids] == ends(rows)


# ---- refused calls


@pytest.mark.parametrize(
    "call",
    [
        lambda step, p: step.seal_length([2 * p, p - 1]),
        lambda step, p: step.truncate_to([2 * p, p - 1], [3 * p, p - 1]),
        lambda step, p: step.truncate_to([2 * p, p - 1], 3 * p),
        lambda step, p: step.invalidate_range([2 * p, p - 1], [3 * p, 2 * p]),
        lambda step, p: step.invalidate_range(0, 3 * p),
    ],
)
def test_take_back_below_the_shared_prefix_changes_nothing(make_pool, page_size, call):
    """Row 1 shares its first page with the tree; row 0 alone could have been taken back."""
    pool = case_pool(make_pool, page_size, 12)
    cache_prompt(pool, prompt_of(1, page_size))
    ids = [pool.bind_request(prompt_of(i, 2 * page_size), 4 * page_size) for i in range(2)]
    for i in ids:
        write(pool, i, pool.matched_prefix_len(i), 3 * page_size)
    assert [pool.request(i).shared_len for i in ids] == [0, page_size]
    step = pool.activate_step(*ids)
    table = step.page_table(3 * page_size)
    before = arrays(table)
    with unchanged(pool, *ids), pytest.raises(ValueError, match=rf"\b{page_size}\b"):
        call(step, page_size)
    assert step.current_page_table is table
    assert arrays(table) == before


@pytest.mark.parametrize(
    "call",
    [
        lambda step, p: step.seal_length([3 * p, 4 * p + 1]),
        lambda step, p: step.seal_length([-1, 3 * p]),
        lambda step, p: step.truncate_to([p, 2 * p], [2 * p, 2 * p - 1]),
        lambda step, p: step.truncate_to([p, 2 * p], 4 * p + 1),
        lambda step, p: step.invalidate_range([p, 2 * p], [2 * p, p]),
        lambda step, p: step.invalidate_range(p, [2 * p, 4 * p + 1]),
    ],
)
def test_take_back_of_a_wrong_range_changes_nothing(make_pool, page_size, call):
    pool = case_pool(make_pool, page_size, 12)
    ids = [pool.bind_request(prompt_of(i, 2 * page_size), 4 * page_size) for i in range(2)]
    for i in ids:
        write(pool, i, 0, 3 * page_size)
    step = pool.activate_step(*ids)
    table = step.page_table(3 * page_size)
    before = arrays(table)
    with unchanged(pool, *ids), pytest.raises(ValueError, match=r"capacity|-1"):
        call(step, page_size)
    assert arrays(step.current_page_table) == before


def test_put_of_a_window_past_the_capacity_changes_nothing(make_pool, page_size):
    pool = case_pool(make_pool, page_size, 12)
    ids = [pool.bind_request(prompt_of(i, page_size), 2 * page_size) for i in range(2)]
    for i in ids:
        write(pool, i, 0, page_size)
    step = pool.activate_step(*ids)
    k = np.ones((2 * page_size + 1, 2, 8), np.float32)
    with unchanged(pool, *ids), pytest.raises(KVCacheExhaustedError, match=str(2 * page_size + 1)):
        step.put(0, page_size, k, -k, qo_indptr=[0, page_size, 2 * page_size + 1])
