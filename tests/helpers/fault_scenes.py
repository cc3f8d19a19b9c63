"""Pools in a state where much can go wrong, and the calls that are made to fail in it.

A scene is the same every time that it is built: what a failed call left behind is compared with
what was there before, and what its retry does with what it does in an untouched pool.
"""

from types import SimpleNamespace

from kvpool import KVCachePool
from tests.helpers.pools import R, serve, write

PAGE_SIZE = 4
NUM_PAGES = 64
LONG = R(1, 16)  # cached as it is, and in part under others
TWIN = R(100, 111)  # by two requests at once
OTHER = R(200, 211)  # of a lineage that has published nothing yet

POLICIES = ("lru", "fifo", "lfu")


def scene(policy="lru", *, drained=False, device="cpu", dtype="float32"):
    """A pool with splits, namespaces, locks, forks, duplicates and little room.

    With `drained` memory, the slabs of tokens and page ids are full: runs come from malloc.
    """
    pool = KVCachePool(
        2,
        PAGE_SIZE * NUM_PAGES,
        1,
        4,
        page_size=PAGE_SIZE,
        eviction=policy,
        device=device,
        dtype=dtype,
        max_batch_size=4,
    )
    at = SimpleNamespace(pool=pool)
    for tokens, options in (
        (LONG, {}),
        ([*R(1, 8), *R(50, 57)], {}),
        (R(1, 12), {"extra_key": "lora"}),
        (R(1, 8), {"extra_key": 700}),
        (R(300, 315), {"priority": 2}),
    ):
        request = pool.bind_request(tokens, len(tokens), **options)
        matched = pool.matched_prefix_len(request)
        write(pool, request, matched, len(tokens), 10 * tokens[-1])
        pool.finish_request(request, tokens)
    # Held by the caller: the middle of a path, whose rest may go.
    pool.radix.inc_lock_ref(pool.radix.match_prefix(R(1, 12)).node)
    at.node = pool.radix.match_prefix(R(1, 8)).node
    pool.radix.inc_lock_ref(at.node)
    at.taken = pool.alloc(2 * PAGE_SIZE)
    # A lineage of three over matched, shared and partial pages.
    at.parent = pool.bind_request([*R(1, 8), *R(60, 64)], 24)
    write(pool, at.parent, 8, 14, 2000)
    at.child = pool.fork_request(at.parent, 20)
    at.grandchild = pool.fork_request(at.child, 16)
    write(pool, at.parent, 14, 20, 3000)
    # Two that wrote the same: what the second checkpoints is there already.
    at.first, at.second = pool.bind_request(TWIN, 20), pool.bind_request([*TWIN, 7], 20)
    for request in (at.first, at.second):
        write(pool, request, 0, 12, 4000)
    pool.checkpoint_request(at.first, TWIN)
    # A lineage in which nobody has published, and some have written more.
    at.other = pool.bind_request(OTHER[:6], 24, priority=1)
    write(pool, at.other, 0, 9, 5000)
    at.short = pool.fork_request(at.other, 12)
    write(pool, at.other, 9, 12, 6000)
    at.long = pool.fork_request(at.other, 16)
    write(pool, at.other, 12, 18, 7000)
    if drained:
        drain(pool)
    # One in a namespace that has no root yet, and one that knows only a part of its tokens.
    at.lone = pool.bind_request(R(400, 404), 12, extra_key="new")
    write(pool, at.lone, 0, 9, 8000)
    at.riser = pool.bind_request([*R(1, 8), 5], 9, priority=9)
    k = 0
    while pool.free_pages > 1:
        serve(pool, R(1000 + 10 * k, 1003 + 10 * k), extra_key=900 + k % 2)
        k += 1
    at.step = pool.activate_step(at.parent, at.lone)
    at.lengths = [pool.valid_len(at.parent), pool.valid_len(at.lone)]
    at.table = at.step.page_table(at.lengths)
    return at


def drain(pool):
    """Fork without a page, which copies tokens and ids only, until both come from malloc."""
    prompt = R(500, 523)
    request = pool.bind_request(prompt, len(prompt))
    write(pool, request, 0, len(prompt), 9000)
    memory = pool.radix.memory
    for _ in range(100):
        before = memory()["outside_bytes"]
        pool.fork_request(request, len(prompt))
        # Of the two, the tokens are the longer run.
        if memory()["outside_bytes"] - before > 2 * 4 * len(prompt) // PAGE_SIZE + 4 * len(prompt):
            return
    raise AssertionError("the slabs were not drained by 100 forks")
