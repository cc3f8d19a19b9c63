"""Poison mode of a CUDA pool: stand-ins for the arrays, no kernel of ours and no GPU.

What a put leaves in the pages of a poisoned CUDA pool is compared in the simulator:
``KVPOOL_POISON=1 make test-sim``.
"""

import numpy as np
import pytest

from kvpool import KVCacheCorruptionError, KVCacheStateError
from kvpool.attention import PagedAttention
from kvpool.poison.stored import POISON
from tests.fakes import cupy_like
from tests.interop.pools import DIM, HEADS, LAYERS, Q_HEADS, random_q

DTYPES = ("float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")


def pool_of(make_pool, dtype="bfloat16"):
    return make_pool(LAYERS, 16, HEADS, DIM, page_size=4, device="cuda", dtype=dtype, poison=True)


def poison_pages(pool):
    found = pool.key_cache.host
    bits = found.view(f"u{found.dtype.itemsize}").reshape(LAYERS, 4, -1)
    return np.flatnonzero((bits == POISON[pool.dtype]).all(axis=(0, 2))).tolist()


def fill(pool, request_id, length):
    """What a kernel of the caller's own does."""
    slots = pool.activate_step(request_id).slot_indices(length).host
    for cache in (pool.key_cache, pool.value_cache):
        cache.host[:, slots] = 1
    pool.mark_written(request_id, length)


@pytest.mark.parametrize("dtype", DTYPES)
def test_pages_are_poisoned_and_hashed_on_the_device(make_pool, cupy, dtype):
    pool = pool_of(make_pool, dtype)
    assert poison_pages(pool) == [0, 1, 2, 3]
    a = pool.bind_request(range(8), 12)
    fill(pool, a, 8)
    assert len(poison_pages(pool)) == 2
    pool.finish_request(a, range(8))
    assert len(poison_pages(pool)) == pool.free_pages == 2
    b = pool.bind_request(range(9), 12)
    assert pool.matched_prefix_len(b) == 8
    pool.unbind_request(b)
    pool.check()
    pool.value_cache.host[1, 0, 0, 0] = 2
    with pytest.raises(KVCacheCorruptionError, match="changed since it was cached"):
        pool.bind_request(range(9), 12)
    pool.reset_prefix_cache()
    assert poison_pages(pool) == [0, 1, 2, 3]
    pool.close()


def test_verbs_that_would_write_poison_are_refused_in_a_capture(make_pool, cupy):
    """They would be recorded in the graph, and poison the page at every replay."""
    pool = pool_of(make_pool)
    a = pool.bind_request(range(4), 8)
    slots = pool.alloc(4)
    with cupy_like.capture():
        for call in (
            lambda: pool.bind_request(range(4), 4),
            lambda: pool.bind_requests(1, 4),
            lambda: pool.extend_request(a, 12),
            lambda: pool.shrink_request(a, 4),
            lambda: pool.finish_request(a, range(4)),
            lambda: pool.unbind_request(a),
            lambda: pool.alloc(4),
            lambda: pool.free(slots),
            lambda: pool.reset_prefix_cache(),
        ):
            with pytest.raises(KVCacheStateError, match="poison mode writes to pages"):
                call()
    assert (pool.bound_request_count, pool.free_pages) == (1, 1)
    pool.close()


def test_flashinfer_is_asked_only_about_pages_that_were_written(make_pool, torch, flashinfer):
    pool = pool_of(make_pool)
    a = pool.bind_request(range(4), 8)
    fill(pool, a, 4)
    attention = PagedAttention(pool, pool.step.page_table(4))
    _, q = random_q(torch, 1)
    attention.plan(Q_HEADS, "bfloat16")
    attention.run(0, q)
    assert attention.backend == "flashinfer"
    pool.unbind_request(a)
    with pytest.raises(KVCacheCorruptionError, match=r"position 0 of layer 1 .*owner: free"):
        attention.run(1, q)
    pool.close()
