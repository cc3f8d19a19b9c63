"""Clean-ups that the garbage collector runs: never in the middle of a verb that moves pages."""

import contextlib
import gc

import numpy as np
import pytest

from kvpool import KVCacheError
from tests.helpers.pools import R, cache_prompt, case_pool, write

NUM_PAGES = 12


@contextlib.contextmanager
def at_collection(number, clean_up):
    """Run `clean_up` at this collection inside of the block; says whether it came."""
    seen = []

    def look(phase, _):
        if phase != "start":
            return
        seen.append(phase)
        if len(seen) == number:
            with contextlib.suppress(KVCacheError, ValueError):
                clean_up()

    came = []
    thresholds = gc.get_threshold()
    gc.collect()
    gc.callbacks.append(look)
    gc.set_threshold(1, 1000, 1000)
    try:
        yield came
    finally:
        gc.set_threshold(*thresholds)
        gc.callbacks.remove(look)
        came.extend(seen[number - 1 :])


@pytest.fixture
def _little_to_collect():
    """What was there before is looked at once, not at every collection."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def scene(make_pool):
    """Namespaces, a request on a cached prefix, one of its own, and a few free pages."""
    pool = case_pool(make_pool, 4, NUM_PAGES)
    for key in ("a", "b", 7):
        cache_prompt(pool, R(1, 4), extra_key=key)
    cache_prompt(pool, R(1, 8))
    a = pool.bind_request([*R(1, 8), 9], 12)
    b = pool.bind_request(R(20, 24), 12, extra_key="d")
    write(pool, b, 0, 5)
    return pool, a, b


CALLS = {
    "bind": lambda pool, a, b: pool.bind_request(R(60, 65), 16),
    "bind_with_prefix": lambda pool, a, b: pool.bind_with_prefix(R(1, 9), 4 * NUM_PAGES),
    "bind_requests": lambda pool, a, b: pool.bind_requests(3, 16),
    "fork": lambda pool, a, b: pool.fork_request(b, 20),
    "extend": lambda pool, a, b: pool.extend_request(b, 28),
    "finish": lambda pool, a, b: pool.finish_request(b, R(20, 24)),
    "checkpoint": lambda pool, a, b: pool.checkpoint_request(b, R(20, 24)),
    "unbind": lambda pool, a, b: pool.unbind_request(a),
    "reset": lambda pool, a, b: pool.reset_prefix_cache(),
    "reset of the tree": lambda pool, a, b: pool.radix.reset(),
    "insert": lambda pool, a, b: pool.radix.insert(R(1, 4), np.zeros(1, np.int32), "new"),
    "evict": lambda pool, a, b: pool.radix.evict(16),
    "alloc": lambda pool, a, b: pool.alloc(20),
    "page_owners": lambda pool, a, b: pool.page_owners(),
    "check": lambda pool, a, b: pool.check(),
}
CLEAN_UPS = {
    "binds": lambda pool, a, b: pool.bind_request(R(70, 74), 8),
    "unbinds": lambda pool, a, b: pool.unbind_request(b),
    "finishes": lambda pool, a, b: pool.finish_request(b, R(20, 24)),
    "caches in a new namespace": lambda pool, a, b: cache_prompt(pool, R(1, 4), extra_key="new"),
    "resets": lambda pool, a, b: pool.reset_prefix_cache(),
    "takes": lambda pool, a, b: pool.alloc(8),
    "unbinds all": lambda pool, a, b: pool.unbind_requests(),
}


@pytest.mark.usefixtures("_little_to_collect")
@pytest.mark.parametrize("clean_up", CLEAN_UPS)
@pytest.mark.parametrize("call", CALLS)
def test_clean_up_at_any_collection_of_a_call_leaves_the_ledger_whole(make_pool, call, clean_up):
    for number in range(1, 40):
        pool, a, b = scene(make_pool)
        with (
            at_collection(number, lambda: CLEAN_UPS[clean_up](pool, a, b)) as came,  # noqa: B023
            contextlib.suppress(KVCacheError, ValueError, RuntimeError),
        ):
            CALLS[call](pool, a, b)
        pool.check()
        pool.unbind_requests()
        pool.reset_prefix_cache()
        stats = pool.stats()
        assert stats["pages_free"] + stats["pages_taken"] == NUM_PAGES
        pool.check()
        pool.close()
        if not came:
            return
