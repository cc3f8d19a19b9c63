"""K and V that say which prefix they belong to, so that any page of any pool can be checked.

The bytes of a page are drawn from a digest of its namespace and of all tokens up to its end.
"""

from functools import lru_cache
from hashlib import sha256

import numpy as np


def prefixes(pool):
    """Page id -> (type of the namespace, namespace, tokens up to the end of the page)."""
    nodes = {node.node: node for node in pool.radix.nodes() if not node.detached}
    found, size = {}, pool.page_size

    def path_of(node):
        path = []
        while node is not None:
            path.append(node.tokens.tolist())
            node = nodes.get(node.parent)
        return [token for part in reversed(path) for token in part]

    for node in nodes.values():
        tokens = path_of(node)
        for i, page in enumerate(node.pages.tolist()):
            end = node.start + (i + 1) * size
            found[page] = (type(node.extra_key), node.extra_key, tuple(tokens[:end]))
    return found


def priorities(pool):
    """Page id -> priority."""
    return {
        page: node.priority
        for node in pool.radix.nodes()
        if not node.detached
        for page in node.pages.tolist()
    }


@lru_cache(maxsize=4096)
def stamp_of(prefix, num_bytes):
    """The bytes that a page of this prefix holds, K of all layers and then V."""
    kind, key, tokens = prefix
    # Python does not write huge numbers in decimal digits.
    key = hex(key) if kind is int else repr(key)
    digest = sha256(repr((kind.__name__, key, tokens)).encode("utf-8", "surrogatepass")).digest()
    return np.random.default_rng(int.from_bytes(digest[:8], "little")).bytes(num_bytes)


def page_bytes(pool, page):
    """K of all layers of a page, then V."""
    slots = slice(page * pool.page_size, (page + 1) * pool.page_size)
    caches = (pool.key_cache, pool.value_cache)
    return b"".join(np.ascontiguousarray(cache[:, slots]).tobytes() for cache in caches)


def stamp(pool):
    """Give every cached page the bytes of its prefix."""
    for page, prefix in prefixes(pool).items():
        slots = slice(page * pool.page_size, (page + 1) * pool.page_size)
        part = pool.key_cache[:, slots]
        data = np.frombuffer(stamp_of(prefix, 2 * part.nbytes), part.dtype)
        pool.key_cache[:, slots], pool.value_cache[:, slots] = data.reshape(2, *part.shape)


def wrong_pages(pool):
    """Prefixes of cached pages whose bytes are not theirs."""
    return [
        prefix
        for page, prefix in prefixes(pool).items()
        if (found := page_bytes(pool, page)) != stamp_of(prefix, len(found))
    ]


def cached(pool):
    """Prefix -> priority, of everything cached."""
    importance = priorities(pool)
    return {prefix: importance[page] for page, prefix in prefixes(pool).items()}


def drain(pool):
    """Evict all that can go; the prefixes in the order in which they went."""
    names = prefixes(pool)
    pages = pool.radix.evict(pool.radix.total_size)
    offsets = np.arange(pool.page_size)
    pool.free((pages[:, None] * np.int64(pool.page_size) + offsets).ravel())
    return [names[page] for page in pages.tolist()]
