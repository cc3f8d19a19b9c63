"""Captured loops against eager ones: put and FlashInfer, replayed over the buffers of a graph.

Two pools are given the same requests and the same K, V and queries: one works eagerly, the other
captures one pass of all layers and replays it. After the loop all bytes of the two must be the
same, and the output of every step must be within tolerance of the float64 reference.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np

from bench.gpu import reference
from bench.gpu.report import bits, download, upload

LAYERS, KV_HEADS, GROUP, HEAD_DIM, PAGE_SIZE = 2, 2, 4, 128, 16
NUM_Q_HEADS = GROUP * KV_HEADS
BATCH, BUCKET, STEPS, WINDOW = 3, 4, 64, 4
PROMPTS = (5, 14, 30)  # rows cross page boundaries in different steps
SCALES = {"k_scale": (0.02, 0.05), "v_scale": (0.04, 0.01)}
BF16 = np.dtype(ml_dtypes.bfloat16)
NAN = 0x7FC0  # its bits


def run(cupy, report, captures, missing):
    """Add rows per kind of graph and stored dtype.

    Parameters
    ----------
    captures : dict
        Name -> function that captures another function's launches, as in `bench.gpu.capture`.
    missing : dict
        (kind, stored dtype) of kernels that could not be compiled, and why.
    """
    for stored in ("bfloat16", "float8_e4m3fn"):
        for name, capture in captures.items():
            for loop in (decode, verify):
                about = f"{loop.__name__}, {stored}, {name}"
                # A graph's decode uses the prefill kernel, an eager one in groups of 4 too.
                why = "out of time" if report.time_is_up else missing.get(("prefill", stored))
                if why:
                    report.skip("loops", about, why)
                    continue
                with report.attempt("loops", about):
                    loop(cupy, report, about, capture, stored)


class Side:
    """One of the two pools, and the arrays that its passes read and write.

    Parameters
    ----------
    rows : int
        Rows of a pass: the batch, or the bucket.
    window_len : int
        Tokens of each row.
    """

    def __init__(self, cupy, stored, rows, window_len):
        from kvpool import KVCachePool
        from kvpool.interop.torch import tensor_of

        steps = STEPS * window_len + PAGE_SIZE
        self.cupy, self.rows, self.window_len = cupy, rows, window_len
        self.capacity = max(PROMPTS) + steps
        self.pool = KVCachePool(
            LAYERS,
            BATCH * -(-self.capacity // PAGE_SIZE) * PAGE_SIZE,
            KV_HEADS,
            HEAD_DIM,
            page_size=PAGE_SIZE,
            device="cuda",
            dtype=stored,
            zero_rejected_kv=True,
            max_batch_size=BUCKET,
            max_seq_len=self.capacity,
            **(SCALES if stored.startswith("float8") else {}),
        )
        self.pool.warm_up()
        requests = [self.pool.bind_request(range(n), self.capacity) for n in PROMPTS]
        self.step = self.pool.activate_step(*requests)
        self.lengths = np.array(PROMPTS)
        rng, shape = np.random.default_rng(STEPS), (sum(PROMPTS), KV_HEADS, HEAD_DIM)
        for layer in range(LAYERS):
            k, v = (upload(cupy, rng.standard_normal(shape).astype(BF16)) for _ in "kv")
            self.step.put(layer, 0, k, v, qo_indptr=np.cumsum([0, *PROMPTS]))
        # Arrays that stay where they are: a graph has their addresses.
        self.k, self.v = (
            [self.zeros(rows, window_len, KV_HEADS) for _ in range(LAYERS)] for _ in "kv"
        )
        self.q, self.out = (
            [self.zeros(rows * window_len, NUM_Q_HEADS) for _ in range(LAYERS)] for _ in "qo"
        )
        # As tensors, made here: an export of CuPy's is no work for a capture.
        self.tensors = [
            (tensor_of(q), tensor_of(out)) for q, out in zip(self.q, self.out, strict=True)
        ]

    def zeros(self, *lead):
        return upload(self.cupy, np.zeros((*lead, HEAD_DIM), BF16))

    def load(self, rng):
        """New K, V and queries for all rows; the same for equal generators, whatever the rows."""
        n = self.window_len
        for layer in range(LAYERS):
            k, v = (rng.standard_normal((BUCKET, n, KV_HEADS, HEAD_DIM)) for _ in "kv")
            q = 2 * rng.standard_normal((BUCKET * n, NUM_Q_HEADS, HEAD_DIM))
            for array, host in ((self.k, k), (self.v, v), (self.q, q)):
                fitting = np.ascontiguousarray(host[: array[layer].shape[0]].astype(BF16))
                bits(array[layer]).set(bits(fitting))
            # A result that is not written must not look like the last one.
            bits(self.out[layer]).set(np.full(self.out[layer].shape, NAN, np.uint16))

    def forward(self, attention):
        """All layers of a pass: what a model does, and what is captured."""
        starts = self.lengths.tolist()
        for layer, (q, out) in enumerate(self.tensors):
            self.step.put(layer, starts, self.k[layer], self.v[layer])
            attention.run(layer, q, out=out)

    def outputs(self):
        """Per layer: the queries and results of the batch, and whether padding is finite."""
        count = BATCH * self.window_len
        found = []
        for q, out in zip(self.q, self.out, strict=True):
            q, out = download(q).view(BF16), download(out).view(BF16)
            found.append((q[:count], out[:count], bool(np.isfinite(out[count:]).all())))
        return found

    def error(self, pool, caches, lengths):
        """The worst element of the last pass over K and V of `pool`, in units of its tolerance."""
        requests, qo_indptr = self.step.request_ids, np.arange(BATCH + 1) * self.window_len
        return max(
            reference.error(pool, each, requests, lengths, q, out, qo_indptr)
            for each, (q, out, _) in zip(caches, self.outputs(), strict=True)
        )


class Verdict:
    """What the steps of a loop have shown so far."""

    def __init__(self):
        self.eager = self.replayed = 0.0
        self.same = self.finite = True

    def add(self, eager, replayed, lengths):
        # The eager pool has what there should be; that the other has the same is seen at the end.
        pool = eager.pool
        caches = [reference.stored(pool, layer) for layer in range(LAYERS)]
        self.eager = max(self.eager, eager.error(pool, caches, lengths))
        self.replayed = max(self.replayed, replayed.error(pool, caches, lengths))
        for (_, a, _), (_, b, finite) in zip(eager.outputs(), replayed.outputs(), strict=True):
            self.same &= bool((bits(a) == bits(b)).all())
            self.finite &= finite

    def report(self, report, about, steps, eager, replayed):
        same = "the same bits as" if self.same else "not the bits of"
        note = f"eager {self.eager:.3f}; {same} the eager loop"
        ok = self.replayed <= 1.0 and self.eager <= 1.0
        case = f"{about}: outputs, worst of {steps} steps"
        report.add("loops", case, self.replayed, "tolerances", ok=ok, note=note)
        report.add("loops", f"{about}: padding rows are written and finite", 0, "", ok=self.finite)
        differing = reference.same_bytes(eager.pool, replayed.pool)
        written = [
            [side.pool.valid_len(request) for request in side.step.request_ids]
            for side in (eager, replayed)
        ]
        note = f"valid lengths {written[1]}"
        ok = differing == 0 and written[0] == written[1]
        report.add("loops", f"{about}: K and V", differing, "differ", ok=ok, note=note)
        for side in (eager, replayed):
            side.pool.check()


def eager_pass(side, lengths, rng):
    """One pass without a graph, of the window that ends at `lengths`."""
    from kvpool.attention import PagedAttention

    qo_indptr = None
    if side.window_len > 1:
        qo_indptr = np.arange(BATCH + 1, dtype=np.int32) * np.int32(side.window_len)
    side.load(rng)
    table = side.step.page_table(lengths.tolist())
    side.forward(PagedAttention(side.pool, table, qo_indptr=qo_indptr))


def decode(cupy, report, about, capture, stored):
    """Decode, captured ahead of its time by prefetch, then installed."""
    eager, side = Side(cupy, stored, BATCH, 1), Side(cupy, stored, BUCKET, 1)
    with eager.pool, side.pool:
        graph, verdict = side.pool.decode_graph, Verdict()
        attention, replay, table = capture_ahead(report, about, capture, side, graph)
        with graph:
            graph.install(table, side.lengths)
            ok = side.step.page_table(side.lengths.tolist()) is table
            report.add("loops", f"{about}: install", 0, "", ok=ok)
            for i in range(STEPS):
                lengths = side.lengths + 1
                eager_pass(eager, lengths, np.random.default_rng(i))
                side.load(np.random.default_rng(i))
                graph.prepare(lengths, side.lengths)
                attention.plan()
                replay()
                verdict.add(eager, side, lengths)
                eager.lengths = side.lengths = lengths
        verdict.report(report, about, STEPS, eager, side)


def capture_ahead(report, about, capture, side, graph):
    """Capture a pass in a prefetch block, and replay it there: it may write to scratch only."""
    from kvpool.attention import PagedAttention

    before = reference.snapshot(side.pool)
    with graph.prefetch(side.lengths + 1, side.lengths, BATCH) as table:
        attention = PagedAttention(side.pool, table)
        attention.plan(NUM_Q_HEADS, "bfloat16")
        replay = capture(lambda: side.forward(attention))
        replay()
        after = reference.snapshot(side.pool)
    differing = sum(int((a != b).sum()) for a, b in zip(before, after, strict=True))
    case = f"{about}: prefetch wrote to K and V"
    report.add("loops", case, differing, "elements", ok=differing == 0)
    return attention, replay, table


def verify(cupy, report, about, capture, stored):
    """Windows of drafted tokens of which some are rejected, and taken back by `truncate_to`."""
    from kvpool.attention import PagedAttention

    sides = eager, side = Side(cupy, stored, BATCH, WINDOW), Side(cupy, stored, BUCKET, WINDOW)
    draws = np.random.default_rng(0)
    with eager.pool, side.pool:
        graph, verdict, replay = side.pool.verify_graph, Verdict(), None
        captures = 0
        with graph:
            for i in range(STEPS):
                lengths = side.lengths + WINDOW
                with eager.step.verify_window():
                    eager_pass(eager, lengths, np.random.default_rng(i))
                side.load(np.random.default_rng(i))
                table = graph.prepare(lengths, side.lengths, WINDOW)
                if graph.take_reallocated() or replay is None:
                    qo_indptr = np.arange(BUCKET + 1, dtype=np.int32) * np.int32(WINDOW)
                    attention = PagedAttention(side.pool, table, qo_indptr=qo_indptr)
                    attention.plan(NUM_Q_HEADS, "bfloat16")
                    replay = capture(lambda attention=attention: side.forward(attention))
                    captures += 1
                attention.plan()
                replay()
                verdict.add(eager, side, lengths)
                kept = side.lengths + draws.integers(1, WINDOW + 1, BATCH)
                for each in sides:
                    each.step.truncate_to(kept.tolist(), lengths.tolist())
                    each.lengths = kept
        report.add("loops", f"{about}: captures", captures, "", ok=captures == 1)
        verdict.report(report, about, STEPS, eager, side)
