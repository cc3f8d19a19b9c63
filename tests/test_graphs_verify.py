"""VerifyGraph: windows of several tokens a row, and the buffers that may have to grow for them."""

import numpy as np
import pytest

from tests.helpers.graphs import batch_pool, put_tokens, scratch_slots, slots_at, tokens_at
from tests.helpers.pools import assert_ledger
from tests.helpers.speculation import (
    BATCHES,
    PAGE_SIZES,
    addresses,
    arrays,
    batch_rows,
    cached_tokens,
    expected_arrays,
    keys,
    prompt_of,
    rows_of,
    speculate,
    speculation_pool,
    table_addresses,
    window_len,
)

pytestmark = pytest.mark.parametrize("page_size", PAGE_SIZES)


def captured_windows(pool, ids, rows, layout):
    """The windows of `rows` through the graph; the step. `layout`: dense or ragged put."""
    step = pool.activate_step(*ids)
    size = rows[0].end - rows[0].start
    with pool.verify_graph as graph, step.verify_window():
        graph.prepare([row.end for row in rows], [row.start for row in rows], size)
        for layer in range(pool.num_layers):
            k, v = batch_rows(pool, rows, layer)
            if layout == "dense":
                step.put(layer, 0, k, v)
            else:
                k, v = (a.reshape(-1, *a.shape[2:]) for a in (k, v))
                step.put(layer, 0, k, v, qo_indptr=np.arange(len(rows) + 1) * size)
    return step


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("layout", ["dense", "ragged"])
def test_captured_window_is_the_eager_window(make_pool, page_size, batch, layout):
    """Same reads, page tables, written lengths and, in the end, the same tree."""
    rows = rows_of(batch, page_size)
    found = []
    for captured in (False, True):
        pool, ids = speculation_pool(make_pool, page_size, rows)
        step = (
            captured_windows(pool, ids, rows, layout) if captured else speculate(pool, ids, rows)
        )
        table = step.page_table([row.end for row in rows])
        bucket = table.batch_size if captured else None
        assert arrays(table) == expected_arrays(pool, ids, [row.end for row in rows], bucket)
        written = [pool.valid_len(i) for i in ids]
        step.truncate_to([row.sealed for row in rows], [row.end for row in rows])
        read = [keys(pool, i, row.end).tolist() for i, row in zip(ids, rows, strict=True)]
        valid = [pool.valid_len(i) for i in ids]
        for n, (i, row) in enumerate(zip(ids, rows, strict=True)):
            pool.finish_request(i, prompt_of(n, row.end))
        found.append((written, read, valid, cached_tokens(pool), pool.radix.format_tree()))
        assert_ledger(pool)
    assert found[0] == found[1]


def test_slots_of_a_window_are_row_by_row_and_padding_is_scratch(make_pool, page_size):
    lengths = [page_size, 2 * page_size + 1, 1]
    size = window_len(page_size)
    pool, ids = batch_pool(make_pool, page_size, lengths, room=size)
    pool.activate_step(*ids)
    with pool.verify_graph as graph:
        table = graph.prepare([n + size for n in lengths], lengths, size)
        slots = graph.write_slots()
        assert slots.shape == (4 * size,)
        assert slots.dtype == np.int64
        real = [
            s for i, n in zip(ids, lengths, strict=True) for s in slots_at(pool, i, n, n + size)
        ]
        assert slots.tolist()[: 3 * size] == real
        assert set(slots.tolist()[3 * size :]) <= set(scratch_slots(pool))
        assert table.last_page_len.tolist()[3] == 0


def test_put_of_a_window_takes_the_rows_of_the_bucket(make_pool, page_size):
    lengths = [page_size, 2 * page_size + 1, 1]
    pool, ids = batch_pool(make_pool, page_size, lengths, room=3)
    step = pool.activate_step(*ids)
    with pool.verify_graph as graph:
        graph.prepare([n + 3 for n in lengths], lengths, 3)
        pad = np.full((1, 3, 2, 8), -7, np.float32)
        for layer in range(pool.num_layers):
            k, v = (np.concatenate([a, pad]) for a in tokens_at(pool, lengths, 3, layer))
            step.put(layer, 0, k, v)
    assert not (pool.key_cache == -7).any()
    for i, n in zip(ids, lengths, strict=True):
        assert keys(pool, i, n + 3)[0].tolist() == [100.0 + p for p in range(n + 3)]


def test_prepare_uniform_lengths_as_ints(make_pool, page_size):
    pool, ids = batch_pool(make_pool, page_size, [page_size] * 2, room=3)
    pool.activate_step(*ids)
    with pool.verify_graph as graph:
        graph.prepare(page_size + 3, page_size, 3)
        uniform = arrays(graph.page_table()), graph.write_slots().tolist()
        graph.prepare([page_size + 3] * 2, [page_size] * 2, 3)
        assert (arrays(graph.page_table()), graph.write_slots().tolist()) == uniform


# ---- growth


def test_reallocated_is_told_once_when_a_longer_window_needs_more(make_pool, page_size):
    pool, ids = batch_pool(make_pool, page_size, [1] * 3, room=40)
    pool.activate_step(*ids)
    with pool.verify_graph as graph:
        graph.prepare(4, 1, 3)
        graph.take_reallocated()  # what the first prepare of a bucket says is its own affair
        graph.prepare(4, 1, 3)
        assert graph.take_reallocated() is False
        before = addresses(graph.write_slots())
        graph.prepare(2, 1, 1)  # a shorter window has room
        assert graph.take_reallocated() is False
        graph.prepare(34, 1, 33)
        grown = addresses(graph.write_slots()) != before
        assert graph.take_reallocated() is grown
        assert graph.take_reallocated() is False
        assert graph.write_slots().shape == (4 * 33,)


def test_reallocated_stays_false_over_boundaries_and_other_buckets(make_pool, page_size):
    """Whatever is replayed within the sizes seen so far, no captured graph must be discarded."""
    lengths = [page_size] * 5
    pool, ids = batch_pool(make_pool, page_size, lengths, room=40)
    with pool.verify_graph as graph:
        seen = {}
        for round_ in range(16):
            batch = (5, 1, 3, 2)[round_ % 4]
            step = pool.activate_step(*ids[:batch])
            starts = lengths[:batch]
            table = graph.prepare([n + 4 for n in starts], starts, 4)
            here = (*table_addresses(table), *addresses(graph.write_slots()))
            first = graph.bucket(batch) not in seen
            assert seen.setdefault(graph.bucket(batch), here) == here
            assert first or not graph.take_reallocated()
            graph.take_reallocated()
            put_tokens(pool, step, starts, 4)
            lengths[:batch] = [n + 2 for n in starts]
            step.truncate_to(lengths[:batch], [n + 4 for n in starts])


def test_table_at_a_new_address_is_always_told(make_pool, page_size):
    """The rule that a holder of captured graphs lives by, over windows and batches at random."""
    rng = np.random.default_rng(page_size)
    pool, ids = batch_pool(make_pool, page_size, [1] * 9, room=40)
    with pool.verify_graph as graph:
        seen = {}
        for _ in range(60):
            batch, size = int(rng.integers(1, 10)), int(rng.integers(1, 9))
            pool.activate_step(*ids[:batch])
            table = graph.prepare(1 + size, 1, size)
            here = (*table_addresses(table), *addresses(graph.write_slots()))
            bucket = graph.bucket(batch)
            if graph.take_reallocated():
                seen.pop(bucket, None)
            assert seen.setdefault(bucket, here) == here


# ---- queries


def test_qo_indptr_counts_windows_and_moves_only_with_its_bucket(make_pool, page_size):
    pool, ids = batch_pool(make_pool, page_size, [1] * 3, room=40)
    pool.activate_step(*ids)
    with pool.verify_graph as graph:
        found = graph.qo_indptr(3, 4)
        assert found.dtype == np.int32
        assert found.tolist() == [0, 4, 8, 12, 16]
        where = addresses(found)
        for n in range(8):
            graph.prepare(n + 5, n + 1, 4)
            assert addresses(graph.qo_indptr(3, 4)) == where
        assert addresses(graph.qo_indptr(4, 4)) == where  # the same bucket
        other = graph.qo_indptr(3, 5)
        assert other.tolist() == [0, 5, 10, 15, 20]
        assert graph.qo_indptr(1, 4).tolist() == [0, 4]
        assert graph.qo_indptr(3, 4).tolist() == [0, 4, 8, 12, 16]
        assert found.tolist() == [0, 4, 8, 12, 16]  # a capture may still hold it
