"""Numbers as files, traces and callers may give them, and every call of a pool that takes one."""

import math
import reprlib
from decimal import Decimal
from fractions import Fraction

import numpy as np

from kvpool.attention import PagedAttention
from tests.helpers.pools import R, cache_prompt, case_pool, write

HUGE = (2**31, 2**32, 2**53 + 1, 2**63 - 1, 2**63, 2**64, 10**30, 1 << 20_000)
NEGATIVE = (-1, -(2**31) - 1, -(2**63), -(2**64), -(10**30))
NO_INTEGERS = (
    1.0,
    1.5,
    math.nan,
    math.inf,
    1e400,
    True,
    False,
    np.True_,
    np.float64(2.0),
    np.float16(3.0),
    "7",
    b"7",
    "9" * 5000,
    None,
    [1],
    (1,),
    {},
    1j,
    Decimal(3),
    Fraction(3, 1),
    np.array([1, 2]),
    np.datetime64("2020-01-01"),
    object(),
)
NUMPY_INTEGERS = tuple(
    np.dtype(f"{kind}{width}").type for kind in ("i", "u") for width in (1, 2, 4, 8)
)


def scalars(value):
    """`value` as each NumPy integer that can hold it."""
    for kind in NUMPY_INTEGERS:
        limits = np.iinfo(kind)
        if limits.min <= value <= limits.max:
            yield kind(value)


def every(values):
    """Each of these Python numbers, and as NumPy's where one can hold it."""
    for value in values:
        yield value
        yield from scalars(value)


def described(value):
    """A value for a message, short."""
    return f"{type(value).__name__} {reprlib.repr(value)}"


class Parts:
    """A pool with two bound requests, a cached prefix, a step and a graph, for calls to act on."""

    def __init__(self, make_pool):
        self.pool = pool = case_pool(make_pool, 4, 32, max_batch_size=2, max_seq_len=32)
        cache_prompt(pool, R(1, 8))
        self.a = pool.bind_request(R(1, 9), 16)
        self.step = write(pool, self.a, 8, 9)
        self.k = np.zeros((1, 1, 2, 8), np.float32)
        self.taken = pool.alloc(4)
        self.page = int(self.taken[0]) // 4
        self.node = pool.radix.match_prefix(R(1, 8)).node
        self.table = self.step.build_page_table(9)
        self.decode, self.verify = pool.decode_graph, pool.verify_graph
        self.decode.prepare(9, 8)
        self.verify.prepare(9, 8, 1)


# name -> (call of a `Parts` and a number, a number that is fine, whether 0 is too)
POOL_CALLS = {
    "bind_request capacity": (lambda p, n: p.pool.bind_request(R(50, 52), n), 4, False),
    "bind_request priority": (
        lambda p, n: p.pool.bind_request(R(50, 52), 4, priority=n),
        1,
        True,
    ),
    "would_fit capacity": (lambda p, n: p.pool.would_fit(R(50, 52), n), 4, False),
    "bind_requests batch": (lambda p, n: p.pool.bind_requests(n, 4), 1, False),
    "bind_requests capacity": (lambda p, n: p.pool.bind_requests(1, n), 4, False),
    "bind_with_prefix": (lambda p, n: p.pool.bind_with_prefix(R(50, 52), n), 4, False),
    "fork_request": (lambda p, n: p.pool.fork_request(p.a, n), 16, False),
    "extend_request": (lambda p, n: p.pool.extend_request(p.a, n), 20, True),
    "shrink_request": (lambda p, n: p.pool.shrink_request(p.a, n), 9, True),
    "mark_written": (lambda p, n: p.pool.mark_written(p.a, n), 9, True),
    "finish_request": (lambda p, n: p.pool.finish_request(n, R(1, 9)), None, False),
    "unbind_request": (lambda p, n: p.pool.unbind_request(n), None, False),
    "valid_len": (lambda p, n: p.pool.valid_len(n), None, False),
    "request": (lambda p, n: p.pool.request(n), None, False),
    "activate_step": (lambda p, n: p.pool.activate_step(n), None, False),
    "alloc": (lambda p, n: p.pool.alloc(n), 4, False),
    "free": (lambda p, n: p.pool.free([*p.taken[:-1], n]), None, False),
    "page_owner": (lambda p, n: p.pool.page_owner(n), 3, True),
    "key_layer": (lambda p, n: p.pool.key_layer(n), 1, True),
    "layer_scales": (lambda p, n: p.pool.layer_scales(n), 1, True),
    "radix.evict": (lambda p, n: p.pool.radix.evict(n), None, True),
    "radix.insert page": (lambda p, n: p.pool.radix.insert(R(80, 83), [n]), None, False),
    "radix.insert priority": (
        lambda p, n: p.pool.radix.insert(R(1, 4), [p.page], priority=n),
        1,
        True,
    ),
    "radix.inc_lock_ref": (lambda p, n: p.pool.radix.inc_lock_ref(n), None, None),
    "radix.dec_lock_ref": (lambda p, n: p.pool.radix.dec_lock_ref(n), None, None),
    "radix.format_tree nodes": (lambda p, n: p.pool.radix.format_tree(max_nodes=n), 3, True),
    "radix.format_tree depth": (lambda p, n: p.pool.radix.format_tree(max_depth=n), 3, False),
    "radix.format_tree tokens": (lambda p, n: p.pool.radix.format_tree(tokens=n), 3, True),
    "step.require": (lambda p, n: p.step.require(n), 9, True),
    "step.put layer": (lambda p, n: p.step.put(n, 8, p.k, p.k), 1, True),
    "step.put start": (lambda p, n: p.step.put(0, n, p.k, p.k), 9, False),
    "step.put slots": (lambda p, n: p.step.put(0, 8, p.k, p.k, slots=[n]), None, False),
    "step.get layer": (lambda p, n: p.step.get(n, 9), 1, True),
    "step.get length": (lambda p, n: p.step.get(0, n), 9, True),
    "step.get padded": (lambda p, n: p.step.get(0, n, padded=True), 9, True),
    "step.slot_indices": (lambda p, n: p.step.slot_indices(n), 9, True),
    "step.window start": (lambda p, n: p.step.window_slot_indices(n, 1), 9, True),
    "step.window seqlen": (lambda p, n: p.step.window_slot_indices(8, n), 1, True),
    "step.page_table": (lambda p, n: p.step.page_table(n), 9, True),
    "step.build_page_table": (lambda p, n: p.step.build_page_table(n), 9, True),
    "step.seal_length": (lambda p, n: p.step.seal_length(n), 9, False),
    "step.invalidate from": (lambda p, n: p.step.invalidate_range(n, 16), 9, False),
    "step.invalidate end": (lambda p, n: p.step.invalidate_range(8, n), 9, False),
    "step.truncate sealed": (lambda p, n: p.step.truncate_to(n, 9), 9, False),
    "step.truncate end": (lambda p, n: p.step.truncate_to(8, n), 9, False),
    "table.block_table": (lambda p, n: p.table.block_table(n), 5, False),
    "decode.prepare length": (lambda p, n: p.decode.prepare(n, 8), 9, False),
    "decode.prepare position": (lambda p, n: p.decode.prepare(9, n), 8, False),
    "decode.page_table": (lambda p, n: p.decode.page_table(n), 1, False),
    "decode.bucket": (lambda p, n: p.decode.bucket(n), 1, False),
    "decode.prefetch": (lambda p, n: p.decode.prefetch(9, 8, n).__enter__(), None, False),
    "verify.prepare": (lambda p, n: p.verify.prepare(9, 8, n), 1, False),
    "verify.qo_indptr batch": (lambda p, n: p.verify.qo_indptr(n, 1), 1, False),
    "verify.qo_indptr window": (lambda p, n: p.verify.qo_indptr(1, n), 1, False),
    "attention qo_indptr": (
        lambda p, n: PagedAttention(p.pool, p.table, qo_indptr=[0, n]),
        1,
        True,
    ),
    "num_pages_for_length": (lambda p, n: p.pool.num_pages_for_length(n), 9, True),
}
# What is true of a huge number where a call has one: would_fit says no, radix.evict takes all.
ANSWERS = {
    "would_fit capacity": False,
    "shrink_request": None,
    "bind_requests capacity": list,
    "bind_with_prefix": 0,
    "radix.evict": np.ndarray,
    "radix.format_tree nodes": str,
    "radix.format_tree depth": str,
    "radix.format_tree tokens": str,
    "decode.bucket": int,
    "num_pages_for_length": int,
}
ONE_A_ROW = {  # where [1] is one number a row
    "step.require",
    "step.put start",
    "step.window start",
    "step.window seqlen",
    "step.page_table",
    "step.build_page_table",
    "step.seal_length",
    "step.invalidate from",
    "step.invalidate end",
    "step.truncate sealed",
    "step.truncate end",
    "decode.prepare length",
    "decode.prepare position",
    "activate_step",
}
OPTIONAL = {  # where None is an answer
    "radix.format_tree nodes",
    "radix.format_tree depth",
    "radix.format_tree tokens",
    "step.put slots",
    "table.block_table",
}
