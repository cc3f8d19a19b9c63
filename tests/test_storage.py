"""KVStorage on its own: whole pages out and in, and the scratch page."""

import numpy as np
import pytest

from kvpool.device import Device
from kvpool.dtypes import KVDType
from kvpool.layout import KVCacheLayout
from kvpool.storage import KVStorage

LAYERS, PAGES, PAGE_SIZE, HEADS, DIM = 2, 4, 3, 2, 5


def make(dtype="float32"):
    layout = KVCacheLayout(LAYERS, HEADS, DIM)
    return KVStorage(layout, PAGES * PAGE_SIZE, PAGE_SIZE, KVDType.of(dtype), Device("cpu"))


def fill(storage):
    """Each element of K its own number, V the negative."""
    numbers = np.arange(storage.key_cache.size, dtype=np.float32)
    storage.key_cache[:] = numbers.reshape(storage.key_cache.shape)
    storage.value_cache[:] = -storage.key_cache


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_read_pages_then_write_pages_restores_the_bytes(dtype):
    storage, other = make(dtype), make(dtype)
    fill(storage)
    pages = np.array([3, 0], np.int32)
    k, v = storage.read_pages(pages)
    assert k.shape == v.shape == (LAYERS, 2, PAGE_SIZE, HEADS, DIM)
    other.write_pages(np.array([1, 2], np.int32), k, v)
    for source, target in ((3, 1), (0, 2)):
        theirs = slice(target * PAGE_SIZE, (target + 1) * PAGE_SIZE)
        ours = slice(source * PAGE_SIZE, (source + 1) * PAGE_SIZE)
        for mine, copied in (
            (storage.key_cache, other.key_cache),
            (storage.value_cache, other.value_cache),
        ):
            assert mine[:, ours].tobytes() == copied[:, theirs].tobytes()
    assert not np.asarray(other.key_cache[:, :PAGE_SIZE], np.float32).any()


def test_read_pages_gives_copies():
    storage = make()
    fill(storage)
    k, _ = storage.read_pages(np.array([0], np.int32))
    k[:] = 0
    assert storage.key_cache[0, 0, 0, 1] == 1


def test_write_pages_of_another_shape_or_dtype_raises_and_writes_nothing():
    storage = make()
    fill(storage)
    before = storage.key_cache.copy()
    k, v = storage.read_pages(np.array([0], np.int32))
    for bad_k, bad_v in ((k[:1], v), (k, v.astype(np.float64))):
        with pytest.raises(ValueError, match=r"expected \(2, 1, 3, 2, 5\)"):
            storage.write_pages(np.array([1], np.int32), bad_k, bad_v)
    np.testing.assert_array_equal(storage.key_cache, before)


def test_scratch_page_is_behind_the_public_views_and_out_of_reach_of_a_write():
    storage = make()
    k, v = storage.layer(1)
    assert k.shape == v.shape == ((PAGES + 1) * PAGE_SIZE, HEADS, DIM)
    assert storage.key_cache.shape == (LAYERS, PAGES * PAGE_SIZE, HEADS, DIM)
    rows = np.ones((3, HEADS, DIM), np.float32)
    storage.write(1, np.array([PAGES * PAGE_SIZE, -1, 2]), rows, rows)
    assert np.flatnonzero(k.any(axis=(1, 2))).tolist() == [2]
    assert np.flatnonzero(v.any(axis=(1, 2))).tolist() == [2]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e5m2"])
def test_zero_pages_clears_them_on_every_layer_and_nothing_else(dtype):
    storage = make(dtype)
    for cache in (storage.key_cache, storage.value_cache):
        cache[:] = 1
    storage.zero_pages(np.array([3, 1]))
    for cache in (storage.key_cache, storage.value_cache):
        pages = np.asarray(cache, np.float32).reshape(LAYERS, PAGES, -1)
        assert not pages[:, [1, 3]].any()
        assert (pages[:, [0, 2]] == 1).all()
