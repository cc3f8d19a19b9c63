"""Races of attention over pages: decode steps, and prompts behind a cached prefix.

torch gathers the pages and attends with `scaled_dot_product_attention`, the heads of a group
folded into the queries: here that is many times faster than its own `enable_gqa`. "SDPA alone" is
handed what a gather would have made. NumPy gathers, and attends in float32, one row at a time,
where that is not too slow.
"""

import numpy as np

from bench.data.pools import HEAD_DIM, decoded, decoded_by_torch, scattered_pool
from bench.data.race import Race, as_torch, torch
from kvpool.attention import PagedAttention
from kvpool.dtypes import FLOAT_DTYPES
from kvpool.kernels.fp8 import FORMATS

KV_HEADS, GROUP = 4, 4
MOST_FOR_NUMPY = 131_072  # positions: beyond, it takes many seconds a call
COPIED_AT_ONCE = 256 << 20  # bytes: a floor needs no gigabytes of its own


def num_bytes(dtype, batch_size, length):
    """Stored K and V of all rows."""
    itemsize = 1 if dtype in FORMATS else FLOAT_DTYPES[dtype].itemsize
    return 2 * batch_size * length * KV_HEADS * HEAD_DIM * itemsize


def race(dtype, batch_size, length, num_queries):
    """Yield the race in which each row has `num_queries` queries, the last of its positions."""
    name = dtype if dtype in FORMATS else None
    compute = FLOAT_DTYPES["bfloat16" if name else dtype]
    with scattered_pool(dtype, batch_size * length, KV_HEADS) as pool:
        step = filled(pool, batch_size, length)
        shape = batch_size * num_queries, KV_HEADS * GROUP, HEAD_DIM
        q = np.random.default_rng(2).standard_normal(shape, np.float32).astype(compute)
        out = np.empty_like(q)
        slots = step.slot_indices(length)
        caches = pool.key_layer(0), pool.value_layer(0)
        attention = PagedAttention(
            pool, step.page_table(length), qo_indptr=np.arange(batch_size + 1) * num_queries
        )
        by_numpy = numpy_attention(q, caches, slots, batch_size, name)
        calls = {
            "kvpool": lambda: attention.run(0, q, out),
            "NumPy": by_numpy if batch_size * length <= MOST_FOR_NUMPY else None,
            "torch": None,
            "SDPA alone": None,
            "copy": floor(num_bytes(dtype, batch_size, length)),
        }
        if torch is not None:
            gather, attend = torch_attention(q, caches, slots, batch_size, name)
            gathered = gather()
            calls["torch"] = lambda: attend(*gather())
            calls["SDPA alone"] = lambda: attend(*gathered)
        found = attention.run(0, q).astype(np.float32)
        for contender in ("NumPy", "torch"):
            if calls[contender] is not None:
                other = calls[contender]()
                other = other.float().numpy() if contender == "torch" else other
                np.testing.assert_allclose(found, other, rtol=0.05, atol=0.01)
        kind = "decode" if num_queries == 1 else f"prefill of {num_queries:,}"
        yield Race(
            f"{kind}, batch {batch_size}, {length:,} tokens",
            dtype,
            num_bytes(dtype, batch_size, length),
            calls,
        )


def filled(pool, batch_size, length):
    """A step of rows of random K and V."""
    rows = np.random.default_rng(1).standard_normal((2, 1, length, KV_HEADS, HEAD_DIM), np.float32)
    rows = rows.astype(FLOAT_DTYPES[pool.compute_dtype])
    requests = []
    for row in range(batch_size):
        tokens = np.arange(row * length, (row + 1) * length, dtype=np.int32)
        requests.append(pool.bind_request(tokens, length))
        pool.activate_step(requests[-1]).put(0, 0, *rows)
    return pool.activate_step(requests)


def floor(size):
    """A copy of so many bytes, in pieces."""
    piece = min(size, COPIED_AT_ONCE)
    source, target = np.ones(piece, np.uint8), np.ones(piece, np.uint8)

    def copy():
        for start in range(0, size, piece):
            end = min(piece, size - start)
            np.copyto(target[:end], source[:end])

    return copy


def numpy_attention(q, caches, slots, batch_size, name):
    """Gather and attend, in float32."""
    slots = slots.reshape(batch_size, -1)
    num_queries, length = len(q) // batch_size, slots.shape[1]
    hidden = unseen(num_queries, length)

    def attend():
        out = np.empty(q.shape, np.float32)
        for row in range(batch_size):
            keys, values = (
                decoded(cache[slots[row]], name, np.float32)
                if name
                else cache[slots[row]].astype(np.float32, copy=False)
                for cache in caches
            )
            window = slice(row * num_queries, (row + 1) * num_queries)
            queries = q[window].astype(np.float32).reshape(num_queries, KV_HEADS, GROUP, HEAD_DIM)
            scores = np.einsum("qhgd,khd->hgqk", queries, keys, optimize=True) * HEAD_DIM**-0.5
            if num_queries > 1:
                scores[..., hidden] = -np.inf
            weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
            weights /= weights.sum(axis=-1, keepdims=True)
            found = np.einsum("hgqk,khd->qhgd", weights, values, optimize=True)
            out[window] = found.reshape(num_queries, -1, HEAD_DIM)
        return out

    return attend


def unseen(num_queries, length):
    """Which positions the last `num_queries` ones of a row do not see, ``[queries, length]``."""
    own = np.arange(length - num_queries, length)
    return np.arange(length) > own[:, None]


def torch_attention(q, caches, slots, batch_size, name):
    """`(gather, attend)` with torch."""
    tensors, slots = [as_torch(cache) for cache in caches], torch.tensor(slots)
    num_queries, length = len(q) // batch_size, len(slots) // batch_size
    # [batch, KV heads, group * queries, dim]
    queries = as_torch(q).view(batch_size, num_queries, KV_HEADS, GROUP, HEAD_DIM)
    folded = queries.permute(0, 2, 3, 1, 4).reshape(batch_size, KV_HEADS, -1, HEAD_DIM)
    seen = None
    if num_queries > 1:
        seen = torch.from_numpy(~unseen(num_queries, length)).repeat(GROUP, 1)

    def gather():
        found = [torch.index_select(tensor, 0, slots) for tensor in tensors]
        if name:
            found = [decoded_by_torch(codes, name, torch.bfloat16) for codes in found]
        return [
            rows.view(batch_size, length, KV_HEADS, HEAD_DIM).transpose(1, 2) for rows in found
        ]

    def attend(keys, values):
        found = torch.nn.functional.scaled_dot_product_attention(
            folded, keys, values, attn_mask=seen
        )
        found = found.view(batch_size, KV_HEADS, GROUP, num_queries, HEAD_DIM)
        return found.permute(0, 3, 1, 2, 4).reshape(q.shape)

    return gather, attend
