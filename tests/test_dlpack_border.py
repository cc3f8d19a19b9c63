"""Arrays of other libraries: taken by DLPack or the array interface, given without a copy."""

import gc

import ml_dtypes
import numpy as np
import pytest

from tests.helpers.pools import R, case_pool, read, values, window, write


class DLPackOnly:
    """A tensor of some other library: it speaks DLPack and nothing else."""

    def __init__(self, array):
        self._array = array

    def __dlpack__(self, **options):
        return self._array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self._array.__dlpack_device__()


class InterfaceOnly:
    """A tensor that speaks the array interface and nothing else."""

    def __init__(self, array):
        self._array = array
        self.__array_interface__ = array.__array_interface__


WRAPPERS = [DLPackOnly, InterfaceOnly]


@pytest.fixture
def torch():
    return pytest.importorskip("torch", reason="torch is not installed")


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_layer_views_are_imported_without_a_copy(make_pool, dtype):
    pool = case_pool(make_pool, 4, 4, dtype=dtype)
    for layer in range(2):
        for view in (pool.key_layer(layer), pool.value_layer(layer)):
            t = np.from_dlpack(view)
            assert t.shape == (16, 2, 8)
            assert t.dtype == np.dtype(dtype)
            assert t.strides == view.strides
            assert np.shares_memory(t, view)
    cache = np.from_dlpack(pool.key_cache)
    assert cache.shape == (2, 16, 2, 8)
    assert np.shares_memory(cache[1], pool.key_layer(1))


def test_bfloat16_layer_views_are_imported_as_bits(make_pool):
    pool = case_pool(make_pool, 4, 4, dtype="bfloat16")
    view = pool.key_layer(0)
    assert view.dtype == ml_dtypes.bfloat16
    t = np.from_dlpack(view.view(np.uint16))
    a = pool.bind_request(R(1, 4), 4)
    write(pool, a, 0, 4)
    own = np.asarray(pool.step.slot_indices(4))
    assert (t[own[0]] == 0x42C8).all()  # 100.0: the upper half of 0x42C80000
    assert np.shares_memory(t, view)


def test_writes_through_an_imported_view_reach_the_pool(make_pool):
    pool = case_pool(make_pool, 4, 4)
    a = pool.bind_request(R(1, 4), 8)
    own = np.asarray(pool.activate_step(a).slot_indices(4))
    for layer in range(2):
        k, v = window(pool, 0, 4, 100, layer)
        np.asarray(pool.key_layer(layer))[own] = k[0]
        np.asarray(pool.value_layer(layer))[own] = v[0]
    pool.mark_written(a, 4)
    assert read(pool, a, 4) == values(100, 0, 4)
    assert pool.finish_request(a, R(1, 4)) == 4


@pytest.mark.parametrize("wrap", WRAPPERS)
def test_put_takes_foreign_arrays(make_pool, wrap):
    pool = case_pool(make_pool, 4, 4)
    a = pool.bind_request(R(1, 4), 4)
    step = pool.activate_step(a)
    for layer in range(2):
        k, v = window(pool, 0, 4, 100, layer)
        step.put(layer, 0, wrap(k), wrap(v))
    assert read(pool, a, 4) == values(100, 0, 4)


@pytest.mark.parametrize("wrap", WRAPPERS)
def test_put_takes_foreign_slots(make_pool, wrap):
    pool = case_pool(make_pool, 4, 4)
    a = pool.bind_request(R(1, 4), 4)
    step = pool.activate_step(a)
    own = np.array(step.slot_indices(4))
    for layer in range(2):
        step.put(layer, 0, *window(pool, 0, 4, 100, layer), slots=wrap(own))
    pool.mark_written(a, 4)
    assert read(pool, a, 4) == values(100, 0, 4)
    k, _ = step.get(0, 4, slots=wrap(own))
    assert np.asarray(k)[0, :, 0, 0].tolist() == values(100, 0, 4)


@pytest.mark.parametrize("wrap", WRAPPERS)
@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint16])
def test_bind_takes_foreign_tokens(make_pool, wrap, dtype):
    pool = case_pool(make_pool, 4, 4)
    tokens = np.arange(1, 9, dtype=dtype)
    a = pool.bind_request(wrap(tokens), 8)
    write(pool, a, 0, 8)
    assert pool.finish_request(a, wrap(tokens)) == 8
    assert pool.radix.match_prefix(wrap(tokens)).length == 8


@pytest.mark.parametrize("wrap", WRAPPERS)
def test_bind_refuses_foreign_floats(make_pool, wrap):
    pool = case_pool(make_pool, 4, 4)
    with pytest.raises(TypeError):
        pool.bind_request(wrap(np.ones(4, np.float32)), 8)


def test_borrowed_tokens_are_never_kept(make_pool):
    pool = case_pool(make_pool, 4, 4)
    tokens = np.arange(1, 10, dtype=np.int32)
    a = pool.bind_request(tokens, 12)
    write(pool, a, 0, 9)
    tokens[:] = 77  # the caller reuses its buffer
    assert pool.finish_request(a, R(1, 9)) == 8  # and the prompt is still R(1, 9)
    assert pool.radix.match_prefix(R(1, 8)).length == 8
    assert pool.radix.match_prefix([77] * 8).length == 0


def test_put_takes_read_only_and_strided_arrays(make_pool):
    pool = case_pool(make_pool, 4, 4)
    a = pool.bind_request(R(1, 4), 4)
    step = pool.activate_step(a)
    for layer in range(2):
        k, v = window(pool, 0, 4, 100, layer)
        heads_first = np.ascontiguousarray(k.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3)
        assert not heads_first.flags.c_contiguous
        v.flags.writeable = False
        step.put(layer, 0, heads_first, v)
    assert read(pool, a, 4) == values(100, 0, 4)


def odd_arrays():
    """The same numbers, 3, 4, 5 and 6, in every memory layout that NumPy has."""
    plain = np.empty((1, 4, 2, 8), np.float32)
    plain[...] = np.arange(3, 7, dtype=np.float32)[None, :, None, None]
    raw = bytearray(plain.nbytes + 1)
    unaligned = np.frombuffer(raw, np.float32, plain.size, offset=1).reshape(plain.shape)
    unaligned[...] = plain
    return {
        "unaligned": unaligned,
        "broadcast": np.broadcast_to(plain[..., :1, :1], plain.shape),
        "reversed": np.ascontiguousarray(plain[:, ::-1])[:, ::-1],
        "every second": np.repeat(plain, 2, axis=1)[:, ::2],
        "fortran": np.asfortranarray(plain),
    }


@pytest.mark.parametrize("layout", odd_arrays())
def test_put_takes_any_memory_layout(make_pool, layout):
    pool = case_pool(make_pool, 4, 4)
    a = pool.bind_request(R(1, 4), 4)
    step = pool.activate_step(a)
    k = odd_arrays()[layout]
    step.put(0, 0, k, k)
    for got in step.get(0, 4):
        assert got[0, :, 0, 0].tolist() == [3, 4, 5, 6]
        assert (got == got[..., :1, :1]).all()


@pytest.mark.parametrize("dtype", [">f4", ">f2", ">f8"])
def test_put_of_foreign_byte_order_converts_or_raises(make_pool, dtype):
    pool = case_pool(make_pool, 4, 4)
    a = pool.bind_request(R(1, 4), 4)
    step = pool.activate_step(a)
    k = window(pool, 0, 4, 100)[0].astype(dtype)
    try:
        step.put(0, 0, k, k)
    except TypeError:
        assert pool.valid_len(a) == 0
        assert not pool.key_cache.any()
    else:
        assert step.get(0, 4)[0][0, :, 0, 0].tolist() == values(100, 0, 4)


def test_put_keeps_no_reference_to_its_arguments(make_pool):
    pool = case_pool(make_pool, 4, 4)
    a = pool.bind_request(R(1, 4), 4)
    step = pool.activate_step(a)
    k, v = window(pool, 0, 4, 100)
    step.put(0, 0, k, v)
    k[...] = 7
    v[...] = 7
    gc.collect()
    got, _ = step.get(0, 4)
    assert np.asarray(got)[0, :, 0, 0].tolist() == values(100, 0, 4)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_put_takes_torch_tensors(make_pool, torch, dtype):
    pool = case_pool(make_pool, 4, 4, dtype=dtype)
    a = pool.bind_request(R(1, 4), 4)
    step = pool.activate_step(a)
    k, v = (torch.from_numpy(x.copy()).to(getattr(torch, dtype)) for x in window(pool, 0, 4, 100))
    step.put(0, 0, k, v)
    got_k, got_v = (np.asarray(x, np.float32) for x in step.get(0, 4))
    assert got_k[0, :, 0, 0].tolist() == values(100, 0, 4)
    assert (got_v == -got_k).all()


def test_put_takes_torch_tensors_of_another_float(make_pool, torch):
    pool = case_pool(make_pool, 4, 4)
    a = pool.bind_request(R(1, 4), 4)
    step = pool.activate_step(a)
    k, v = (torch.from_numpy(x.copy()).bfloat16() for x in window(pool, 0, 4, 100))
    step.put(0, 0, k, v)
    got, _ = step.get(0, 4)
    assert np.asarray(got)[0, :, 0, 0].tolist() == values(100, 0, 4)


def test_bind_takes_torch_tokens(make_pool, torch):
    pool = case_pool(make_pool, 4, 4)
    tokens = torch.arange(1, 9)
    a = pool.bind_request(tokens, 8)
    write(pool, a, 0, 8)
    assert pool.finish_request(a, tokens.int()) == 8
    with pytest.raises(TypeError):
        pool.bind_request(tokens.float(), 8)


def test_torch_imports_layer_views_without_a_copy(make_pool, torch):
    pool = case_pool(make_pool, 4, 4)
    t = torch.from_dlpack(pool.key_layer(0))
    assert tuple(t.shape) == (16, 2, 8)
    a = pool.bind_request(R(1, 4), 4)
    write(pool, a, 0, 4)
    own = np.asarray(pool.step.slot_indices(4))
    assert t[int(own[3]), 0, 0].item() == 103.0
