"""How often FlashInfer plans, what it waits for, and on which stream."""

import numpy as np
import pytest

from kvpool import KVCacheStateError
from kvpool.attention import PagedAttention, paged_attention
from tests.fakes import cupy_like, torch_like
from tests.fakes.flashinfer_like import State
from tests.interop.pools import DIM, HEADS, LAYERS, Q_HEADS, assert_close, random_q, steps, twins


def test_one_plan_a_step_with_the_function_too(make_pool, torch, flashinfer):
    _, pool = twins(make_pool)
    (step,) = steps([pool], 12)
    _, q = random_q(torch, 1)
    for length in (5, 6):
        for layer in range(LAYERS):
            paged_attention(q, pool, layer, step.page_table(length))
    assert State.count("plan") == 2
    assert State.count("make") == 1  # and one wrapper


def test_decode_and_windows_do_not_plan_each_other_away(make_pool, torch, flashinfer):
    _, pool = twins(make_pool)
    first, second = (steps([pool], size)[0] for size in (12, 8))
    (_, q1), (_, q3) = random_q(torch, 1), random_q(torch, 3)
    decode = PagedAttention(pool, first.page_table(5))
    window = PagedAttention(pool, second.page_table(6), qo_indptr=[0, 3])
    for layer in range(LAYERS):
        decode.run(layer, q1)
        window.run(layer, q3)
    assert State.count("plan") == 2


def test_one_query_a_row_is_decode_however_it_is_said(make_pool, torch, flashinfer):
    _, pool = twins(make_pool)
    (step,) = steps([pool], 12, 8)
    _, q = random_q(torch, 2)
    table = step.page_table([5, 3])
    paged_attention(q, pool, 0, table)
    paged_attention(q, pool, 1, table, qo_indptr=[0, 1, 2])
    assert (State.count("make"), State.count("plan")) == (1, 1)


def test_table_changed_in_place_is_planned_again(make_pool, torch, flashinfer):
    pools = twins(make_pool)
    both = steps(pools, 12)
    tables = [step.page_table(7) for step in both]
    here, there = (PagedAttention(*each) for each in zip(pools, tables, strict=True))
    q, q_there = random_q(torch, 1)
    there.run(0, q_there)
    assert all(table.bump(np.array([6])) for table in tables)
    assert_close(there.run(0, q_there), here.run(0, q))
    assert State.count("plan") == 2
    there.plan()
    assert State.count("plan") == 2


def test_plan_of_the_workspace_follows_its_table_too(make_pool, torch, flashinfer):
    pools = twins(make_pool)
    tables = [step.page_table(7) for step in steps(pools, 12)]
    plan = pools[1].flashinfer_workspace.plan(tables[1], num_q_heads=Q_HEADS, q_dtype="bfloat16")
    q, q_there = random_q(torch, 1)
    for length in (7, 5):
        assert all(table.bump(np.array([length])) for table in tables)
        for layer in range(LAYERS):
            found = plan.run(layer, q_there)
            assert_close(found, paged_attention(q, pools[0], layer, tables[0]))
    assert plan.problem.version == tables[1].version
    assert State.count("plan") == 3  # the first, and one for each change


def test_two_tables_in_turn_are_planned_in_turn_and_right(make_pool, torch, flashinfer):
    pools = twins(make_pool)
    first, second = ([step.page_table(length) for step in steps(pools, 12)] for length in (5, 6))
    q, q_there = random_q(torch, 1)
    pairs = [
        [PagedAttention(pool, table) for pool, table in zip(pools, tables, strict=True)]
        for tables in (first, second)
    ]
    for layer in range(LAYERS):
        for here, there in pairs:
            assert_close(there.run(layer, q_there), here.run(layer, q))
    assert State.count("plan") == 2 * LAYERS  # one wrapper for all decode steps
    assert State.count("make") == 1


def test_table_that_shrank_below_its_queries_raises(make_pool, torch, flashinfer):
    pools = twins(make_pool)
    for pool, step in zip(pools, steps(pools, 12), strict=True):
        table = step.page_table(3)
        attention = PagedAttention(pool, table, qo_indptr=[0, 3])
        q, there = random_q(torch, 3)
        attention.run(0, q if pool.device == "cpu" else there)
        assert table.bump(np.array([2]))
        with pytest.raises(ValueError, match="row 0 has 3 queries over 2 positions"):
            attention.run(0, q if pool.device == "cpu" else there)


def test_plan_waits_for_the_upload_of_the_one_before(make_pool, torch, flashinfer):
    _, pool = twins(make_pool)
    (step,) = steps([pool], 12)
    _, q = random_q(torch, 1)
    for length in (5, 6, 7):
        paged_attention(q, pool, 0, step.page_table(length))
    # An event that was never recorded is not waited for; then each wait is for the last plan.
    assert torch_like.State.syncs == [0, 1, 2]


def test_buffers_are_exported_once_and_tables_once_a_plan(make_pool, torch, flashinfer):
    _, pool = twins(make_pool)
    (step,) = steps([pool], 12)
    attention = PagedAttention(pool, step.page_table(5))
    _, q = random_q(torch, 1)
    attention.run(0, q)
    before = torch_like.State.exports
    for layer in range(LAYERS):
        attention.run(layer, q)
    assert torch_like.State.exports == before
    paged_attention(q, pool, 0, step.page_table(6))
    assert torch_like.State.exports == before + 3  # indptr, last_page_len, indices


# ---- streams


def test_torch_is_brought_to_the_stream_of_the_pool(make_pool, torch, flashinfer):
    _, pool = twins(make_pool)
    (step,) = steps([pool], 12)
    attention = PagedAttention(pool, step.page_table(5))
    _, q = random_q(torch, 1)
    cupy_like.State.stream = 0x77
    attention.run(0, q)
    assert torch_like.State.stream == 0
    torch_like.State.stream = 0x77
    attention.run(0, q)
    cupy_like.State.stream = 0
    attention.run(0, q)
    assert torch_like.State.stream == 0x77
    streams = [call["stream"] for name, _, call in State.calls if name in ("plan", "run")]
    assert streams == [0x77, 0x77, 0x77, 0]


def test_torch_is_brought_to_the_device_of_the_pool(make_pool, torch, flashinfer):
    pool = make_pool(1, 16, HEADS, DIM, page_size=4, device="cuda:1", dtype="bfloat16")
    (step,) = steps([pool], 8)
    q = torch.zeros((1, Q_HEADS, DIM), dtype=torch.bfloat16, device="cuda:1")
    out = paged_attention(q, pool, 0, step.page_table(5))
    assert out.device == "cuda:1"
    assert torch_like.State.device == 0


def test_capture_by_torch_on_another_stream_says_what_to_enter(make_pool, torch, flashinfer):
    _, pool = twins(make_pool)
    (step,) = steps([pool], 12)
    attention = PagedAttention(pool, step.page_table(5))
    _, q = random_q(torch, 1)
    attention.run(0, q)
    torch_like.State.stream = torch_like.State.captures = 0x55
    with pytest.raises(KVCacheStateError, match=r"torch captures stream 0x55.*ExternalStream"):
        attention.run(0, q)
