"""Tensors over the arrays of a pool: shapes, dtypes, and who keeps what alive. With real torch."""

import gc
import inspect
import subprocess
import sys
import weakref
from pathlib import Path

import numpy as np
import pytest

from kvpool import KVCacheStateError
from kvpool.attention import PagedAttention, paged_attention
from kvpool.interop.torch import pool_tensors, tensor_of, warm_up
from tests.helpers.pools import R, case_pool, read, values, window, write

DTYPES = ["float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"]


@pytest.fixture
def torch():
    return pytest.importorskip("torch", reason="torch is not installed")


def run_python(code):
    root = Path(__file__).resolve().parent.parent
    return subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True)


def test_importing_the_border_imports_no_torch():
    done = run_python(
        "import sys, kvpool.interop.torch, kvpool.interop.flashinfer, kvpool.attention; "
        "assert not {'torch', 'cupy', 'flashinfer'} & set(sys.modules)"
    )
    assert done.returncode == 0, done.stderr


def test_tensors_without_torch_say_what_to_install():
    done = run_python(
        "import sys; sys.modules['torch'] = None; from kvpool import KVCachePool; "
        "from kvpool.interop.torch import pool_tensors; pool = KVCachePool(1, 16, 1, 8); "
        "pool.warm_up(); pool_tensors(pool)"
    )
    assert "ImportError: tensors need torch" in done.stderr
    assert "kvpool[flashinfer]" in done.stderr


# ---- shapes and dtypes


@pytest.mark.parametrize("dtype", DTYPES)
def test_tensors_are_views_in_the_dtype_of_the_pool(make_pool, torch, dtype):
    pool = case_pool(make_pool, 4, 4, dtype=dtype)
    tensors = pool_tensors(pool)
    assert tensors is pool_tensors(pool)
    layer = pool.layer_with_scratch(1)
    for cache, flat, paged, array in (
        (tensors.key_cache, tensors.key_layer(1), tensors.paged_layer(1)[0], layer[0]),
        (tensors.value_cache, tensors.value_layer(1), tensors.paged_layer(1)[1], layer[1]),
    ):
        assert {cache.dtype, flat.dtype, paged.dtype} == {getattr(torch, dtype)}
        assert tuple(cache.shape) == (2, 16, 2, 8)
        assert tuple(flat.shape) == (16, 2, 8)
        assert tuple(paged.shape) == (5, 4, 2, 8)  # the scratch page is the last
        address = array.ctypes.data
        assert cache[1].data_ptr() == flat.data_ptr() == paged.data_ptr() == address
        assert paged.is_contiguous()
    k, v = tensors.paged_layer(0)
    assert k.stride() == v.stride()
    for bad in (-1, 2):
        with pytest.raises(ValueError, match=rf"layer must be in 0 \.\. 1, got {bad}"):
            tensors.paged_layer(bad)


@pytest.mark.parametrize(
    ("array", "dtype"),
    [
        (np.arange(3, dtype=np.int32), None),
        (np.arange(6, dtype=np.int64)[::2], None),
        (np.zeros(0, np.int32), None),
        (np.ones((2, 3), "bfloat16"), None),
        (np.full((2, 3), 0x38, np.uint8), "float8_e4m3fn"),
        (np.full((2, 3), 0x3C, np.uint8), "float8_e5m2"),
        (np.full((2, 3), 0x3F80, np.uint16), "bfloat16"),
    ],
)
def test_any_array_becomes_a_tensor_over_its_memory(torch, array, dtype):
    tensor = tensor_of(array, dtype)
    expected = array.dtype.name if dtype is None else dtype
    assert tensor.dtype == getattr(torch, expected)
    assert tuple(tensor.shape) == array.shape
    if array.size:
        assert tensor.data_ptr() == array.ctypes.data
    if dtype is not None or expected == "bfloat16":
        assert (tensor.float() == 1).all()


def test_array_that_cannot_carry_a_dtype_says_so(torch):
    for array, dtype in ((np.zeros(2, np.int32), "bfloat16"), (np.zeros(2, np.int32), "int64")):
        with pytest.raises(ValueError, match=f"an array of int32 cannot be shown as {dtype}"):
            tensor_of(array, dtype)


def test_slots_and_tables_of_a_step_index_tensors(make_pool, torch):
    pool = case_pool(make_pool, 4, 4)
    request = pool.bind_request(R(1, 6), 8)
    step = write(pool, request, 0, 6)
    slots = step.window_slot_indices(0, 6)
    assert not slots.flags.writeable  # and torch would warn, which is an error here
    own = tensor_of(slots)
    assert own.dtype == torch.int64
    assert own.data_ptr() == slots.ctypes.data
    keys = pool_tensors(pool).key_layer(0)[own]
    assert keys[:, 0, 0].tolist() == values(100, 0, 6)
    table = step.page_table(6)
    k, _ = pool_tensors(pool).paged_layer(1)
    pages = k[tensor_of(table.indices).long()]
    assert pages.reshape(-1, 2, 8)[:6, 0, 0].tolist() == values(1100, 0, 6)
    assert tensor_of(table.last_page_len).tolist() == [2]


# ---- writing through them


def test_writes_through_tensors_are_read_by_steps_and_the_other_way_round(make_pool, torch):
    pool = case_pool(make_pool, 4, 4)
    tensors = pool_tensors(pool)
    request = pool.bind_request(R(1, 4), 8)
    own = tensor_of(pool.activate_step(request).slot_indices(4))
    for layer in range(2):
        k, v = window(pool, 0, 4, 100, layer)
        tensors.key_layer(layer)[own] = torch.from_numpy(k[0])
        tensors.value_layer(layer)[own] = torch.from_numpy(v[0])
    pool.mark_written(request, 4)
    assert read(pool, request, 4) == values(100, 0, 4)
    write(pool, request, 4, 6)
    last = tensor_of(pool.step.window_slot_indices(4, 2))
    assert tensors.key_layer(1)[last][:, 1, 7].tolist() == values(1100, 4, 6)
    assert pool.finish_request(request, R(1, 6)) == 4


# ---- ownership


def base_of(array):
    while array.base is not None:
        array = array.base
    return weakref.ref(array)


def test_tensors_outlive_a_closed_pool_and_keep_its_memory(make_pool, torch):
    pool = case_pool(make_pool, 4, 4)
    write(pool, pool.bind_request(R(1, 4), 4), 0, 4)
    slots = pool.step.slot_indices(4)
    memory = base_of(pool.key_cache)
    layer = pool_tensors(pool).key_layer(0)
    pool.close()
    gc.collect()
    assert memory() is not None
    assert layer[tensor_of(slots)][:, 0, 0].tolist() == values(100, 0, 4)
    with pytest.raises(KVCacheStateError, match="the pool is closed"):
        pool_tensors(pool)
    del layer
    gc.collect()
    assert memory() is None


def test_pool_outlives_its_tensors(make_pool, torch):
    pool = case_pool(make_pool, 4, 4)
    request = pool.bind_request(R(1, 4), 4)
    write(pool, request, 0, 4)
    alive = weakref.ref(pool_tensors(pool))
    assert alive() is not None  # the pool keeps the set
    extra = tensor_of(pool.key_layer(0))
    del extra
    gc.collect()
    assert read(pool, request, 4) == values(100, 0, 4)
    pool.close()
    gc.collect()
    assert alive() is None


def test_warm_up_makes_the_tensors_where_torch_is_loaded(make_pool, torch):
    pool = case_pool(make_pool, 4, 4)
    warm_up(pool)
    address = pool_tensors(pool).key_cache.data_ptr()
    pool.warm_up()
    assert pool_tensors(pool).key_cache.data_ptr() == address == pool.key_cache.ctypes.data


def test_calls_of_the_cuda_side_fit_the_real_signatures(torch):
    # Run on stand-ins only (tests/interop); a build without CUDA has the same functions.
    for function, arguments, options in (
        (torch.cuda.ExternalStream.__new__, (None, 0x77), {"device": 0}),
        (torch.cuda.default_stream, (0,), {}),
        (torch.cuda.current_stream, (), {}),
        (torch.cuda.current_device, (), {}),
        (torch.cuda.get_device_properties, (0,), {}),
        (torch.cuda.is_current_stream_capturing, (), {}),
        (torch.cuda.stream, (None,), {}),
        (torch.cuda.Event.record, (None,), {}),
        (torch.cuda.Event.synchronize, (None,), {}),
    ):
        inspect.signature(function).bind(*arguments, **options)
    tensor = torch.zeros(2, 3)
    assert (tensor.get_device(), tensor.stride(-1)) == (-1, 1)
    assert tensor.shape == (2, 3)  # a torch.Size is a tuple


# ---- attention with tensors on a CPU


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_attention_of_a_tensor_is_a_tensor_of_its_dtype(make_pool, torch, dtype):
    pool = case_pool(make_pool, 4, 4, dtype=dtype)
    table = write(pool, pool.bind_request(R(1, 6), 8), 0, 6).page_table(6)
    q = torch.linspace(-1, 1, 2 * 4 * 8).reshape(2, 4, 8).to(getattr(torch, dtype))
    attention = PagedAttention(pool, table, qo_indptr=[0, 2])
    found = attention.run(0, q)
    assert (type(found), found.dtype, found.shape) == (torch.Tensor, q.dtype, q.shape)
    carrier = torch.int16 if dtype == "bfloat16" else q.dtype
    array = q.view(carrier).numpy().view(np.dtype(dtype))
    expected = attention.run(0, array)
    assert type(expected) is np.ndarray
    np.testing.assert_array_equal(found.view(carrier).numpy().view(np.dtype(dtype)), expected)
    out = torch.empty_like(q)
    assert attention.run(0, q.requires_grad_(), out) is out
    assert torch.equal(out, found)


def test_bad_outs_of_torch_name_both_sides(make_pool, torch):
    pool = case_pool(make_pool, 4, 4)
    table = write(pool, pool.bind_request(R(1, 6), 8), 0, 6).page_table(6)
    q = torch.zeros(1, 4, 8)
    with pytest.raises(ValueError, match=r"Invalid out: expected \[1, 4, 8\] of float32"):
        paged_attention(q, pool, 0, table, out=torch.zeros(1, 4, 8, dtype=torch.float64))
    with pytest.raises(TypeError, match="Invalid dtype of q"):
        paged_attention(q.int(), pool, 0, table)
