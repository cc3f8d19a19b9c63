"""What kernels are shown: page tables, and what sealing and truncation do to them."""

import numpy as np
import pytest

from kvpool import KVCacheExhaustedError, KVCacheStateError
from tests.helpers.pools import (
    R,
    cache_prompt,
    case_pool,
    read,
    unchanged,
    values,
    write,
)

PAGE_SIZES = [1, 4, 16]


def arrays(table):
    """A table as three lists."""
    return tuple(
        np.asarray(x).tolist() for x in (table.indptr, table.indices, table.last_page_len)
    )


def expected_table(pool, rows, lengths):
    """The slow twin: the same three lists by comprehension."""
    size = pool.page_size
    counts = [-(-length // size) for length in lengths]
    ids = [np.asarray(pool.request(i).page_ids).tolist() for i in rows]
    return (
        [sum(counts[:n]) for n in range(len(counts) + 1)],
        [page for row, count in zip(ids, counts, strict=True) for page in row[:count]],
        [
            length - (count - 1) * size if length else 0
            for length, count in zip(lengths, counts, strict=True)
        ],
    )


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_page_table_is_what_a_comprehension_gives(make_pool, page_size):
    pool = case_pool(make_pool, page_size, 160 // page_size)
    cache_prompt(pool, R(1, 40))
    rows = [pool.bind_request(R(1, 41), 48) for _ in range(3)]
    for lengths in ([41, 1, 48], [16, 17, 0], [0, 0, 0], [48, 48, 48], [15, 32, 33]):
        step = pool.activate_step(*rows)
        for table in (step.page_table(lengths), step.build_page_table(lengths)):
            assert arrays(table) == expected_table(pool, rows, lengths)
            assert (table.page_size, table.batch_size) == (page_size, 3)
            for device, host in (
                (table.indptr, table.indptr_host),
                (table.last_page_len, table.last_page_len_host),
            ):
                assert np.asarray(device).dtype == np.int32
                assert np.asarray(device).tolist() == np.asarray(host).tolist()
            assert np.asarray(table.lengths_host).tolist() == lengths
            assert table.indices.dtype == np.int32


def test_page_table_is_shared_for_the_same_lengths(make_pool):
    pool = case_pool(make_pool, 4, 8)
    rows = [pool.bind_request(R(1, 4), 8) for _ in range(2)]
    step = pool.activate_step(*rows)
    assert step.current_page_table is None
    table = step.page_table([5, 6])
    assert step.page_table([5, 6]) is table
    assert step.page_table((5, 6)) is table
    assert step.page_table(np.array([5, 6])) is table
    assert step.current_page_table is table
    uniform = step.page_table(4)
    assert step.page_table([4, 4]) is uniform
    assert step.current_page_table is uniform
    own = step.build_page_table(4)
    assert own is not uniform
    assert step.current_page_table is uniform  # the caller's own table is not shared
    step.clear_page_table()
    assert step.current_page_table is None
    assert arrays(step.page_table(4)) == arrays(uniform)


def test_new_step_starts_without_a_table(make_pool):
    pool = case_pool(make_pool, 4, 8)
    a = pool.bind_request(R(1, 4), 8)
    pool.activate_step(a).page_table(4)
    assert pool.activate_step(a).current_page_table is None


def test_owned_page_table_is_not_bumped_by_a_seal(make_pool):
    pool = case_pool(make_pool, 4, 8)
    a = pool.bind_request(R(1, 6), 8)
    step = write(pool, a, 0, 6)
    own = step.build_page_table(6)
    shared = step.page_table(6)
    assert step.seal_length(5) is True
    assert arrays(own) == expected_table(pool, [a], [6])
    assert step.current_page_table is shared
    assert arrays(shared) == expected_table(pool, [a], [5])


@pytest.mark.parametrize(
    ("lengths", "max_pages"), [([5, 12], None), ([5, 12], 3), ([5, 12], 5), ([0, 1], 2)]
)
def test_block_table_is_padded_with_the_scratch_page(make_pool, lengths, max_pages):
    pool = case_pool(make_pool, 4, 8)
    rows = [pool.bind_request(R(1, 4), 12) for _ in range(2)]
    table = pool.activate_step(*rows).page_table(lengths)
    dense = table.block_table() if max_pages is None else table.block_table(max_pages)
    width = max_pages or 3  # 12 tokens are three pages
    assert dense.dtype == np.int32
    assert dense.shape == (2, width)
    for row, (request_id, length) in enumerate(zip(rows, lengths, strict=True)):
        used = np.asarray(pool.request(request_id).page_ids).tolist()[: -(-length // 4)]
        assert dense[row].tolist() == used + [8] * (width - len(used))  # page 8: scratch
    assert "scratch" in pool.page_owner(8)


def test_seal_bumps_in_place_only_when_no_row_changes_its_pages(make_pool):
    pool = case_pool(make_pool, 4, 8)
    rows = [pool.bind_request(R(1, 8), 12) for _ in range(2)]
    for i in rows:
        write(pool, i, 0, 12)
    step = pool.activate_step(*rows)
    table = step.page_table([11, 6])
    addresses = [x.ctypes.data for x in (table.indptr, table.indices, table.last_page_len)]
    assert step.seal_length([9, 5]) is True  # 3 and 2 pages, as before
    assert step.current_page_table is table
    assert [x.ctypes.data for x in (table.indptr, table.indices, table.last_page_len)] == addresses
    assert arrays(table) == expected_table(pool, rows, [9, 5])
    assert np.asarray(table.last_page_len_host).tolist() == [1, 1]
    assert np.asarray(table.lengths_host).tolist() == [9, 5]
    assert step.page_table([9, 5]) is table
    assert step.seal_length([8, 5]) is False  # row 0 loses its third page
    assert arrays(step.current_page_table) == expected_table(pool, rows, [8, 5])
    assert step.seal_length(5) is True
    assert arrays(step.current_page_table) == expected_table(pool, rows, [5, 5])


def test_seal_without_a_table_is_false(make_pool):
    pool = case_pool(make_pool, 4, 8)
    a = pool.bind_request(R(1, 6), 8)
    step = write(pool, a, 0, 6)
    assert step.seal_length(5) is False
    step.page_table(5)
    step.clear_page_table()
    assert step.truncate_to(5, 5) is False


def test_seal_lowers_valid_and_keeps_the_bytes(make_pool):
    pool = case_pool(make_pool, 4, 8)
    a = pool.bind_request(R(1, 6), 12)
    step = write(pool, a, 0, 6)
    step.seal_length(4)
    assert pool.valid_len(a) == 4
    assert pool.request(a).capacity == 12
    step.seal_length(10)  # above valid: legal, raises nothing
    assert pool.valid_len(a) == 4
    assert pool.finish_request(a, R(1, 6)) == 4


def test_truncate_per_row_zeroes_the_rejected_tails(make_pool):
    pool = case_pool(make_pool, 4, 8)
    rows = [pool.bind_request(R(1, 4), 12) for _ in range(2)]
    for i in rows:
        write(pool, i, 0, 8)
    step = pool.activate_step(*rows)
    step.page_table(8)
    assert step.truncate_to([5, 7], 8) is True  # two pages each, as before
    assert [pool.valid_len(i) for i in rows] == [5, 7]
    for i, kept in zip(rows, (5, 7), strict=True):
        own = pool.activate_step(i).slot_indices(8)
        for layer in range(2):
            key = pool.key_layer(layer)[own]
            assert key[:kept, 0, 0].tolist() == values(100 + 1000 * layer, 0, kept)
            assert not key[kept:].any()
            assert not pool.value_layer(layer)[own][kept:].any()
    assert arrays(step.current_page_table) == expected_table(pool, rows, [5, 7])
    assert step.truncate_to([5, 4], [5, 7]) is False  # row 1 loses a page


def test_truncate_with_zeroing_off_keeps_the_bytes_but_not_valid(make_pool):
    pool = case_pool(make_pool, 4, 8, zero_rejected_kv=False)
    assert not pool.zero_rejected_kv
    a = pool.bind_request(R(1, 6), 8)
    step = write(pool, a, 0, 6)
    step.truncate_to(4, 6)
    assert pool.valid_len(a) == 4
    own = step.slot_indices(6)
    assert pool.key_layer(0)[own][:, 0, 0].tolist() == values(100, 0, 6)
    assert pool.finish_request(a, R(1, 6)) == 4


def test_zeroing_follows_the_environment(make_pool, monkeypatch):
    monkeypatch.setenv("KVPOOL_ZERO_REJECTED_KV", "0")
    assert not case_pool(make_pool, 4, 4).zero_rejected_kv
    assert case_pool(make_pool, 4, 4, zero_rejected_kv=True).zero_rejected_kv
    monkeypatch.setenv("KVPOOL_ZERO_REJECTED_KV", "1")
    assert case_pool(make_pool, 4, 4).zero_rejected_kv
    monkeypatch.delenv("KVPOOL_ZERO_REJECTED_KV")
    assert case_pool(make_pool, 4, 4).zero_rejected_kv


def test_invalidate_zeroes_every_layer_of_the_range_only(make_pool):
    pool = case_pool(make_pool, 4, 8)
    rows = [pool.bind_request(R(1, 8), 8) for _ in range(2)]
    for i in rows:
        write(pool, i, 0, 8)
    step = pool.activate_step(*rows)
    step.invalidate_range([2, 8], [6, 8])  # row 1: an empty range
    assert [pool.valid_len(i) for i in rows] == [2, 8]
    own = pool.activate_step(rows[0]).slot_indices(8)
    for layer in range(2):
        key = pool.key_layer(layer)[own][:, 0, 0]
        assert key.tolist() == [
            *values(100 + 1000 * layer, 0, 2),
            *[0.0] * 4,
            *values(100 + 1000 * layer, 6, 8),
        ]
    assert read(pool, rows[1], 8) == values(100, 0, 8)


def test_verify_window_is_a_block(make_pool):
    pool = case_pool(make_pool, 4, 8)
    a = pool.bind_request(R(1, 6), 12)
    step = pool.activate_step(a)
    assert not step.in_verify_window
    with step.verify_window():
        assert step.in_verify_window
    assert not step.in_verify_window
    with pytest.raises(KeyError), step.verify_window():
        raise KeyError
    assert not step.in_verify_window
    assert not pool.activate_step(a).in_verify_window


def test_step_properties_and_require(make_pool):
    pool = case_pool(make_pool, 4, 8)
    a = pool.bind_request(R(1, 6), 8)
    b = pool.bind_request(R(1, 6), 12)
    step = pool.activate_step(b, a)
    assert list(step.request_ids) == [b, a]
    assert step.batch_size == 2
    assert list(step.capacities) == [12, 8]
    assert step.capacity == 8
    step.require(8)
    step.require(8, batch_size=2)
    with unchanged(pool, a, b), pytest.raises(KVCacheExhaustedError, match=r"8"):
        step.require(9)


def test_steps_live_side_by_side(make_pool):
    pool = case_pool(make_pool, 4, 8)
    a = pool.bind_request(R(1, 4), 8)
    b = pool.bind_request(R(50, 53), 8)
    step_a, step_b, both = (pool.activate_step(*ids) for ids in ((a,), (b,), (a, b)))
    assert pool.step is both
    assert step_a.page_table(4) is not step_b.page_table(4)
    pool.unbind_request(b)
    assert arrays(step_a.page_table(4)) == expected_table(pool, [a], [4])
    for dead in (step_b, both):
        with pytest.raises(KVCacheStateError):
            dead.page_table(4)
    with pytest.raises(KVCacheStateError):
        _ = pool.step


def test_step_sees_what_extend_added(make_pool):
    pool = case_pool(make_pool, 4, 8)
    a = pool.bind_request(R(1, 6), 8)
    write(pool, a, 0, 6)
    pool.extend_request(a, 12)
    write(pool, a, 6, 12)
    step = pool.activate_step(a)
    assert step.capacity == 12
    assert arrays(step.page_table(12)) == expected_table(pool, [a], [12])
    pool.shrink_request(a, 12)
    assert read(pool, a, 12) == values(100, 0, 12)
