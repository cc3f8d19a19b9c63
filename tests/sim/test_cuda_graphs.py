"""Graph buffers of a CUDA pool under the simulator equal those of a CPU pool, call by call."""

import numpy as np
import pytest

from kvpool import KVCacheStateError
from tests.fakes import cupy_like
from tests.sim.test_cuda_pool import assert_twins, cupy, host, rows, same, twins  # noqa: F401

pytestmark = pytest.mark.sim


@pytest.fixture
def pools(cupy, make_pool):  # noqa: F811
    """A CPU pool and a CUDA pool with three requests of 5 tokens each, written."""
    made = twins(make_pool, num_slots=96, max_batch_size=8, max_seq_len=24, dtype="bfloat16")
    for pool in made:
        ids = [pool.bind_request(range(i, i + 5), 24) for i in range(3)]
        step = pool.activate_step(ids)
        k = pool.array_namespace.asarray(rows((3, 5, 2, 8), 1))
        for layer in range(2):
            step.put(layer, 0, k, k)
    return made


def call(pools, function):
    """The same call on both pools."""
    return [function(pool) for pool in pools]


def assert_same_buffers(tables, slots):
    for name in ("indptr", "last_page_len"):
        same(*(getattr(table, name) for table in tables))
        same(getattr(tables[1], name), getattr(tables[1], f"{name}_host"))
    assert tables[0].lengths_host.tolist() == tables[1].lengths_host.tolist()
    used = int(tables[0].indptr_host[-1])
    same(*(table.indices[:used] for table in tables))
    same(*(table.block_table() for table in tables))
    same(*slots)


def test_decode_graph_equals_the_cpu_pools_over_pages_and_padding(pools):
    addresses = set()
    for length in range(6, 15):  # from page 1 to page 3
        lengths = [length, length - 1, length]
        k = rows((4, 1, 2, 8), length)
        tables = []
        for pool in pools:
            with pool.decode_graph as graph:
                tables.append(graph.prepare(lengths, np.array(lengths) - 1))
                there = pool.array_namespace.asarray(k)
                for layer in range(2):
                    pool.step.put(layer, 0, there, there)
        slots = call(pools, lambda pool: pool.decode_graph.write_slots(3))
        assert_same_buffers(tables, slots)
        table = tables[1]
        arrays = (table.indptr, table.indices, table.last_page_len, slots[1])
        addresses.add(tuple(array.data.ptr for array in arrays))
        assert_twins(pools)
        assert len({tuple(map(pool.valid_len, pool.step.request_ids)) for pool in pools}) == 1
    assert len(addresses) == 1


def test_verify_graph_equals_the_cpu_pools_with_rejects(pools):
    lengths = np.array([5, 5, 5])
    for accepted in ([1, 3, 2], [3, 1, 1], [2, 2, 3]):
        k = rows((9, 2, 8), int(lengths.sum()))
        tables, answers = [], []
        for pool in pools:
            with pool.verify_graph as graph:
                tables.append(graph.prepare(lengths + 3, lengths, 3))
                there = pool.array_namespace.asarray(k)
                for layer in range(2):
                    pool.step.put(layer, 0, there, there, qo_indptr=[0, 3, 6, 9])
                answers.append(pool.step.truncate_to(lengths + accepted, lengths + 3))
        assert answers[0] == answers[1]
        assert_same_buffers(tables, call(pools, lambda pool: pool.verify_graph.write_slots()))
        same(*call(pools, lambda pool: pool.verify_graph.qo_indptr(3, 3)))
        assert_twins(pools)
        lengths = lengths + accepted


def test_pages_that_came_later_are_in_the_table(pools):
    for pool in pools:
        pool.decode_graph.prepare(6, 5)
        short, long = pool.step.request_ids[:2]
        pool.shrink_request(short, 8)
        pool.extend_request(long, 32)
        pool.extend_request(short, 16)
        pool.bind_request(range(7), 12)
    tables = call(pools, lambda pool: pool.decode_graph.prepare([13, 20, 6], [12, 19, 5]))
    assert_same_buffers(tables, call(pools, lambda pool: pool.decode_graph.write_slots(3)))


def test_prefetch_writes_to_scratch_and_restores(pools):
    tables = call(pools, lambda pool: pool.decode_graph.prepare(6, 5))
    before = [host(pool.key_cache).copy() for pool in pools]
    for pool in pools:
        with pool.decode_graph.prefetch(9, 8, 3):
            k = pool.array_namespace.asarray(rows((4, 1, 2, 8), 3))
            pool.step.put(0, 8, k, k)
    for pool, was in zip(pools, before, strict=True):
        np.testing.assert_array_equal(host(pool.key_cache), was)
    assert_same_buffers(tables, call(pools, lambda pool: pool.decode_graph.write_slots(3)))
    assert tables[0].lengths_host.tolist() == [6, 6, 6, 0]


def test_capture_puts_through_the_prepared_slots_and_prepares_nothing(pools):
    pool = pools[1]
    k = pool.array_namespace.asarray(rows((4, 1, 2, 8), 3))
    pool.warm_up()
    with pool.decode_graph as graph:
        table = graph.prepare(6, 5)
        with cupy_like.capture():
            for layer in range(2):
                pool.step.put(layer, 5, k, k)
            assert pool.step.page_table(6) is table
            with pytest.raises(KVCacheStateError, match="capture"):
                graph.prepare(7, 6)
            pool.step.put(0, 5, k, k)  # the refused call has changed nothing
        assert cupy_like.State.events == []
    with pools[0].decode_graph as graph:
        graph.prepare(6, 5)
        for layer in range(2):
            pools[0].step.put(layer, 5, k.get(), k.get())
    assert_twins(pools)
