"""When FlashInfer attends and when something else does; its workspace."""

import sys

import numpy as np
import pytest

from kvpool import KVCacheStateError
from kvpool.attention import PagedAttention, paged_attention
from kvpool.interop.torch import pool_tensors, warm_up
from kvpool.interop.wrappers import use_tensor_cores
from tests.fakes import cupy_like, flashinfer_like, torch_like
from tests.fakes.flashinfer_like import State
from tests.interop.pools import Q_HEADS, assert_close, random_q, steps, twins


def test_workspace_is_made_at_the_first_plan_and_can_be_configured_before(
    make_pool, torch, flashinfer, monkeypatch
):
    monkeypatch.setenv("KVPOOL_FLASHINFER_WORKSPACE_BYTES", str(2**20))
    _, pool = twins(make_pool)
    workspace = pool.flashinfer_workspace
    assert workspace is pool.flashinfer_workspace
    assert not State.calls
    workspace.configure(backend="auto", use_tensor_cores=False)
    (step,) = steps([pool], 12)
    plan = workspace.plan(step.page_table(5), num_q_heads=Q_HEADS, q_dtype=torch.bfloat16)
    _, q = random_q(torch, 1)
    plan.run(1, q)
    ((_, wrapper, made),) = [call for call in State.calls if call[0] == "make"]
    assert made["backend"] == "auto"
    assert not wrapper.use_tensor_cores
    assert wrapper.floats.numel() == 2**20
    with pytest.raises(KVCacheStateError, match="configure it before"):
        workspace.configure(backend="fa3")
    pool.close()
    with pytest.raises(KVCacheStateError, match="the pool is closed"):
        _ = pool.flashinfer_workspace


@pytest.mark.parametrize("text", ["0", "1 GB", "-1", ""])
def test_size_of_the_workspace_that_is_no_number_of_bytes_raises(
    make_pool, torch, flashinfer, monkeypatch, text
):
    monkeypatch.setenv("KVPOOL_FLASHINFER_WORKSPACE_BYTES", text)
    _, pool = twins(make_pool)
    with pytest.raises(ValueError, match="must be a positive number of bytes, got"):
        _ = pool.flashinfer_workspace


@pytest.mark.parametrize(
    ("group", "is_fixed", "expected"),
    [(1, False, False), (3, False, False), (4, False, True), (5, False, True), (7, False, True),
     (8, False, True), (1, True, True)],
)  # fmt: skip
def test_tensor_cores_by_the_size_of_the_group(group, is_fixed, expected):
    assert use_tensor_cores(group, is_fixed) is expected


# ---- fallback


@pytest.mark.parametrize(
    ("options", "q_dtype", "reason"),
    [
        ({"dtype": "float32"}, "bfloat16", "queries of bfloat16 over a cache of float32"),
        ({"dtype": "bfloat16"}, "float32", "queries of float32: it takes float16 and bfloat16"),
        ({"dtype": "bfloat16"}, "float16", "queries of float16 over a cache of bfloat16"),
    ],
)
def test_what_flashinfer_has_no_kernel_for_is_attended_densely(
    make_pool, torch, flashinfer, options, q_dtype, reason
):
    pools = twins(make_pool, **options)
    tables = [step.page_table([9, 4]) for step in steps(pools, 12, 4)]
    q, there = random_q(torch, 2, q_dtype)
    attention = PagedAttention(pools[1], tables[1])
    out = attention.run(0, there)
    assert (type(out), out.device, out.dtype) == (torch.Tensor, "cuda:0", there.dtype)
    np.testing.assert_allclose(
        out.host.astype(float),
        paged_attention(q, pools[0], 0, tables[0]).astype(float),
        rtol=1e-2,
        atol=1e-2,
    )
    assert attention.backend == "dense"
    assert not State.calls
    assert pools[1].flashinfer_workspace.unsupported(Q_HEADS, q_dtype) == reason
    with cupy_like.capture(), pytest.raises(KVCacheStateError, match="cannot be captured"):
        attention.run(0, there, out)


def test_shapes_without_kernels_say_why(make_pool, torch, flashinfer):
    odd = make_pool(1, 16, 2, 80, page_size=4, device="cuda", dtype="bfloat16")
    assert "head_dim 80" in odd.flashinfer_workspace.unsupported(4, "bfloat16")
    _, pool = twins(make_pool)
    workspace = pool.flashinfer_workspace
    assert "3 query heads, no multiple of 2" in workspace.unsupported(3, "bfloat16")
    assert workspace.unsupported(Q_HEADS, torch.bfloat16) is None


def test_device_without_kernels_says_why(make_pool, cupy, monkeypatch):
    torch_like.install(monkeypatch, capability=(7, 5))
    flashinfer_like.install(monkeypatch)
    _, pool = twins(make_pool)
    reason = pool.flashinfer_workspace.unsupported(Q_HEADS, "float16")
    assert reason == "queries of float16 over a cache of bfloat16"
    reason = pool.flashinfer_workspace.unsupported(Q_HEADS, "bfloat16")
    assert reason == "compute capability (7, 5): it needs (8, 0)"


def test_pool_without_flashinfer_has_no_workspace_and_still_attends(make_pool, torch, monkeypatch):
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    pools = twins(make_pool)
    assert pools[0].flashinfer_workspace is None
    assert pools[1].flashinfer_workspace is None
    tables = [step.page_table([9, 4]) for step in steps(pools, 12, 4)]
    q, there = random_q(torch, 2)
    found = paged_attention(there, pools[1], 0, tables[1])
    assert_close(found, paged_attention(q, pools[0], 0, tables[0]))


def test_flashinfer_that_is_there_and_broken_is_told_of(make_pool, torch, monkeypatch):
    broken = flashinfer_like.install(monkeypatch)
    monkeypatch.setattr("kvpool.interop.flashinfer.find_spec", lambda name: broken.__spec__)
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    _, pool = twins(make_pool)
    with pytest.warns(RuntimeWarning, match="FlashInfer cannot be imported"):
        assert pool.flashinfer_workspace is None


def test_torch_without_cuda_has_no_workspace(make_pool, torch, flashinfer, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    _, pool = twins(make_pool)
    assert pool.flashinfer_workspace is None
    with pytest.raises(ImportError, match="install a build of torch with CUDA"):
        pool_tensors(pool)
    warm_up(pool)  # which only does what it can
