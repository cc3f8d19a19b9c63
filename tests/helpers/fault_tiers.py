"""Scenes with tiers, and their calls that are made to fail.

The threads in the background have done their part before a call is made to fail, and rest: what
it is refused is its own. What has arrived by then may come to the tree with the call, whether it
fails or not; where it was refused memory for that, it goes back, and costs a hit.
"""

import threading
import time
from contextlib import contextmanager
from functools import cache

import numpy as np

from kvpool import KVCachePool
from kvpool.following import TreeFollower
from tests.helpers.fault_points import Threads
from tests.helpers.fault_prints import as_plain, checked, differences, fingerprint
from tests.helpers.fault_scenes import LONG, PAGE_SIZE, scene
from tests.helpers.faults import Totals
from tests.helpers.pools import R, serve
from tests.helpers.tiers import MemoryTier, attach

BRANCH = [*LONG, *R(700, 712)]  # of what the tree has
ALONE = R(600, 613)
NEW = [*R(1, 4), *R(850, 862)]  # no tier has it; splits a node
SHAPE = {"page_size": PAGE_SIZE, "max_batch_size": 4}


@cache
def records():
    """Records of the continuations, by key."""
    tier = MemoryTier()
    with KVCachePool(2, PAGE_SIZE * 64, 1, 4, **SHAPE) as pool:
        attach(pool, tier)
        for prompt in (BRANCH, ALONE):
            serve(pool, prompt)
        assert pool.tiers.flush(20)
    return tier.records


@contextmanager
def no_threads():
    """What would run in the background does not, unless a test says so."""
    start, TreeFollower.start = TreeFollower.start, lambda self: None
    try:
        yield
    finally:
        TreeFollower.start = start


def tiered_scene(policy="lru", *, arrived=False, attached=True, drained=False):
    """The scene of all other calls over a tier, one prefetch waiting for a word.

    With `arrived`, another one has brought its pages, and nobody has looked yet.
    """
    at = scene(policy, drained=drained)
    pool = at.pool
    at.tier = MemoryTier()
    at.tier.records.update(records())
    at.held = at.arrived = None
    if attached:
        with no_threads():
            at.tiers = attach(pool, at.tier, write="none", max_fetching_pages=64)
        at.held = pool.prefetch(BRANCH, publish=False)
        assert at.held.wait(20) == 28
        if arrived:
            at.arrived = pool.prefetch(ALONE)
            assert at.arrived.wait(20) == 12
        flow = pool._prefetching.flow
        flow.stop()
        for each in (flow.fetcher, flow._writer, *flow.stack.lanes):
            assert each.join(20)
    stats = pool.stats()
    # One page more than there is as long as the prefetch has its own.
    at.much = (stats["pages_free"] + stats["pages_evictable"] + 1) * PAGE_SIZE
    return at


def tier_print(pool):
    """What belongs to tiers, by name."""
    prefetching = pool._prefetching
    ledger = pool._requests.ledger
    if prefetching is None:
        return {"tiers": None}
    fetches = {
        fetch.number: (
            fetch.local_ids.tolist(),
            fetch.page_ids.tolist(),
            fetch.num_verified,
            fetch.num_published,
            fetch.ended,
        )
        for fetch in prefetching._fetches.values()
    }
    return {
        "tiers": pool.tiers is not None,
        "fetches": fetches,
        "fetching": dict(ledger.fetching),
        "fetch nodes": dict(ledger.fetch_nodes),
        "arrivals": len(prefetching.arrivals),
        "given": pool._requests.give_way.__name__,
    }


def all_prints(pool):
    """Of a pool with or without tiers, all that a failed call must leave as it was."""
    return fingerprint(pool) | tier_print(pool) | {"held": held(pool)}


def plain(found):
    """A result without addresses."""
    if hasattr(found, "found_len"):
        return found.local_len, found.found_len, found.done
    return as_plain(found)


def give_all_back(at):
    """What is wrong when everybody lets go of everything: every page must be free."""
    pool = at.pool
    for prefetch in (at.held, at.arrived):
        if prefetch is not None:
            prefetch.cancel()
    pool.poll_tiers()
    if pool.tiers is not None:
        pool.tiers.close()
    pool.unbind_requests()
    taken = pool._requests.ledger.allocator.taken_pages()
    if pool._requests.ledger.fetching:
        return [f"pages {dict(pool._requests.ledger.fetching)} stay with prefetches"]
    pool.free([page * PAGE_SIZE + i for page in taken.tolist() for i in range(PAGE_SIZE)])
    for node in (at.node, pool.radix.match_prefix(R(1, 12)).node):
        pool.radix.dec_lock_ref(node)
    wrong = checked(pool)
    if pool.radix.protected_size:
        wrong.append(f"{pool.radix.protected_size} tokens stay locked")
    pool.reset_prefix_cache()
    if pool.free_pages != pool.num_pages:
        wrong.append(f"{pool.free_pages} of {pool.num_pages} pages are free in the end")
    if pool._requests.ledger.fetch_nodes:
        wrong.append(f"nodes {pool._requests.ledger.fetch_nodes} stay locked for prefetches")
    return wrong


def held(pool):
    """K and V that each request has written, by id."""
    k, v = pool.key_cache, pool.value_cache
    found = {}
    for request in pool._requests:
        positions = np.arange(pool.valid_len(request.tag))
        pages = pool.request(request.tag).page_ids.astype(np.int64)
        slots = pages[positions // PAGE_SIZE] * PAGE_SIZE + positions % PAGE_SIZE
        found[request.tag] = k[:, slots].tobytes(), v[:, slots].tobytes()
    return found


def others(before, found):
    """What differs in requests that were there, and in what they read."""
    return differences(before, found, set(before) - {"requests", "held", "known", "table"})


def sweep_tiers(name, act, build, injector, *, takes=False, every=1):
    """As `sweep`, for a call beside prefetches: `Totals`.

    A call that `takes` arrivals, or a prefetch's pages, may have them when it fails; and where one
    goes on, it may have given back what it was refused memory for. A call of Python that is cut
    off in its middle may have ended a prefetch, whose pages go with the next call.
    """
    may_end = takes or injector.cuts_off
    totals = Totals()
    for _ in range(2):
        act(build())
    at = build()
    before = all_prints(at.pool)
    result = plain(act(at))
    after = all_prints(at.pool)
    point = 0
    while True:
        at = build()
        injector.install(at)
        error, got, reached = injector.run(act, at, point)
        if not reached:
            break
        totals.runs += 1
        wrong = checked(at.pool)
        if error is not None:
            totals.raised += 1
            found = all_prints(at.pool)
            wrong += (others if may_end else differences)(before, found)
            got = act(at)
            wrong += checked(at.pool)
        if not may_end and error is not None:
            if plain(got) != result:
                wrong.append(f"result {plain(got)}, expected {result}")
            wrong += differences(after, all_prints(at.pool))
        wrong += give_all_back(at)
        how = "went on" if error is None else f"raised {error}"
        totals.violations += [f"{name}, point {point}, {how}: {text}" for text in wrong]
        point += every
    totals.points = totals.runs
    return totals


def sweep_attach(policy):
    """`attach_tiers` on a machine that has no more threads: nothing is left, and it goes later."""
    totals = Totals()
    injector = Threads()

    def act(at):
        attach(at.pool, at.tier)
        return at.pool.tiers is not None

    while True:
        at = tiered_scene(policy, attached=False)
        before, alive = all_prints(at.pool), set(threading.enumerate())
        error, _, reached = injector.run(act, at, totals.points)
        if reached:
            totals.points += 1
            totals.runs += 1
            totals.raised += 1
            wrong = differences(before, all_prints(at.pool))
            # The follower is the pool's, whoever listens to it.
            ends_at = time.monotonic() + 5
            while (left := names(set(threading.enumerate()) - alive)) - {"kvpool-follower"}:
                if time.monotonic() > ends_at:
                    wrong.append(f"threads {left} go on")
                    break
                time.sleep(0.001)
            assert act(at)
            at.pool.tiers.flush(20)
            if not at.tier.records:
                wrong.append("nothing is written once there are threads")
            totals.violations += [f"attach, thread {totals.points}: {text}" for text in wrong]
            if error is None:
                totals.violations.append(f"attached without thread {totals.points}")
        at.pool.close()
        if not reached:
            return totals


def names(threads):
    """Of threads, a set."""
    return {thread.name for thread in threads}
