"""A CUDA pool under numba's simulator, with stand-ins for CuPy's arrays, equals the CPU pool.

Kernels, launcher, device, steps and tables are the real ones. Bytes of both pools are compared.
"""

import sys
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

from examples.smollm2.model import Llama
from examples.smollm2.weights import LayerWeights, LlamaConfig, LlamaWeights
from kvpool.attention import paged_attention
from tests.fakes import cupy_like
from tests.helpers.pools import assert_ledger

pytestmark = pytest.mark.sim

BF16 = np.dtype(ml_dtypes.bfloat16)


@pytest.fixture
def cupy(monkeypatch):
    """The stand-in, in CuPy's place."""
    fake = cupy_like.module()
    monkeypatch.setitem(sys.modules, "cupy", fake)
    state = {name: getattr(cupy_like.State, name) for name in ("device", "stream", "capturing")}
    yield fake
    for name, value in state.items():
        setattr(cupy_like.State, name, value)


def host(array):
    """A host copy of an array of either pool, as bytes can be compared."""
    found = array.get() if hasattr(array, "get") else np.asarray(array)
    return found.view(np.dtype(f"u{found.dtype.itemsize}"))


def same(a, b):
    np.testing.assert_array_equal(host(a), host(b))


def twins(make_pool, **options):
    """A CPU pool and a CUDA pool of the same shape."""
    shape = {"num_layers": 2, "num_slots": 24, "num_kv_heads": 2, "head_dim": 8, "page_size": 4}
    shape |= options
    if str(shape.get("dtype")).startswith("float8"):
        shape |= {"k_scale": [0.015, 2.0], "v_scale": 0.7}
    return [make_pool(**shape, device=device) for device in ("cpu", "cuda")]


def rows(shape, seed, dtype=np.float32):
    return np.random.default_rng(seed).standard_normal(shape, np.float32).astype(dtype)


def put(pools, steps, layer, start, k, v, **options):
    for pool, step in zip(pools, steps, strict=True):
        upload = pool.array_namespace.asarray
        step.put(layer, start, upload(k), upload(v), **options)


def assert_twins(pools):
    for name in ("key_cache", "value_cache"):
        same(*(getattr(pool, name) for pool in pools))
    for pool in pools:
        assert_ledger(pool)


@pytest.mark.parametrize(
    ("dtype", "source"),
    [
        ("float32", np.float32),
        ("float16", BF16),
        ("bfloat16", BF16),
        ("bfloat16", np.float32),
        ("float8_e4m3fn", BF16),
        ("float8_e5m2", np.float32),
    ],
)
def test_flow_equals_the_cpu_pool(cupy, make_pool, dtype, source):
    pools = twins(make_pool, dtype=dtype)
    assert pools[1].device == "cuda:0"
    ids = [[pool.bind_request(range(5), 8), pool.bind_request(range(9, 12), 8)] for pool in pools]
    steps = [pool.activate_step(*each) for pool, each in zip(pools, ids, strict=True)]
    k, v = rows((8, 2, 8), 1, source), rows((8, 2, 8), 2, source)
    for layer in range(2):
        put(pools, steps, layer, 0, k, v, qo_indptr=[0, 5, 8])
    assert_twins(pools)
    # One decode token a row, through slots that were made once.
    k, v = rows((2, 1, 2, 8), 3, source), rows((2, 1, 2, 8), 4, source)
    for pool, step in zip(pools, steps, strict=True):
        slots = step.window_slot_indices([5, 3], 1)
        upload = pool.array_namespace.asarray
        for layer in range(2):
            step.put(layer, [5, 3], upload(k), upload(v), slots=slots)
    assert_twins(pools)
    for layer in range(2):
        for found, expected in zip(*(step.get(layer, 8) for step in steps), strict=True):
            same(found, expected)
    tables = [step.page_table([6, 4]) for step in steps]
    for name in ("indptr", "indices", "last_page_len"):
        same(*(getattr(table, name) for table in tables))
        same(getattr(tables[1], name), getattr(tables[1], f"{name}_host"))
    same(*(table.block_table(3) for table in tables))
    q = rows((2, 4, 8), 5, source)
    a, b = (
        paged_attention(pool.array_namespace.asarray(q), pool, 1, table)
        for pool, table in zip(pools, tables, strict=True)
    )
    assert b.dtype == q.dtype
    tolerance = 3e-6 if source is np.float32 else 1.6e-2
    np.testing.assert_allclose(
        b.get().astype(np.float32), a.astype(np.float32), rtol=0, atol=tolerance
    )
    # Taking back one token of each row: no row changes its pages, so addresses survive.
    address = tables[1].last_page_len.data.ptr
    assert [step.truncate_to([5, 3], [6, 4]) for step in steps] == [True, True]
    assert_twins(pools)
    assert steps[1].current_page_table.last_page_len.data.ptr == address
    assert steps[1].current_page_table.last_page_len.get().tolist() == [1, 3]
    for pool, each in zip(pools, ids, strict=True):
        pool.finish_request(each[0], list(range(5)))
    assert_twins(pools)


def layouts():
    """K (or V) of 1 row, 5 tokens, 3 heads of 5, as views that callers have; by name."""
    fused = rows((5, 9, 5), 1)  # heads of Q, K, V side by side
    gaps = rows((5, 3, 12), 2)[..., :5]
    by_head = rows((1, 3, 5, 5), 3).swapaxes(1, 2)
    return {
        "fused": fused[None, :, 3:6],
        "gaps between heads": gaps[None],
        "heads first": by_head,
        "reversed": fused[None, ::-1, 6:],
    }


@pytest.mark.parametrize("name", layouts())
def test_put_of_strided_rows_equals_the_cpu_pool(cupy, make_pool, name):
    pools = twins(make_pool, num_kv_heads=3, head_dim=5, dtype="bfloat16")
    k = layouts()[name]
    assert not k.flags.c_contiguous
    for pool in pools:
        step = pool.activate_step(pool.bind_request(range(5), 8))
        # Views are made where the data is, so that strides arrive as they are.
        base = k if pool.device == "cpu" else cupy.ndarray._of(k)
        step.put(0, 0, base, base)
    assert_twins(pools)


def test_batch_of_rows_that_are_not_evenly_spaced(cupy, make_pool):
    pools = twins(make_pool, dtype="float32")
    k = rows((2, 4, 2, 8), 0)[:, :3]
    v = rows((3, 2, 2, 8), 1).swapaxes(0, 1)
    for pool in pools:
        step = pool.activate_step(*(pool.bind_request(range(3), 4) for _ in "ab"))
        wrap = np.asarray if pool.device == "cpu" else cupy.ndarray._of
        step.put(1, 0, wrap(k), wrap(v))
        # K and V of different dtypes are two launches.
        step.put(0, 0, wrap(k.astype(np.float16)), wrap(v))
    assert_twins(pools)


def test_slots_of_the_callers_own(cupy, make_pool):
    pools = twins(make_pool, dtype="float8_e4m3fn")
    k = rows((1, 4, 2, 8), 0)
    for pool in pools:
        step = pool.activate_step(pool.bind_request(range(4), 4))
        upload = pool.array_namespace.asarray
        step.put(0, 0, upload(k), upload(k), slots=upload(np.array([2, -1, 0, -7], np.int32)))
        if pool.device == "cpu":
            with pytest.raises(ValueError, match="slot 24 is past the pool's 24 slots"):
                step.put(0, 0, k, k, slots=np.array([3, 24, 1, 9]))
            step.put(0, 0, k, k, slots=np.array([3, -1, 1, -1]))
        else:
            # The host does not look at them; what is past the end is skipped, scratch included.
            step.put(0, 0, upload(k), upload(k), slots=upload(np.array([3, 24, 1, 2**40])))
            assert not pool.layer_with_scratch(0)[0][24:].any()
    assert_twins(pools)


def test_fork_checkpoint_and_reuse(cupy, make_pool):
    pools = twins(make_pool, dtype="bfloat16")
    k = rows((1, 6, 2, 8), 0)
    for pool in pools:
        upload = pool.array_namespace.asarray
        parent = pool.bind_request(range(6), 8)
        step = pool.activate_step(parent)
        for layer in range(2):
            step.put(layer, 0, upload(k), upload(-k))
        child = pool.fork_request(parent, 8)
        step = pool.activate_step(child)
        step.put(0, 6, upload(k[:, :1]), upload(k[:, :1]))
        step.invalidate_range(5, 7)
        pool.finish_request(parent, list(range(6)))
        pool.bind_request(range(6), 6)
        assert pool.prefix_match_tokens == 4
    assert_twins(pools)


def test_pools_on_two_devices_leave_the_current_one_alone(cupy, make_pool):
    pools = [make_pool(1, 8, 1, 4, page_size=4, device=f"cuda:{i}") for i in (0, 1)]
    for i, pool in enumerate(pools):
        step = pool.activate_step(pool.bind_request([1, 2], 4))
        with cupy.cuda.Device(i):
            k = cupy.full((1, 2, 1, 4), i + 1, np.float32)
        step.put(0, 0, k, k)
        got = step.get(0, 2)[0]
        assert got.data.device_id == i
        assert (got.get() == i + 1).all()
        assert cupy_like.State.device == 0


def test_torch_tensor_is_taken_by_its_address(cupy, make_pool):
    torch = pytest.importorskip("torch")
    host = torch.arange(16, dtype=torch.bfloat16).reshape(1, 2, 1, 8)
    pool = make_pool(1, 8, 1, 8, page_size=4, device="cuda", dtype="bfloat16")
    there = pool.device._from_torch(Pretend(host), "k")
    assert (there.shape, there.strides, there.dtype) == ((1, 2, 1, 8), (32, 16, 16, 2), BF16)
    assert there.data.ptr == host.data_ptr()
    step = pool.activate_step(pool.bind_request([1, 2], 4))
    step.put(0, 0, there, there)
    assert step.get(0, 2)[0].get().astype(np.float32).ravel().tolist() == list(range(16))


class Pretend:
    """A torch tensor on the host that says it is on a GPU, which shares that memory here."""

    def __init__(self, tensor):
        self._tensor = tensor

    def __getattr__(self, name):
        return getattr(self._tensor, name)

    @property
    def device(self):
        return SimpleNamespace(type="cuda", index=0)

    def detach(self):
        return self


def tiny_llama(xp):
    sizes = LlamaConfig(2, 12, 8, 3, 1, 4, 11, 32, 1e4, 1e-5)
    rng = np.random.default_rng(0)

    def make(*shape):
        return rng.standard_normal(shape, np.float32)

    layers = [
        LayerWeights(make(12), make(20, 12), make(12, 12), make(12), make(16, 12), make(12, 8))
        for _ in range(2)
    ]
    embedding = make(11, 12)
    return Llama(LlamaWeights(sizes, embedding, layers, make(12), embedding), xp)


@pytest.mark.parametrize("dtype", ["float32", "float8_e4m3fn"])
def test_example_model_runs_unchanged(cupy, make_pool, dtype):
    logits = []
    for pool in twins(make_pool, num_kv_heads=1, head_dim=4, dtype=dtype):
        model = tiny_llama(pool.array_namespace)
        ids = [pool.bind_request(tokens, 8) for tokens in ([1, 2, 3, 4, 5], [6, 7])]
        step = pool.activate_step(*ids)
        found = [model.forward(pool, step, [1, 2, 3, 4, 5, 6, 7], [0, 0], [0, 5, 7])]
        found.append(model.forward(pool, step, [8, 9], [5, 2], [0, 1, 2]))
        logits.append([a.get() if hasattr(a, "get") else a for a in found])
    for a, b in zip(*logits, strict=True):
        # Sums of a different order may round to a neighbouring code.
        tolerance = 1e-4 if dtype == "float32" else 0.2
        np.testing.assert_allclose(b, a, rtol=tolerance, atol=tolerance)
