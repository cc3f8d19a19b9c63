"""CUDA devices and pools as far as a machine without a GPU goes: sentences, checks, memory.

Arrays are stand-ins (`tests.fakes.cupy_like`). What kernels do to them needs the simulator:
`tests/sim/test_cuda_pool.py`; what reaches a driver is in `tests/test_launch.py`.
"""

import subprocess
import sys
from importlib.util import find_spec
from types import SimpleNamespace

import numpy as np
import pytest

from kvpool import KVCacheExhaustedError, KVCacheLayout, KVCachePool, KVCacheStateError
from kvpool.device import device_of
from kvpool.page_table import PageTable
from tests.conftest import has_gpu
from tests.fakes import cupy_like

needs_numba_cuda = pytest.mark.skipif(
    find_spec("numba_cuda") is None, reason="numba-cuda is not installed"
)


@pytest.fixture
def cupy(monkeypatch):
    """The stand-in, in CuPy's place."""
    fake = cupy_like.module()
    monkeypatch.setitem(sys.modules, "cupy", fake)
    monkeypatch.setattr(cupy_like.State, "device", 0)
    monkeypatch.setattr(cupy_like.State, "emptied", 0)
    return fake


def pool_of(make_pool, **options):
    shape = {"num_layers": 2, "num_slots": 16, "num_kv_heads": 2, "head_dim": 8, "page_size": 4}
    return make_pool(**(shape | {"device": "cuda"} | options))


# ---- no GPU, no driver, no CuPy


def sentence(code, *arguments):
    """What a process that makes a CUDA pool dies of, without the name of the exception."""
    command = [sys.executable, *arguments, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    kind, _, message = done.stderr.strip().splitlines()[-1].partition(": ")
    assert kind == "ValueError"
    return message


def test_device_without_cupy_says_what_to_install():
    code = (
        "import sys; sys.modules['cupy'] = None; from kvpool import KVCachePool; "
        "KVCachePool(1, 16, 1, 8, device='cuda')"
    )
    message = sentence(code)
    assert message.startswith("device 'cuda' needs CuPy, which cannot be imported")
    assert "kvpool[cuda12]" in message
    assert "device='cpu'" in message


@pytest.mark.skipif(find_spec("cupy") is None, reason="CuPy is not installed")
@pytest.mark.skipif(has_gpu(), reason="there is a GPU")
def test_device_without_a_gpu_says_so_in_one_sentence():
    code = "from kvpool import KVCachePool; KVCachePool(1, 16, 1, 8, device='cuda:1')"
    message = sentence(code)
    assert message.startswith(
        "device 'cuda:1' is not available: no CUDA driver answers on this machine"
    )
    assert message.endswith("use device='cpu'")


def test_device_without_numba_cuda_says_what_to_install(cupy, monkeypatch):
    monkeypatch.setitem(sys.modules, "numba_cuda", None)
    with pytest.raises(ValueError, match=r"device 'cuda' needs numba-cuda.*kvpool\[cuda12\]"):
        device_of("cuda")


@pytest.mark.parametrize(
    "name", ["cuda:", "cuda:x", "cuda:-1", "cuda:1.0", "cudax", "CUDA", "gpu"]
)
def test_device_with_an_odd_name_raises(name):
    with pytest.raises(ValueError, match="device must be 'cpu', 'cuda' or 'cuda:N', got"):
        device_of(name)


# ---- devices


@needs_numba_cuda
def test_device_names_are_those_of_torch(cupy):
    assert device_of("cuda") == "cuda:0"
    assert device_of("cuda:1") == "cuda:1"
    assert device_of("cuda:1").kind == "cuda"
    assert hash(device_of("cuda")) == hash("cuda:0")
    cupy_like.State.device = 1
    assert str(device_of("cuda")) == "cuda:1"
    with pytest.raises(ValueError, match="'cuda:2' is not available: this machine has 2 CUDA"):
        device_of("cuda:2")


@needs_numba_cuda
def test_arrays_are_made_on_their_device_whatever_is_current(cupy):
    device = device_of("cuda:1")
    made = [
        device.zeros((2,), np.dtype(np.float32)),
        device.empty((2,), np.dtype(np.float32)),
        device.to_device(np.arange(2)),
    ]
    assert [array.data.device_id for array in made] == [1, 1, 1]
    assert cupy_like.State.device == 0


@needs_numba_cuda
def test_dtype_that_cupy_lacks_names_the_version(cupy, monkeypatch):
    def zeros(shape, dtype):
        raise ValueError(f"Unsupported dtype {dtype}")

    monkeypatch.setattr(cupy, "zeros", zeros)
    with pytest.raises(ValueError, match="has no arrays of bfloat16: install CuPy 14"):
        device_of("cuda").zeros((2,), np.dtype("bfloat16"))


# ---- memory


@needs_numba_cuda
def test_allocate_reads_the_device_after_emptying_caches(cupy, make_pool, monkeypatch):
    emptied = []
    torch = SimpleNamespace(
        cuda=SimpleNamespace(
            is_initialized=lambda: True, empty_cache=lambda: emptied.append("torch")
        ),
        Tensor=type("Tensor", (), {}),
    )
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setattr(cupy_like.State, "free", 3000)
    monkeypatch.setattr(cupy_like.State, "total", 4000)
    layout = KVCacheLayout(1, 1, 8, max_batch_size=64, max_seq_len=64)
    # Static region 3,600 bytes, 1,000 used: 2,600 bytes at 64 a token are 40 tokens.
    pool = make_pool.keep(KVCachePool.allocate(layout, "cuda", "float32", 0.9, 4))
    assert pool.num_slots == 40
    assert (cupy_like.State.emptied, emptied) == (1, ["torch"])
    history = make_pool.keep(
        KVCachePool.for_mtp_history(layout, "cuda", "float32", 4, want_slots=1000)
    )
    assert history.num_slots == 20  # half of 3,000 bytes
    monkeypatch.setattr(cupy_like.State, "free", 100)
    with pytest.raises(KVCacheExhaustedError, match="not one page fits"):
        KVCachePool.allocate(layout, "cuda", "float32", 0.9, 4)
    given = KVCachePool.allocate(layout, "cuda", "float32", 1.0, 4, memory=(2560, 2560))
    assert make_pool.keep(given).num_slots == 40


@needs_numba_cuda
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float8_e5m2"])
def test_buffers_are_zeroed_views_outlive_the_pool(cupy, make_pool, dtype):
    pool = pool_of(make_pool, dtype=dtype)
    layer, cache = pool.key_layer(1), pool.key_cache
    assert (layer.shape, cache.shape) == ((16, 2, 8), (2, 16, 2, 8))
    assert layer.dtype == (np.uint8 if dtype.startswith("float8") else np.dtype(dtype))
    assert layer.data.ptr == cache.data.ptr + pool.layer_with_scratch(0)[0].nbytes
    assert not cache.get().view(np.uint8).any()
    pool.close()
    layer[...] = 1
    assert cache.get()[1].view(np.uint8).any()
    with pytest.raises(KVCacheStateError, match="the pool is closed"):
        pool.key_layer(0)


@needs_numba_cuda
def test_page_table_is_on_both_sides_and_bumped_in_place(cupy):
    device = device_of("cuda")
    indptr, indices, last = (np.array(a, np.int32) for a in ([0, 2, 2], [5, 1], [3, 0]))
    table = PageTable(indptr, indices, last, np.array([7, 0]), 4, 9, device)
    address = table.last_page_len.data.ptr
    assert type(table.indptr_host) is np.ndarray
    for name in ("indptr", "indices", "last_page_len"):
        found, host = getattr(table, name), getattr(table, f"{name}_host")
        assert found.data.ptr != host.ctypes.data
        assert found.get().tolist() == host.tolist()
    assert table.block_table(3).get().tolist() == [[5, 1, 9], [9, 9, 9]]
    assert table.bump(np.array([5, 0]))
    assert not table.bump(np.array([9, 0]))
    assert table.last_page_len.data.ptr == address
    assert table.last_page_len.get().tolist() == [1, 0]


# ---- bad input


@pytest.fixture
def step(cupy, make_pool):
    if find_spec("numba_cuda") is None:
        pytest.skip("numba-cuda is not installed")
    pool = pool_of(make_pool, dtype="float32")
    return pool.activate_step(pool.bind_request(range(4), 8))


def on(cupy, device, *shape, dtype=np.float32):
    with cupy.cuda.Device(device):
        return cupy.zeros(shape, dtype)


def test_put_of_host_arrays_says_how_to_upload(cupy, step):
    k = np.zeros((1, 4, 2, 8), np.float32)
    with pytest.raises(TypeError, match=r"k is a host array, the pool is on cuda:0: upload it"):
        step.put(0, 0, k, k)
    there = on(cupy, 0, 1, 4, 2, 8)
    with pytest.raises(TypeError, match=r"v is a host array"):
        step.put(0, 0, there, k)
    with pytest.raises(TypeError, match=r"slots is a host array"):
        step.put(0, 0, there, there, slots=np.arange(4))
    with pytest.raises(TypeError, match=r"k must be an array on device cuda:0, got list"):
        step.put(0, 0, [1.0], there)


def test_put_of_arrays_on_another_device_names_both(cupy, step):
    k, far = on(cupy, 0, 1, 4, 2, 8), on(cupy, 1, 1, 4, 2, 8)
    with pytest.raises(TypeError, match="v is on device cuda:1, the pool on cuda:0: copy it"):
        step.put(0, 0, k, far)
    with pytest.raises(TypeError, match="slots is on device cuda:1"):
        step.put(0, 0, k, k, slots=on(cupy, 1, 4, dtype=np.int64))


def test_put_of_rows_with_gaps_between_elements_raises(cupy, step):
    k, gaps = on(cupy, 0, 1, 4, 2, 8), on(cupy, 0, 1, 4, 2, 16)[..., ::2]
    with pytest.raises(ValueError, match="last dimension of v must be contiguous, got strides"):
        step.put(0, 0, k, gaps)


def test_put_of_another_dtype_or_shape_raises(cupy, step):
    k = on(cupy, 0, 1, 4, 2, 8)
    with pytest.raises(TypeError, match=r"Invalid dtype of k: expected .* got int32"):
        step.put(0, 0, on(cupy, 0, 1, 4, 2, 8, dtype=np.int32), k)
    with pytest.raises(ValueError, match=r"Invalid shape of k: expected \[1, seqlen, 2, 8\]"):
        step.put(0, 0, on(cupy, 0, 4, 2, 8), k)
    with pytest.raises(ValueError, match=r"Invalid shape of v: expected \[1, 4, 2, 8\] as k"):
        step.put(0, 0, k, on(cupy, 0, 1, 3, 2, 8))
    with pytest.raises(TypeError, match="Invalid dtype of slots: expected int64 or int32"):
        step.put(0, 0, k, k, slots=on(cupy, 0, 4))


def test_torch_tensor_on_the_host_says_how_to_move(cupy, step):
    torch = pytest.importorskip("torch")
    k = torch.zeros(1, 4, 2, 8)
    with pytest.raises(TypeError, match=r"k is a tensor on device cpu.*k\.to\('cuda:0'\)"):
        step.put(0, 0, k, k)


def test_refused_put_changed_nothing(cupy, step):
    pool_valid = step.capacities
    for bad in (np.zeros((1, 4, 2, 8), np.float32), on(cupy, 1, 1, 4, 2, 8)):
        with pytest.raises(TypeError):
            step.put(0, 0, bad, bad)
    assert step.capacities == pool_valid
    # The page was not entered either: its first good put still zeroes it.
    assert step._rows.entering(step._rows.window(0, 4)) is not None
