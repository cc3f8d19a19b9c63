"""Integers at odd addresses and in the other byte order: read rightly, or refused."""

import numpy as np
import pytest

from kvpool_ext.tokens import as_tokens

PAGE_SIZE = 4


def odd(values, dtype=np.int64):
    """An array at an odd address, as a field of a packed record is."""
    raw = np.zeros(len(values) * np.dtype(dtype).itemsize + 1, np.uint8)
    array = raw[1:].view(dtype)
    array[...] = values
    assert not array.flags.aligned
    return array


def swapped(values, dtype=np.int64):
    return np.array(values, np.dtype(dtype).newbyteorder())


FORMS = [odd, swapped]


@pytest.fixture
def pool(make_pool):
    return make_pool(1, 32 * PAGE_SIZE, 1, 2, page_size=PAGE_SIZE)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_as_tokens_gives_what_c_may_read(form, dtype):
    tokens = as_tokens(form([3, 1, 2], dtype))
    assert tokens.tolist() == [3, 1, 2]
    assert tokens.dtype == np.int32
    assert tokens.flags.carray


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_bind_and_finish_take_any_array_of_tokens(pool, form, dtype):
    tokens = list(range(3 * PAGE_SIZE))
    request = pool.bind_request(form(tokens, dtype), 3 * PAGE_SIZE)
    pool.mark_written(request, len(tokens))
    assert pool.finish_request(request, form(tokens, dtype)) == len(tokens)
    assert pool.radix.match_prefix(tokens).length == len(tokens)


@pytest.mark.parametrize("form", FORMS)
def test_free_and_insert_take_any_array_of_pages(pool, form):
    slots = pool.alloc(2 * PAGE_SIZE)
    pool.free(form(slots))
    pages = pool.alloc(2 * PAGE_SIZE)[::PAGE_SIZE] // PAGE_SIZE
    pool.radix.insert(list(range(2 * PAGE_SIZE)), form(pages, np.int32))
    assert pool.radix.total_size == 2 * PAGE_SIZE


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_put_takes_any_array_of_row_boundaries(pool, form, dtype):
    """Those at odd addresses were not read: rows went where the last put had them."""
    step = pool.activate_step(pool.bind_request([1], 8), pool.bind_request([2], 8))
    rows = np.arange(14, dtype=np.float32).reshape(7, 1, 2) + 1
    step.put(0, 0, rows, rows, qo_indptr=np.array([0, 4, 7]))
    rows = rows + 100
    step.put(0, 0, rows, rows, qo_indptr=form([0, 2, 7], dtype))
    np.testing.assert_array_equal(step.get(0, 8)[0][0, :2], rows[:2])
    np.testing.assert_array_equal(step.get(0, 8)[0][1, :5], rows[2:])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_put_takes_any_array_of_slots_and_positions(pool, form, dtype):
    step = pool.activate_step(pool.bind_request([1], 8), pool.bind_request([2], 8))
    rows = np.arange(4, dtype=np.float32).reshape(2, 1, 1, 2) + 1
    slots = step.window_slot_indices(form([3, 5], dtype), 1)
    assert slots.tolist() == step.window_slot_indices([3, 5], 1).tolist()
    if form is odd:
        step.put(0, [3, 5], rows, -rows, slots=form(slots, dtype))
        np.testing.assert_array_equal(pool.key_layer(0)[slots], rows[:, 0])
    else:  # those of a device cannot be swapped on the way
        with pytest.raises(TypeError, match="expected int64 or int32"):
            step.put(0, [3, 5], rows, -rows, slots=form(slots, dtype))
    step.put(0, form([4, 6], dtype), rows, -rows)
    slots = step.window_slot_indices([4, 6], 1)
    np.testing.assert_array_equal(pool.value_layer(0)[slots], -rows[:, 0])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_lengths_may_be_any_array(pool, form, dtype):
    ids = [pool.bind_request([1], 8), pool.bind_request([2], 12)]
    step = pool.activate_step(*ids)
    table = step.build_page_table(form([5, 9], dtype))
    assert table.indptr.tolist() == [0, 2, 5]
    assert table.lengths_host.tolist() == [5, 9]
    for request, length in zip(ids, (5, 9), strict=True):
        pool.mark_written(request, length)
    step.seal_length(form([2, 7], dtype))
    assert [pool.valid_len(i) for i in ids] == [2, 7]
    table = pool.decode_graph.prepare(form([5, 9], dtype), form([4, 8], dtype))
    assert table.last_page_len.tolist() == [1, 1]
