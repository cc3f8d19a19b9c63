"""What the host spends on a decode step: its tables, the buffers of a graph, a plan.

All rows of a batch are equally long, so that in every sixteenth step all of them enter a page,
which is zeroed, and in the others none does. The queue of the device is empty before each call
that is timed.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict

import ml_dtypes
import numpy as np

BATCHES, LENGTH, STEPS = (1, 64, 256, 512), 8192, 320
PAGE_SIZE, KV_HEADS, HEAD_DIM = 16, 2, 128
NUM_Q_HEADS = 8
WARM_UP = PAGE_SIZE + 1  # steps: both kinds, once
ENTERS = {False: "no row enters a page", True: "all rows enter a page"}


def run(cupy, report, missing):
    """Add rows per batch size, in microseconds.

    Parameters
    ----------
    missing : dict
        (kind, stored dtype) of FlashInfer's kernels that are not there, and why.
    """
    why = missing.get(("prefill", "bfloat16"))
    for batch in BATCHES[:2] if report.small else BATCHES:
        about = f"{batch} x {LENGTH:,} tokens"
        if report.time_is_up:
            report.skip("prepare", about, "out of time")
            continue
        with report.attempt("prepare", about):
            samples = decode_steps(cupy, batch, with_plan=why is None)
            for (stage, enters), found in samples.items():
                case = f"{stage}, {about}, {ENTERS[enters]}"
                note = f"least {min(found) * 1e6:.1f} us, of {len(found)} calls"
                report.add("prepare", case, statistics.median(found) * 1e6, "us", note=note)
    if why:
        report.skip("prepare", "plan of FlashInfer", why)


def decode_steps(cupy, batch, *, with_plan):
    """(stage, whether rows enter a page) -> seconds of each call."""
    from kvpool import KVCachePool
    from kvpool.attention import PagedAttention

    capacity = LENGTH + STEPS + PAGE_SIZE
    capacity += -capacity % PAGE_SIZE
    wait = cupy.cuda.Device().synchronize
    samples, attention = defaultdict(list), None
    with KVCachePool(
        1,
        batch * capacity,
        KV_HEADS,
        HEAD_DIM,
        page_size=PAGE_SIZE,
        device="cuda",
        dtype=np.dtype(ml_dtypes.bfloat16),
        max_batch_size=batch,
        max_seq_len=capacity,
    ) as pool:
        requests = [pool.bind_request([row], capacity) for row in range(batch)]
        for request in requests:
            pool.mark_written(request, LENGTH)
        ids, graph = np.array(requests, np.int32), pool.decode_graph
        for i in range(STEPS):
            starts = np.full(batch, LENGTH + i, np.int32)
            lengths = starts + 1
            wait()
            times = [time.perf_counter()]
            step = pool.activate_step(ids)
            step.page_table(lengths)
            step.window_slot_indices(starts, 1)
            times.append(time.perf_counter())
            wait()
            start = time.perf_counter()
            table = graph.prepare(lengths, starts)
            stages = {
                "activate + page_table + slots": times[1] - times[0],
                "prepare": time.perf_counter() - start,
            }
            if with_plan:
                if attention is None:
                    attention = PagedAttention(pool, table)
                wait()
                start = time.perf_counter()
                attention.plan(NUM_Q_HEADS, "bfloat16")
                stages["plan of FlashInfer"] = time.perf_counter() - start
            if i >= WARM_UP:
                for stage, seconds in stages.items():
                    samples[stage, bool(starts[0] % PAGE_SIZE == 0)].append(seconds)
    return samples
