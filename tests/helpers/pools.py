"""Small helpers with which a test reads like the scenario that it checks.

Ranges are half-open in positions, as in the library; only `R(1, 8)`, a prompt, includes both ends.
"""

from contextlib import contextmanager

import numpy as np

LAYER_STEP = 1000  # what one layer adds to the written keys, so that layers cannot be mixed up


def R(first, last):
    """Tokens `first..last`, both included."""
    return list(range(first, last + 1))


def case_pool(make_pool, page_size, num_pages, **options):
    """Two layers, two heads, eight dims, float32: the pool of the scenarios."""
    return make_pool(2, page_size * num_pages, 2, 8, page_size=page_size, **options)


def serve(pool, tokens, **options):
    """Bind, write and finish a request; its id."""
    tokens = list(tokens)
    request = pool.bind_request(tokens, len(tokens), **options)
    pool.mark_written(request, len(tokens))
    pool.finish_request(request, tokens)
    return request


def st(pool):
    """Free pages; tokens held by the tree; of these the unlocked and the locked ones."""
    radix = pool.radix
    return (pool.free_pages, radix.total_size, radix.evictable_size, radix.protected_size)


def window(pool, start, end, base, layer=0, batch=1):
    """K and V `[batch, end - start, heads, dim]`: K = base + position + 1000 * layer, V = -K."""
    column = base + np.arange(start, end, dtype=np.float32) + LAYER_STEP * layer
    shape = (batch, end - start, pool.num_kv_heads, pool.head_dim)
    k = np.ascontiguousarray(np.broadcast_to(column[None, :, None, None], shape))
    return k, -k


def write(pool, request_id, start, end, base=100):
    """Write positions `[start, end)` of one request on every layer; the step that did it."""
    step = pool.activate_step(request_id)
    for layer in range(pool.num_layers):
        step.put(layer, start, *window(pool, start, end, base, layer))
    return step


def read(pool, request_id, length):
    """Keys of layer 0 at `[0, length)`, after checking heads, dims, V and the other layers."""
    step = pool.activate_step(request_id)
    first = None
    for layer in range(pool.num_layers):
        k, v = (np.asarray(a, dtype=np.float32) for a in step.get(layer, length))
        assert k.shape == v.shape == (1, length, pool.num_kv_heads, pool.head_dim)
        assert (k == k[..., :1, :1]).all(), "heads and dims differ"
        assert (v == -k).all(), "V is not -K"
        keys = k[0, :, 0, 0]
        first = keys if first is None else first
        assert (keys == first + LAYER_STEP * layer).all(), f"layer {layer}: {keys} beside {first}"
    return first.tolist()


def values(base, start, end):
    """What `read` gives for positions `[start, end)` written with `base`."""
    return [float(base + position) for position in range(start, end)]


def slots(pool, request_id, length):
    """Slot ids of positions `[0, length)`."""
    return np.asarray(pool.activate_step(request_id).slot_indices(length)).tolist()


def pages(pool, request_id, length):
    """Page ids under positions `[0, length)`, in order, each once."""
    return list(dict.fromkeys(slot // pool.page_size for slot in slots(pool, request_id, length)))


def slots_of_pages(pool, page_ids):
    """All slots of whole pages, in the order of the pages, as `free` wants them."""
    offsets = np.arange(pool.page_size, dtype=np.int64)
    return (np.asarray(page_ids, dtype=np.int64)[:, None] * pool.page_size + offsets).ravel()


def cache_prompt(pool, tokens, base=100, **bind_options):
    """Bind, write and finish `tokens`, so that their whole pages are in the tree."""
    request_id = pool.bind_request(tokens, len(tokens), **bind_options)
    matched = pool.matched_prefix_len(request_id)
    if matched < len(tokens):
        write(pool, request_id, matched, len(tokens), base)
    return pool.finish_request(request_id, tokens)


def assert_ledger(pool):
    """Each page is in exactly one state: free, private, in the tree or taken."""
    stats = pool.stats()
    states = [stats[f"pages_{name}"] for name in ("free", "private", "tree", "taken")]
    assert sum(states) == pool.num_pages, stats
    assert stats["pages_free"] == pool.free_pages
    assert stats["pages_tree"] * pool.page_size == pool.radix.total_size
    assert pool.radix.evictable_size + pool.radix.protected_size == pool.radix.total_size
    assert min(pool.radix.evictable_size, pool.radix.protected_size) >= 0
    pool.check()


def snapshot(pool, *request_ids):
    """All that a refused call must leave as it was."""
    stats = {k: v for k, v in pool.stats().items() if not k.startswith("bind_failures")}
    rows = []
    for request_id in request_ids:
        info = pool.request(request_id)
        rows.append(
            (
                info.request_id,
                info.capacity,
                info.matched_len,
                info.valid_len,
                info.shared_len,
                np.asarray(info.page_ids).tolist(),
                info.extra_key,
                info.priority,
                pool.valid_len(request_id),
            )
        )
    tree = (pool.radix.num_nodes, pool.radix.format_tree())
    data = (np.asarray(pool.key_cache).tobytes(), np.asarray(pool.value_cache).tobytes())
    return st(pool), tree, stats, rows, pool.bound_request_count, pool.request_capacity, data


@contextmanager
def unchanged(pool, *request_ids):
    """Around a call that must raise: afterwards nothing has changed."""
    before = snapshot(pool, *request_ids)
    yield
    assert snapshot(pool, *request_ids) == before
    pool.check()
