"""FlashInfer over the fixed table of a graph's bucket: planned before capture and replay."""

import numpy as np
import pytest

from kvpool import KVCacheStateError
from kvpool.attention import PagedAttention, paged_attention
from kvpool.interop.torch import pool_tensors, warm_up
from tests.fakes import cupy_like, flashinfer_like, torch_like
from tests.fakes.flashinfer_like import State
from tests.interop.pools import (
    DIM,
    HEADS,
    LAYERS,
    PAGE,
    Q_HEADS,
    Bucket,
    assert_close,
    random_q,
    twins,
)

BUCKET = 4


@pytest.fixture
def pools(make_pool, torch, flashinfer):
    return twins(make_pool)


def made():
    """The wrappers that were made."""
    return [wrapper for name, wrapper, _ in State.calls if name == "make"]


@pytest.mark.parametrize("window", [None, 3])
def test_captured_loop_equals_the_cpu_pool_across_page_boundaries(pools, torch, window):
    buckets = [Bucket(pool, BUCKET) for pool in pools]
    tables = [bucket.prepare([5, 8, 3]) for bucket in buckets]
    qo_indptr = None if window is None else np.arange(BUCKET + 1) * window
    here, there = (
        PagedAttention(pool, table, qo_indptr=qo_indptr)
        for pool, table in zip(pools, tables, strict=True)
    )
    q, q_there = random_q(torch, BUCKET * (window or 1))
    outs = [torch.empty_like(q_there) for _ in range(LAYERS)]
    there.plan(Q_HEADS, torch.bfloat16)
    with cupy_like.capture():
        for layer, out in enumerate(outs):
            assert there.run(layer, q_there, out) is out
    assert not cupy_like.State.events
    assert len(State.captured) == LAYERS
    for lengths in ([5, 8, 3], [6, 9, 4], [7, 10, 5], [8, 11, 6], [9, 12]):
        for bucket in buckets:
            bucket.prepare(lengths)
        there.plan()
        flashinfer_like.replay()
        for layer, out in enumerate(outs):
            assert_close(out, here.run(layer, q))
            padding = slice(len(lengths) * (window or 1), None)
            assert not out.host[padding].any()  # zeros, which a model may go on with
    assert len(made()) == 1
    assert made()[0].graph
    assert State.count("plan") == 6  # the first, and one for each prepare


def test_wrapper_works_on_the_arrays_of_the_table(pools, torch):
    _, pool = pools
    table = Bucket(pool, BUCKET).prepare([5, 8])
    for qo_indptr in (None, np.arange(BUCKET + 1) * 2):
        PagedAttention(pool, table, qo_indptr=qo_indptr).plan(Q_HEADS, "bfloat16")
    for wrapper in made():
        for name in ("indptr", "indices", "last_page_len"):
            assert wrapper.buffers[name].data_ptr() == getattr(table, name).data.ptr
    decode, verify = made()
    assert "qo_indptr" not in decode.buffers
    assert verify.buffers["qo_indptr"].host.tolist() == [0, 2, 4, 6, 8]
    # Padding rows have no pages, which the planner without tensor cores does not count.
    assert decode.use_tensor_cores
    assert decode.ints.numel() == 2**20
    assert decode.ints.data_ptr() != verify.ints.data_ptr()
    assert decode.floats is verify.floats


def test_each_bucket_and_window_has_a_wrapper_of_its_own_and_keeps_it(pools, torch):
    _, pool = pools
    tables = [Bucket(pool, size).prepare([5]) for size in (1, 2)]
    attentions = [
        PagedAttention(pool, table, qo_indptr=window and np.arange(table.batch_size + 1) * window)
        for table in tables
        for window in (None, 1, 2)
    ]
    for _ in range(2):
        for attention in attentions:
            attention.plan(Q_HEADS, "bfloat16")
    assert len(made()) == State.count("plan") == 6


def test_first_plan_runs_once_so_that_nothing_is_loaded_in_a_capture(pools, torch):
    _, pool = pools
    table = Bucket(pool, BUCKET).prepare([5])
    attention = PagedAttention(pool, table)
    attention.plan(Q_HEADS, "bfloat16")
    assert State.count("run") == 1
    table.version += 1
    attention.plan()
    assert State.count("run") == 1


def test_run_in_a_capture_without_a_plan_says_what_to_call(pools, torch):
    _, pool = pools
    bucket = Bucket(pool, BUCKET)
    table = bucket.prepare([5])
    _, q = random_q(torch, BUCKET)
    out = torch.empty_like(q)
    attention = PagedAttention(pool, table)
    warm_up(pool)
    text = r"planned while the stream is in graph capture: call PagedAttention\.plan"
    with cupy_like.capture(), pytest.raises(KVCacheStateError, match=text):
        attention.run(0, q, out)
    attention.plan(Q_HEADS, "bfloat16")
    bucket.prepare([6])
    with cupy_like.capture(), pytest.raises(KVCacheStateError, match=text):
        attention.run(0, q, out)
    attention.plan()
    with cupy_like.capture():
        attention.run(0, q, out)
        paged_attention(q, pool, 1, table, out=out)  # the same plan, found again
    assert len(State.captured) == 2


def test_wrapper_planned_for_another_scale_cannot_be_captured(pools, torch):
    here, pool = pools
    table = Bucket(pool, BUCKET).prepare([5])
    _, q = random_q(torch, BUCKET)
    out = torch.empty_like(q)
    first, second = (PagedAttention(pool, table, scale=scale) for scale in (0.1, 0.2))
    for attention in (first, second):
        attention.plan(Q_HEADS, torch.bfloat16)
    with cupy_like.capture(), pytest.raises(KVCacheStateError, match="graph capture"):
        first.run(0, q, out)
    expected = paged_attention(q.host, here, 0, Bucket(here, BUCKET).prepare([5]), scale=0.1)
    assert_close(first.run(0, q, out), expected)  # outside of one it just plans again


def test_replay_after_a_prepare_that_nobody_planned_is_noticed_by_the_stand_in(pools, torch):
    # No library can notice it: a replay runs no Python. So it is a rule, and the stand-in has it.
    _, pool = pools
    bucket = Bucket(pool, BUCKET)
    attention = PagedAttention(pool, bucket.prepare([5]))
    _, q = random_q(torch, BUCKET)
    attention.plan(Q_HEADS, torch.bfloat16)
    out = torch.empty_like(q)
    with cupy_like.capture():
        attention.run(0, q, out)
    bucket.prepare([6])
    with pytest.raises(AssertionError, match="row 0 was planned for 5 positions"):
        flashinfer_like.replay()


def test_plan_of_another_bucket_leaves_a_captured_graph_alone(pools, torch):
    here, pool = pools
    small, large = Bucket(pool, 1), Bucket(pool, 2)
    attentions = [PagedAttention(pool, bucket.prepare([5])) for bucket in (small, large)]
    _, q = random_q(torch, 1)
    out = torch.empty_like(q)
    attentions[0].plan(Q_HEADS, torch.bfloat16)
    with cupy_like.capture():
        attentions[0].run(0, q, out)
    attentions[1].plan(Q_HEADS, torch.bfloat16)
    flashinfer_like.replay()
    expected = paged_attention(q.host, here, 0, Bucket(here, 1).prepare([5]))
    assert_close(out, expected)


def test_table_with_other_arrays_gets_another_wrapper(pools, torch):
    _, pool = pools
    bucket = Bucket(pool, BUCKET)
    table = bucket.prepare([5])
    attention = PagedAttention(pool, table)
    attention.plan(Q_HEADS, "bfloat16")
    table._indices_host = np.zeros(BUCKET * Bucket.MAX_PAGES, np.int32)
    table.indices = pool.device.to_device(table.indices_host)  # it had to grow
    bucket.prepare([6])
    attention.plan()
    assert len(made()) == 2
    assert made()[1].buffers["indices"].data_ptr() == table.indices.data.ptr


def test_rows_with_fewer_positions_than_queries_raise_unless_they_are_padding(pools, torch):
    for pool in pools:
        bucket = Bucket(pool, 2)
        attention = PagedAttention(pool, bucket.prepare([4]), qo_indptr=[0, 3, 6])
        bucket.prepare([4, 2])
        with pytest.raises(ValueError, match="row 1 has 3 queries over 2 positions"):
            attention.plan(Q_HEADS, "bfloat16")


def test_late_releases_are_told_of_windows_that_are_all_alike(pools, flashinfer, monkeypatch):
    told = []

    class Late(flashinfer.BatchPrefillWithPagedKVCacheWrapper):
        def plan(self, *, uniform_q_len=None, **arguments):
            told.append(uniform_q_len)
            super().plan(**arguments)

    monkeypatch.setattr(flashinfer, Late.__mro__[1].__name__, Late)
    _, pool = pools
    table = Bucket(pool, 2).prepare([5, 5])
    for qo_indptr in ([0, 3, 6], [0, 2, 6], [0, 0, 6]):
        PagedAttention(pool, table, qo_indptr=qo_indptr, causal=False).plan(Q_HEADS, "bfloat16")
    assert told == [3, None, None]
    assert len(made()) == 2  # a graph is captured for the one or for the other


def test_workspace_that_is_too_small_is_replaced_and_kept_for_its_graphs(pools, monkeypatch):
    monkeypatch.setattr("kvpool.interop.flashinfer.DEFAULT_WORKSPACE_BYTES", 2**20)
    _, pool = pools
    table = Bucket(pool, BUCKET).prepare([44])
    for window in (None, 40, 2):
        qo_indptr = window and np.arange(BUCKET + 1) * window
        PagedAttention(pool, table, qo_indptr=qo_indptr, causal=False).plan(Q_HEADS, "bfloat16")
    small, large, again = (wrapper.floats for wrapper in made())
    assert small.numel() < large.numel()
    assert again is large


def test_tensors_first_asked_for_in_a_capture_say_what_to_call(make_pool, torch):
    pool = make_pool(1, 4 * PAGE, HEADS, DIM, page_size=PAGE, device="cuda", dtype="bfloat16")
    with cupy_like.capture(), pytest.raises(KVCacheStateError, match=r"pool\.warm_up\(\)"):
        pool_tensors(pool)
    warm_up(pool)
    exports = torch_like.State.exports
    with cupy_like.capture():
        pool_tensors(pool)
    assert torch_like.State.exports == exports
