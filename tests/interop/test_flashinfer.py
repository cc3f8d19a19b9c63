"""What FlashInfer computes over a CUDA pool, asked in the way that it wants to be asked.

The stand-ins refuse what the real ones refuse: dtypes, places, strides. What they compute is
compared with a CPU pool of the same bytes.
"""

import pytest

from kvpool import KVCacheStateError
from kvpool.attention import PagedAttention, paged_attention
from tests.fakes.flashinfer_like import State
from tests.interop.pools import DIM, LAYERS, Q_HEADS, assert_close, random_q, steps, twins


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize(
    ("dtype", "q_dtype"),
    [
        ("bfloat16", "bfloat16"),
        ("float16", "float16"),
        ("float8_e4m3fn", "bfloat16"),
        ("float8_e5m2", "float16"),
    ],
)
def test_decode_equals_the_cpu_pool_on_every_layer(
    make_pool, torch, flashinfer, dtype, q_dtype, page_size
):
    pools = twins(make_pool, dtype=dtype, page_size=page_size)
    tables = [step.page_table([9, 4, 1]) for step in steps(pools, 12, 4, 4)]
    here, there = (PagedAttention(*each) for each in zip(pools, tables, strict=True))
    q, q_there = random_q(torch, 3, q_dtype)
    for layer in range(LAYERS):
        out = there.run(layer, q_there)
        assert out.device == "cuda:0"
        assert_close(out, here.run(layer, q))
    assert (there.backend, here.backend) == ("flashinfer", "numba")
    assert State.count("plan") == 1
    assert State.count("run") == LAYERS


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
def test_ragged_windows_equal_the_cpu_pool(make_pool, torch, flashinfer, dtype, causal):
    pools = twins(make_pool, dtype=dtype)
    tables = [step.page_table([9, 5, 3]) for step in steps(pools, 12, 8, 4)]
    options = {"qo_indptr": [0, 4, 4, 7], "causal": causal, "scale": 0.2}
    here, there = (PagedAttention(*each, **options) for each in zip(pools, tables, strict=True))
    q, q_there = random_q(torch, 7)
    for layer in range(LAYERS):
        assert_close(there.run(layer, q_there), here.run(layer, q))
    (_, wrapper, plan) = next(call for call in State.calls if call[0] == "plan")
    assert isinstance(wrapper, flashinfer.BatchPrefillWithPagedKVCacheWrapper)
    assert (plan["causal"], plan["sm_scale"]) == (causal, 0.2)
    assert (State.count("plan"), State.count("run")) == (1, LAYERS)


def test_kernels_are_pinned_and_layouts_named(make_pool, torch, flashinfer):
    _, pool = twins(make_pool)
    (step,) = steps([pool], 8)
    PagedAttention(pool, step.page_table(5)).plan(Q_HEADS, "bfloat16")
    ((_, _, made),) = [call for call in State.calls if call[0] == "make"]
    assert made == {"backend": "fa2", "graph": False}


def test_scales_are_python_floats_per_layer_and_none_where_they_are_one(
    make_pool, torch, flashinfer
):
    _, pool = twins(make_pool, dtype="float8_e4m3fn")
    (step,) = steps([pool], 8)
    attention = PagedAttention(pool, step.page_table(5))
    _, q = random_q(torch, 1)
    for layer in range(LAYERS):
        attention.run(layer, q)
    scales = [(c["k_scale"], c["v_scale"]) for name, _, c in State.calls if name == "run"]
    assert scales == [(0.5, None), (2.0, 0.25)]


def test_queries_of_cupy_give_an_array_of_cupy(make_pool, cupy, torch, flashinfer):
    pools = twins(make_pool)
    tables = [step.page_table([9, 4]) for step in steps(pools, 12, 4)]
    q, _ = random_q(torch, 2)
    there = cupy.asarray(q)
    found = paged_attention(there, pools[1], 1, tables[1])
    assert type(found) is cupy.ndarray
    out = cupy.zeros(q.shape, q.dtype)
    assert paged_attention(there, pools[1], 1, tables[1], out=out) is out
    for result in (found, out):
        assert_close(result, paged_attention(q, pools[0], 1, tables[0]))


def test_strided_queries_are_read_in_place_and_out_is_filled(make_pool, torch, flashinfer):
    pools = twins(make_pool)
    tables = [step.page_table([9, 4]) for step in steps(pools, 12, 4)]
    fused = torch.zeros((2, Q_HEADS + 4, DIM), dtype=torch.bfloat16, device="cuda:0")
    q, there = random_q(torch, 2)
    fused.host[:, 2 : 2 + Q_HEADS] = there.host
    out = torch.empty((2, Q_HEADS, DIM), dtype=torch.bfloat16, device="cuda:0")
    found = paged_attention(fused[:, 2 : 2 + Q_HEADS], pools[1], 0, tables[1], out=out)
    assert found is out
    assert_close(out, paged_attention(q, pools[0], 0, tables[0]))


def test_bad_queries_and_outs_name_both_sides(make_pool, torch, flashinfer):
    _, pool = twins(make_pool)
    (step,) = steps([pool], 12, 4)
    attention = PagedAttention(pool, step.page_table([5, 3]))
    _, q = random_q(torch, 2)
    with pytest.raises(ValueError, match=r"Invalid shape of q: expected \[2, num_q_heads, 64\]"):
        attention.run(0, q[:1])
    with pytest.raises(ValueError, match="3 heads, no multiple of 2 KV heads"):
        attention.run(0, q[:, :3])
    with pytest.raises(ValueError, match=r"layer must be in 0 \.\. 1, got -1"):
        attention.run(-1, q)
    with pytest.raises(ValueError, match=r"Invalid out: planned for \[2, 8, 64\]"):
        attention.run(0, q, q[:1])
    wide = torch.empty((2, Q_HEADS, 2 * DIM), dtype=torch.bfloat16, device="cuda:0")
    with pytest.raises(ValueError, match="out must be contiguous"):
        attention.run(0, q, wide[:, :, :DIM])
    with pytest.raises(ValueError, match="last dimension of q must be contiguous"):
        attention.run(0, wide[:, :, ::2])
    with pytest.raises(TypeError, match="q is on device cpu, the pool on cuda:0"):
        attention.run(0, torch.zeros((2, Q_HEADS, DIM), dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="first plan needs num_q_heads and q_dtype"):
        PagedAttention(pool, step.page_table([5, 3])).plan(Q_HEADS)
    pool.close()
    with pytest.raises(KVCacheStateError, match="the pool is closed"):
        attention.run(0, q)
