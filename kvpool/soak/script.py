"""The script of a failure: a short Python program of public calls that shows it again."""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence

import kvpool.errors
from kvpool.soak.finding import Finding
from kvpool.soak.player import Player
from kvpool.soak.prints import exact_values
from kvpool.soak.trace import PoolShape, Trace
from kvpool.soak.wild_tier import WildTier

_COMPUTE = {"float32": "np.float32", "float16": "np.float16", "bfloat16": "ml_dtypes.bfloat16"}
_STORED = {
    "float8_e4m3fn": "ml_dtypes.float8_e4m3fn).view(np.uint8",
    "float8_e5m2": "ml_dtypes.float8_e5m2).view(np.uint8",
}

# What a script may need, in the order of writing; the name of each is what asks for it.
_PARTS = {
    "on_device": '''
def on_device(array):
    """Where the pool wants its arrays."""
    return pool.device.to_device(array)
''',
    "rows": '''
def rows(tokens, layer, side, shape, values=None):
    """K (side 0) or V (side 1) of numbered tokens: whoever has another number, has another row."""
    values = COMPUTED if values is None else values
    elements = np.arange(1, {elements} + 1, dtype=np.uint64) + 1000 * (2 * layer + side)
    words = np.array(tokens, np.uint64)[:, None] * 0x9E3779B97F4A7C15
    words = (words ^ elements * 0xBF58476D1CE4E5B9) * 0x94D049BB133111EB
    return on_device(values[words >> 40 & (values.size - 1)].reshape(shape))
''',
    "stored": '''
def stored(tokens, layer, side, shape):
    """The same rows as the buffers hold them."""
    return rows(tokens, layer, side, shape, STORED)
''',
    "same": '''
def same(found, expected):
    """Whether all rows are those that were written."""
    found, expected = pool.device.to_host(found), pool.device.to_host(expected)
    wrong = (found != expected).reshape(len(expected), -1).any(axis=1)
    assert not wrong.any(), f"wrong rows at positions {np.flatnonzero(wrong).tolist()}"
''',
    "blank": '''
def blank(found):
    """Whether rows that nobody wrote are zeros."""
    found = pool.device.to_host(found)
    wrong = (found != 0).reshape(len(found), -1).any(axis=1)
    where = np.flatnonzero(wrong).tolist()
    assert not wrong.any(), f"nobody wrote rows {where}: {found[wrong].tolist()}"
''',
    "held": '''
def held(cache, request_id, start, end):
    """What the buffers hold at positions of a request."""
    positions, size = np.arange(start, end), pool.page_size
    pages = pool.request(request_id).page_ids[positions // size].astype(np.int64)
    return cache[on_device(pages * size + positions % size)]
''',
    "paged": '''
def paged(cache, table, row):
    """Positions of a row as an attention kernel finds them."""
    pages = table.indices[table.indptr_host[row] : table.indptr_host[row + 1]]
    pages = cache.reshape(-1, table.page_size, *cache.shape[1:])[pages]
    return pages.reshape(-1, *cache.shape[1:])[: table.lengths_host[row]]
''',
    "settle": '''
def settle(pool):
    """Wait until no prefetch has a page, or holds a part of the tree."""
    ends_at = time.monotonic() + 20
    while pool.stats()["pages_fetching"] or pool.radix.protected_size:
        assert time.monotonic() < ends_at, f"prefetches do not end: {pool.stats()}"
        pool.poll_tiers()
        time.sleep(0.001)
''',
    "padded": '''
def padded(rows, count):
    """Rows of padding behind those of a batch."""
    xp = pool.array_namespace
    return xp.concatenate([rows, xp.zeros((count, *rows.shape[1:]), rows.dtype)])
''',
    "zeros": '''
def zeros(count):
    """Queries that attend to all positions alike."""
    shape = (count, pool.num_kv_heads, pool.head_dim)
    return on_device(np.zeros(shape, np.float32))
''',
    "picture": '''
def picture(pool):
    """What a call that is refused must leave as it was."""
    stats = pool.stats()
    kept = {name: n for name, n in stats.items() if not name.startswith("bind_failures")}
    ids = [i for i in range(1, 10_000) if pool.is_bound(i)]
    return kept, [repr(pool.request(i)) for i in ids], pool.radix.num_nodes
''',
    "raises": '''
@contextmanager
def raises(*errors):
    """A block that must raise one of these."""
    try:
        yield
    except errors:
        return
    raise AssertionError(f"accepted, expected {errors}")
''',
    "WildTier": "\n" + inspect.getsource(WildTier),
    "Interrupted": '''
class Interrupted(KeyboardInterrupt):
    """An abort in the middle of a call."""
''',
    "Stop": '''
class Stop:
    """A token that aborts whoever reads it."""

    def __index__(self):
        raise Interrupted
''',
    "Meddler": '''
class Meddler:
    """A token during whose reading another thread enters the pool."""

    def __init__(self, pool):
        self.pool, self.answers = pool, []
        self.refused = threading.Event()
        self.thread = threading.Thread(target=self.enter)

    def __index__(self):
        self.thread.start()
        self.refused.wait()
        return 1

    def ended(self):
        self.thread.join()
        return self.answers

    def enter(self):
        pool = self.pool
        binds = lambda: pool.bind_request([1], 1)
        more = lambda: pool.prefetch([1]), pool.poll_tiers
        for call in (binds, pool.unbind_requests, pool.check, lambda: pool.alloc(1), *more):
            try:
                call()
                self.answers.append("accepted")
            except Exception as error:
                self.answers.append(type(error).__name__)
        self.refused.set()
        self.answers.append(type(pool.stats()).__name__)
''',
}
# What asks for another part by itself.
_NEEDS = {
    "stored": ("rows",),
    "rows": ("on_device",),
    "zeros": ("on_device",),
    "held": ("on_device",),
}


def script_of(trace: Trace, device: str = "cpu") -> tuple[str, Finding | None]:
    """Play a trace, and write down what it calls.

    Returns
    -------
    tuple
        The program, and what was found.
    """
    lines: list[str] = []
    finding = None
    try:
        Player(trace.shape, device, lines).play(trace.operations)
    except Finding as found:
        finding = found
    return program(lines, trace.shape, finding.kind if finding else "nothing"), finding


def program(lines: Sequence[str], shape: PoolShape, kind: str) -> str:
    """A program of these calls.

    Parameters
    ----------
    lines : sequence of str
        What a `Player` wrote down.
    shape : PoolShape
        Of its pool.
    kind : str
        What the last line shows.
    """
    body = "\n".join(lines)
    parts = _parts_for(body)
    text = body + "".join(parts.values())
    head = [f'"""{kind}: found by python -m kvpool.soak; exits with an error where it shows."""\n']
    if "class WildTier" in text:
        head.append("from __future__ import annotations\n")
    head += [f"import {name}" for name in ("threading", "time") if f"{name}." in text]
    with_names = [n for n in ("contextmanager", "suppress") if re.search(rf"\b{n}\b", text)]
    if with_names:
        head.append(f"from contextlib import {', '.join(with_names)}\n")
    values = _values(text, shape)
    if "ml_dtypes" in values:
        head.append("import ml_dtypes")
    if "np." in text + values:
        head.append("import numpy as np\n")
    errors = [n for n in vars(kvpool.errors) if n.endswith("Error") and n in text]
    head.append(f"from kvpool import {', '.join(['KVCachePool', *sorted(errors)])}")
    if "HostTier(" in text:
        head.append("from kvpool.tiers import HostTier")
    if "paged_attention" in text:
        head.append("from kvpool.attention import paged_attention")
    helpers = "".join(
        "\n" + part.replace("{elements}", _elements(shape)) for part in parts.values()
    )
    return "\n".join(head) + "\n" + values + helpers + "\n\n" + body + "\n"


def _parts_for(body: str) -> dict[str, str]:
    wanted: set[str] = set()
    for name in reversed(_PARTS):
        if name in wanted or re.search(rf"\b{name}\b", body):
            wanted.update((name, *_NEEDS.get(name, ())))
    return {name: part for name, part in _PARTS.items() if name in wanted}


def _elements(shape: PoolShape) -> str:
    return str(shape.num_kv_heads * shape.head_dim)


def _values(text: str, shape: PoolShape) -> str:
    """Constants: the values that rows are made of."""
    if "rows(" not in text:
        return ""
    values = exact_values(shape.dtype)
    if shape.dtype in _STORED:
        listed = f"np.array({[int(v) for v in values]}, np.float32)"
        compute = _COMPUTE["bfloat16"]
        stored = f"({listed} / {shape.scale}).astype({_STORED[shape.dtype]})"
    else:
        listed = f"np.arange(1, {values.size + 1})"
        compute = _COMPUTE[shape.dtype]
        stored = f"{listed}.astype({compute})"
    lines = [f"\nCOMPUTED = {listed}.astype({compute})"]
    if "stored(" in text:
        lines.append(f"STORED = {stored}")
    return "\n".join(lines) + "\n"
