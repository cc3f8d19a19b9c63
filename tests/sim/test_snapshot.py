"""Snapshots of CUDA pools: the same file as of a CPU pool, and either device loads it."""

import sys

import numpy as np
import pytest

from kvpool import KVCachePool, KVCacheStateError
from tests.fakes import cupy_like
from tests.helpers.stamps import cached

pytestmark = pytest.mark.sim


@pytest.fixture
def cupy(monkeypatch):
    """The stand-in, in CuPy's place."""
    fake = cupy_like.module()
    monkeypatch.setitem(sys.modules, "cupy", fake)
    return fake


def host(array):
    """Bytes of an array of either device."""
    return (array.get() if hasattr(array, "get") else np.ascontiguousarray(array)).tobytes()


def filled(make_pool, device, dtype):
    """A pool with two prompts of random K and V, which share a page."""
    scales = {"k_scale": [0.015, 2.0], "v_scale": 0.7} if dtype.startswith("float8") else {}
    pool = make_pool(2, 32, 2, 8, page_size=4, device=device, dtype=dtype, **scales)
    rng = np.random.default_rng(1)
    for tokens in ([*range(10)], [*range(4), *range(50, 58)]):
        request = pool.bind_request(tokens, len(tokens), priority=len(tokens), extra_key="tenant")
        start = pool.matched_prefix_len(request)
        step = pool.activate_step(request)
        for layer in range(2):
            rows = rng.standard_normal((1, len(tokens) - start, 2, 8), np.float32)
            rows = pool.array_namespace.asarray(rows)
            step.put(layer, start, rows, rows)
        pool.finish_request(request, tokens)
    return pool


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn"])
def test_either_device_writes_the_same_file_and_loads_it(cupy, make_pool, tmp_path, dtype):
    pools = [filled(make_pool, device, dtype) for device in ("cpu", "cuda")]
    files = [tmp_path / "cpu", tmp_path / "cuda"]
    for pool, file in zip(pools, files, strict=True):
        assert pool.save(file).pages == 4
    assert files[0].read_bytes() == files[1].read_bytes()
    for device in ("cpu", "cuda"):
        loaded = make_pool.keep(KVCachePool.load(files[0], device=device))
        assert cached(loaded) == cached(pools[0])
        for prompt in ([*range(8)], [*range(4), *range(50, 58)]):
            found = [pool.radix.match_prefix(prompt, "tenant").pages for pool in (*pools, loaded)]
            assert [pages.size for pages in found] == [len(prompt) // 4] * 3
            k = [
                host(cache[:, int(page) * 4 : int(page) * 4 + 4])
                for pool, pages in zip((*pools, loaded), found, strict=True)
                for page in pages
                for cache in (pool.key_cache, pool.value_cache)
            ]
            third = len(k) // 3
            assert k[:third] == k[third : 2 * third] == k[2 * third :]


def test_save_in_a_graph_capture_is_refused(cupy, make_pool, tmp_path, monkeypatch):
    pool = filled(make_pool, "cuda", "float32")
    monkeypatch.setattr(cupy_like.State, "capturing", True)
    with pytest.raises(KVCacheStateError, match="graph capture"):
        pool.save(tmp_path / "pool")
    monkeypatch.undo()
    assert not list(tmp_path.iterdir())
