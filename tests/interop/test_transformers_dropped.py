"""Caches that nobody closes, threads that meet in a pool or a model, and interrupts."""

import gc
import sys
import threading
from contextlib import suppress

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch

from kvpool import KVCacheStateError
from kvpool.interop.transformers import PoolCache, generate
from tests.helpers.hf_models import forward, pool_for, random_ids

pytestmark = pytest.mark.peers


@pytest.fixture
def pool(make_pool, model):
    return pool_for(make_pool, model)


def in_thread(call):
    """Run `call` in a thread of its own; the exception that ended it, if any."""
    found = []

    def run():
        try:
            call()
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()
    return found[0] if found else None


def test_cache_that_is_dropped_gives_its_pages_back(model, pool):
    cache = PoolCache(model, pool, random_ids(2, 9), max_new_tokens=4)
    del cache
    gc.collect()
    assert pool.bound_request_count == 0
    assert pool.free_pages == pool.num_pages
    with torch.no_grad():
        model(random_ids(1, 3))
    assert not model.get_decoder()._forward_pre_hooks


def test_cache_that_is_dropped_by_another_thread_waits_for_the_pools(model, pool):
    caches = [PoolCache(model, pool, random_ids(2, 9), max_new_tokens=4)]
    assert in_thread(caches.clear) is None
    assert pool.bound_request_count == 2  # that thread does not enter the pool
    with PoolCache(model, pool, random_ids(1, 5)) as cache:
        assert pool.bound_request_count == len(cache.request_ids) == 1
    assert pool.bound_request_count == 0


def test_cache_that_outlives_its_pool_is_dropped_silently(model, make_pool):
    closed = pool_for(make_pool, model)
    cache = PoolCache(model, closed, random_ids(1, 9))
    closed.close()
    del cache
    gc.collect()


def test_cache_that_cannot_be_closed_now_is_given_back_later(model, pool, monkeypatch):
    """As where two threads share a pool without a lock: each refuses what the other does."""
    ids = random_ids(1, 9)
    cache = PoolCache(model, pool, ids)
    with monkeypatch.context() as patch:
        patch.setattr(pool, "unbind_request", refuse)
        cache.close()
    assert pool.bound_request_count == 1
    generate(model, pool, ids, torch.ones_like(ids), max_new_tokens=2)
    assert pool.bound_request_count == 0


def refuse(*_):
    raise KVCacheStateError("the pool is in use by thread 1, and thread 2 entered")


def test_threads_without_a_lock_are_refused_and_leave_nothing(model, pool):
    errors = []

    def work(seed):
        for number in range(8):
            ids = random_ids(2, 21, seed * 100 + number)
            generate(model, pool, ids, torch.ones_like(ids), max_new_tokens=4)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        threads = [
            threading.Thread(target=lambda i=i: errors.append(in_thread(lambda: work(i))))
            for i in range(3)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
    finally:
        sys.setswitchinterval(before)
    assert all(error is None or isinstance(error, KVCacheStateError) for error in errors)
    ids = random_ids(1, 5)
    generate(model, pool, ids, torch.ones_like(ids), max_new_tokens=1)
    assert pool.bound_request_count == 0
    pool.check()


def test_hook_that_comes_by_another_thread_lets_a_forward_pass(model, pool):
    """torch calls a hook without kwargs between two steps of its registration."""
    with PoolCache(model, pool, random_ids(1, 9)):
        decoder = model.get_decoder()
        decoder._forward_pre_hooks_with_kwargs.clear()
        with torch.no_grad():
            model(random_ids(1, 3))


def test_interrupt_in_a_reordering_leaves_nothing_bound(model, pool, monkeypatch):
    ids = random_ids(2, 9)

    def interrupt(*_):
        raise KeyboardInterrupt

    with suppress(KeyboardInterrupt), torch.no_grad(), PoolCache(model, pool, ids) as cache:
        forward(model, ids, cache)
        monkeypatch.setattr(pool, "fork_request", interrupt)
        cache.reorder_cache(torch.tensor([0, 0]))
    assert cache.request_ids == []
    assert pool.bound_request_count == 0
