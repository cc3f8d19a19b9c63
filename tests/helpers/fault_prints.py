"""What a failed call must leave as it was: a fingerprint of a pool, and how two of them differ."""

import numpy as np

from kvpool.page_table import PageTable
from kvpool.step import Step


def as_plain(value):
    """A result without addresses: arrays as lists, tuples and lists item by item."""
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, (tuple, list)):
        return [as_plain(item) for item in value]
    if isinstance(value, PageTable):
        return [value.indptr.tolist(), value.indices.tolist(), value.last_page_len.tolist()]
    if isinstance(value, Step):
        return value.request_ids
    return value


def fingerprint(pool):
    """All that a failed call must leave as it was, by name."""
    ledger = pool._requests.ledger  # the parts that a pool shows to nobody count as well
    survey = pool.radix.survey()
    found = {
        "stats": pool.stats(),
        "last id": ledger.last_tag,
        "free list": ledger.allocator.free_pages().tolist(),
        "taken": ledger.allocator.taken_pages().tolist(),
        "locks": [lock for lock in ledger.lock_counts() if any(lock[1:])],
        "namespaces": sorted(map(repr, pool.radix.namespaces)),
        "nodes": sorted(
            (
                int(node.node),
                node.start,
                node.tokens.tolist(),
                node.pages.tolist(),
                node.lock_ref,
                node.priority,
                node.detached,
            )
            for node in pool.radix.nodes()
        ),
        "order": sorted(zip(survey.handles.tolist(), survey.turns.tolist(), strict=True)),
        "text": pool.radix.format_tree(max_nodes=None, max_depth=None),
        "table": as_plain(current_table(pool)),
        "active": (pool.request_capacity, [request.tag for request in pool._live_rows()]),
    }
    history = pool.radix.history
    if history is not None:
        remembered = (history.num_pages, history.num_records, history.num_forgotten)
        found["history"] = (*remembered, history.evicted_pages)
    requests = {}
    for request in pool._requests:
        info = pool.request(request.tag)
        requests[request.tag] = (
            *(value for name, value in vars(info).items() if name != "page_ids"),
            info.page_ids.tolist(),
            ledger.lengths.column(request.row),
            (request.tree_pages, request.entered_pages, request.num_shrinks),
            sorted(request.private_pages().tolist()),
        )
    found["requests"] = requests
    found["known"] = [request.known_len for request in pool._requests]
    found["memory"] = pool.radix.memory()["runs_in_use_bytes"]
    found["bytes"] = stored(pool)
    return found


def current_table(pool):
    """The shared page table of the active step, or None."""
    step = pool._step
    return step.current_page_table if step is not None and step.is_alive else None


def stored(pool):
    """K and V of all that is cached or written, by page: bytes that somebody may read."""
    k, v = np.asarray(pool.key_cache), np.asarray(pool.value_cache)
    slots = set()
    offsets = np.arange(pool.page_size)
    for node in pool.radix.nodes():
        slots.update((node.pages[:, None] * pool.page_size + offsets).ravel().tolist())
    for request in pool._requests:
        written = max(pool._requests.ledger.lengths.column(request.row))
        pages = pool.request(request.tag).page_ids.astype(np.int64)
        slots.update((pages[:, None] * pool.page_size + offsets).ravel()[:written].tolist())
    rows = sorted(slots)
    return rows, k[:, rows].tobytes(), v[:, rows].tobytes()


# What a call that did without refused memory may do otherwise than one that got it.
DISPENSABLE = {"history", "free list", "known", "memory"}


def differences(before, after, leaving_out=()):
    """Names of the parts of two fingerprints that are not equal."""
    return [
        f"{name}: {before.get(name)} became {after.get(name)}"[:400]
        for name in before | after
        if name not in leaving_out and before.get(name) != after.get(name)
    ]


def evictions_only(before, after):
    """Differences but for pages that went from the tree to the free list."""
    wrong = []
    gone = {"stats", "free list", "nodes", "order", "text", "history", "bytes", "namespaces"}
    gone |= {"memory"}
    wrong += differences(before, after, gone)
    pages = [{page for node in found["nodes"] for page in node[3]} for found in (before, after)]
    if not pages[1] <= pages[0]:
        wrong.append("the tree got pages")
    freed = set(after["free list"]) - set(before["free list"])
    if freed != pages[0] - pages[1]:
        wrong.append(f"{pages[0] - pages[1]} left the tree, {freed} came to the free list")
    stats = dict(before["stats"])
    stats["pages_free"] += len(freed)
    stats["pages_tree"] -= len(freed)
    stats["pages_evictable"] -= len(freed)
    stats["evicted_pages"] += len(freed)
    if stats != after["stats"]:
        wrong.append(f"stats {after['stats']}, expected {stats}")
    return wrong


def checked(pool):
    """What the pool's own check says, as a list."""
    try:
        pool.check()
    except Exception as error:
        return [f"check: {error}"]
    return []
