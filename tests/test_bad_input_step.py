"""What a step refuses, with which numbers, and that a refused call has changed nothing."""

import numpy as np
import pytest

from kvpool import KVCacheExhaustedError, KVCacheStateError
from tests.helpers.pools import R, cache_prompt, case_pool, read, unchanged, values, window, write


@pytest.fixture
def pool(make_pool):
    return case_pool(make_pool, 4, 8)


@pytest.fixture
def rows(pool):
    """Two rows of capacity 8 and 12, written to 6 and 3."""
    a = pool.bind_request(R(1, 6), 8)
    b = pool.bind_request(R(50, 52), 12)
    write(pool, a, 0, 6)
    write(pool, b, 0, 3)
    return a, b


def ones(*shape, dtype=np.float32):
    return np.ones(shape, dtype)


@pytest.mark.parametrize(
    ("k_shape", "v_shape"),
    [
        ((1, 1, 2, 8), (1, 1, 2, 8)),  # batch 1, the step has two rows
        ((3, 1, 2, 8), (3, 1, 2, 8)),
        ((2, 1, 3, 8), (2, 1, 3, 8)),  # heads
        ((2, 1, 2, 7), (2, 1, 2, 7)),  # dim
        ((2, 1, 16), (2, 1, 16)),  # rank 3 without qo_indptr
        ((2, 2, 8), (2, 2, 8)),
        ((2, 1, 2, 8, 1), (2, 1, 2, 8, 1)),
        ((2, 1, 2, 8), (2, 2, 2, 8)),  # seqlen of k is not that of v
        ((2, 2, 2, 8), (2, 1, 2, 8)),
        ((2, 1, 2, 8), (2, 1, 1, 8)),
        ((2, 1, 2, 8), (2, 1, 2, 4)),
        ((), ()),
    ],
)
def test_put_with_wrong_shape_raises(pool, rows, k_shape, v_shape):
    step = pool.activate_step(*rows)
    with unchanged(pool, *rows), pytest.raises(ValueError, match=r"\d"):
        step.put(0, 3, ones(*k_shape), ones(*v_shape))


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint8, np.bool_, np.complex64])
def test_put_with_wrong_dtype_raises(pool, rows, dtype):
    step = pool.activate_step(*rows)
    good, bad = ones(2, 1, 2, 8), ones(2, 1, 2, 8, dtype=dtype)
    for k, v in ((bad, good), (good, bad), (bad, bad)):
        with (
            unchanged(pool, *rows),
            pytest.raises((TypeError, ValueError), match=np.dtype(dtype).name),
        ):
            step.put(0, 3, k, v)


def test_put_with_something_that_is_no_array_raises(pool, rows):
    step = pool.activate_step(*rows)
    for bad in (None, "k", 1.0, object()):
        with unchanged(pool, *rows), pytest.raises((TypeError, ValueError)):
            step.put(0, 3, bad, bad)


@pytest.mark.parametrize("layer", [-1, 2, 100])
def test_put_and_get_of_layers_out_of_range_raise(pool, rows, layer):
    step = pool.activate_step(*rows)
    with unchanged(pool, *rows), pytest.raises(ValueError, match=str(layer)):
        step.put(layer, 3, ones(2, 1, 2, 8), ones(2, 1, 2, 8))
    with unchanged(pool, *rows), pytest.raises(ValueError, match=str(layer)):
        step.get(layer, 3)


@pytest.mark.parametrize("start_pos", [[3], [3, 3, 3], [], [[3, 3]], -1, [3, -1], [3.5, 3.5], 3.5])
def test_put_with_wrong_start_positions_raises(pool, rows, start_pos):
    step = pool.activate_step(*rows)
    with unchanged(pool, *rows), pytest.raises((ValueError, TypeError)):
        step.put(0, start_pos, ones(2, 1, 2, 8), ones(2, 1, 2, 8))


def test_put_past_a_rows_capacity_raises(pool, rows):
    step = pool.activate_step(*rows)
    for start_pos, seqlen in ((8, 1), ([8, 3], 1), ([0, 12], 1), ([7, 3], 2), (0, 13)):
        k = ones(2, seqlen, 2, 8)
        with unchanged(pool, *rows), pytest.raises(KVCacheExhaustedError, match=r"8|12"):
            step.put(0, start_pos, k, k)


@pytest.mark.parametrize(
    "slots",
    [
        np.zeros(1, np.int64),  # two are needed
        np.zeros(3, np.int64),
        np.zeros((2, 1), np.int64),
        np.zeros(2, np.float32),
        np.zeros(2, np.bool_),
        np.array([0, 32]),  # num_slots is 32
        np.array([33, 0], np.int32),
        np.array([0, 2**40]),
    ],
)
def test_put_with_wrong_slots_raises(pool, rows, slots):
    step = pool.activate_step(*rows)
    with unchanged(pool, *rows), pytest.raises((ValueError, TypeError), match=r"\w"):
        step.put(0, 3, ones(2, 1, 2, 8), ones(2, 1, 2, 8), slots=slots)


@pytest.mark.parametrize(
    "qo_indptr",
    [
        [0, 3],  # too short: two rows want three
        [0, 1, 2, 3],
        [],
        [1, 2, 3],  # does not start at 0
        [0, 4, 3],  # decreases
        [0, -1, 3],
        [0, 1, 2],  # ends before nnz = 3
        [0, 1, 4],
        [[0, 1, 3]],
        [0.0, 1.0, 3.0],
    ],
)
def test_put_with_wrong_qo_indptr_raises(pool, rows, qo_indptr):
    step = pool.activate_step(*rows)
    with unchanged(pool, *rows), pytest.raises((ValueError, TypeError)):
        step.put(0, 3, ones(3, 2, 8), ones(3, 2, 8), qo_indptr=qo_indptr)


def test_ragged_put_past_capacity_or_with_four_dims_raises(pool, rows):
    step = pool.activate_step(*rows)
    with unchanged(pool, *rows), pytest.raises(KVCacheExhaustedError):
        step.put(0, [6, 3], ones(4, 2, 8), ones(4, 2, 8), qo_indptr=[0, 3, 4])  # row 0 to 9
    with unchanged(pool, *rows), pytest.raises(ValueError, match=r"\d"):
        step.put(0, 3, ones(3, 1, 2, 8), ones(3, 1, 2, 8), qo_indptr=[0, 1, 3])


def test_reads_and_tables_with_wrong_lengths_raise(pool, rows):
    step = pool.activate_step(*rows)
    for call in (
        lambda: step.get(0, 9),  # row 0 has capacity 8
        lambda: step.page_table(9),
        lambda: step.page_table([8, 13]),
        lambda: step.build_page_table([9, 1]),
        lambda: step.require(9),
        lambda: step.window_slot_indices(8, 1),
        lambda: step.window_slot_indices([0, 12], 1),
    ):
        with unchanged(pool, *rows), pytest.raises(KVCacheExhaustedError, match=r"\d"):
            call()
    for call in (
        lambda: step.get(0, -1),
        lambda: step.page_table(-1),
        lambda: step.page_table([1, -1]),
        lambda: step.page_table([1]),
        lambda: step.page_table([1, 1, 1]),
        lambda: step.build_page_table([1]),
        lambda: step.slot_indices(-1),
        lambda: step.window_slot_indices(-1, 1),
        lambda: step.window_slot_indices(0, -1),
        lambda: step.window_slot_indices([0], 1),
        lambda: step.window_slot_indices(0, [1, 1, 1]),
        lambda: step.require(-1),
        lambda: step.require(3, batch_size=3),
        lambda: step.get(0, 3, slots=np.zeros(5, np.int64)),
        lambda: step.get(0, 3, slots=np.full(6, 32, np.int64)),  # num_slots is 32
        lambda: step.get(0, 3, slots=np.zeros(6, np.float32)),
    ):
        with unchanged(pool, *rows), pytest.raises((ValueError, TypeError), match=r"\w"):
            call()


def test_seal_truncate_and_invalidate_with_wrong_ranges_raise(pool, rows):
    step = pool.activate_step(*rows)
    step.page_table([6, 3])
    for call in (
        lambda: step.seal_length(-1),
        lambda: step.seal_length(9),  # row 0 has capacity 8
        lambda: step.seal_length([1]),
        lambda: step.seal_length([1, 13]),
        lambda: step.invalidate_range(2, 1),
        lambda: step.invalidate_range([0, 2], [1, 1]),
        lambda: step.invalidate_range(-1, 1),
        lambda: step.invalidate_range(0, 9),
        lambda: step.invalidate_range([0, 0, 0], 1),
        lambda: step.truncate_to(4, 3),
        lambda: step.truncate_to([1, 4], 3),
        lambda: step.truncate_to(-1, 3),
        lambda: step.truncate_to(3, 9),
        lambda: step.truncate_to([3], 3),
    ):
        table = step.current_page_table
        contents = np.asarray(table.indptr).tolist(), np.asarray(table.last_page_len).tolist()
        with unchanged(pool, *rows), pytest.raises(ValueError, match=r"\d"):
            call()
        table = step.current_page_table
        assert (
            np.asarray(table.indptr).tolist(),
            np.asarray(table.last_page_len).tolist(),
        ) == contents


def test_writes_below_shared_pages_raise(pool):
    cache_prompt(pool, R(1, 8))
    a = pool.bind_request(R(1, 9), 12)
    assert pool.request(a).shared_len == 8
    step = pool.activate_step(a)
    k = ones(1, 2, 2, 8)
    for call in (
        lambda: step.put(0, 0, k, k),
        lambda: step.put(0, 7, k, k),  # 7 is shared, 8 is not
        lambda: step.put(0, [7], k, k),
        lambda: step.put(0, 7, k[0], k[0], qo_indptr=[0, 2]),
        lambda: step.invalidate_range(0, 4),
        lambda: step.invalidate_range(7, 9),
        lambda: step.truncate_to(7, 9),
        lambda: step.truncate_to(0, 8),
    ):
        with unchanged(pool, a), pytest.raises(ValueError, match="8"):
            call()
    assert read(pool, a, 8) == values(100, 0, 8)
    step.put(0, 8, k[:, :1], k[:, :1])


def test_one_shared_row_in_a_batch_refuses_the_whole_put(pool):
    cache_prompt(pool, R(1, 4))
    a = pool.bind_request(R(50, 53), 8)
    b = pool.bind_request(R(1, 5), 8)
    step = pool.activate_step(a, b)
    k = ones(2, 1, 2, 8)
    with unchanged(pool, a, b), pytest.raises(ValueError, match="4"):
        step.put(0, [0, 3], k, k)
    step.put(0, [0, 4], k, k)


def test_dead_step_refuses_every_method(pool, rows):
    a, b = rows
    step = pool.activate_step(a, b)
    pool.unbind_request(b)
    k = ones(2, 1, 2, 8)
    for call in (
        lambda: step.put(0, 6, k, k),
        lambda: step.get(0, 1),
        lambda: step.slot_indices(1),
        lambda: step.window_slot_indices(0, 1),
        lambda: step.page_table(1),
        lambda: step.build_page_table(1),
        lambda: step.seal_length(1),
        lambda: step.invalidate_range(0, 1),
        lambda: step.truncate_to(0, 1),
        lambda: step.require(1),
        lambda: step.verify_window().__enter__(),
        lambda: pool.step,
    ):
        with unchanged(pool, a), pytest.raises(KVCacheStateError):
            call()
    again = pool.activate_step(a)
    again.put(0, 6, *window(pool, 6, 7, 100))


def test_block_table_too_narrow_raises(pool, rows):
    table = pool.activate_step(*rows).page_table([6, 12])
    with pytest.raises(ValueError, match=r"2.*3|3.*2"):
        table.block_table(2)  # row 1 has three pages
