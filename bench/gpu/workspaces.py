"""Whether FlashInfer's planner finds room for large steps: kvpool works out its workspaces.

How much the planner takes is in no documentation, so `kvpool.interop.sizing` follows its source.
A workspace that is too small is an error of the planner, not of the kernel.
"""

from __future__ import annotations

import numpy as np

from bench.gpu.report import download, upload

KV_HEADS, HEAD_DIM, PAGE_SIZE, LENGTH = 2, 128, 16, 4096
# Rows, tokens of each, query heads per KV head.
CASES = ((512, 1, 8), (64, 8, 8), (256, 8, 4))


def run(cupy, report, missing):
    """Add a row per case: rows of all lengths up to `LENGTH`, over the table of a graph.

    Parameters
    ----------
    missing : dict
        (kind, stored dtype) of kernels that could not be compiled, and why.
    """
    for batch, window_len, group in CASES[1:2] if report.small else CASES:
        case = f"plan and run, {batch} rows x {window_len} tokens, group {group}"
        why = "out of time" if report.time_is_up else missing.get(("prefill", "bfloat16"))
        if why:
            report.skip("flashinfer", case, why)
            continue
        with report.attempt("flashinfer", case):
            finite = attend(cupy, batch, window_len, group)
            report.add("flashinfer", case, 0, "", ok=finite)


def attend(cupy, batch, window_len, group):
    """Attend in one step of a graph over a cache of zeros; whether all results are finite."""
    import ml_dtypes

    from kvpool import KVCachePool
    from kvpool.attention import PagedAttention

    capacity = LENGTH + window_len
    capacity += -capacity % PAGE_SIZE
    with KVCachePool(
        1,
        batch * capacity,
        KV_HEADS,
        HEAD_DIM,
        page_size=PAGE_SIZE,
        device="cuda",
        dtype="bfloat16",
        max_batch_size=batch,
        max_seq_len=capacity,
    ) as pool:
        requests = [pool.bind_request([row], capacity) for row in range(batch)]
        pool.activate_step(*requests)
        starts = np.linspace(0, LENGTH, batch).astype(np.int64)
        graph = pool.decode_graph if window_len == 1 else pool.verify_graph
        arguments = () if window_len == 1 else (window_len,)
        table = graph.prepare(starts + window_len, starts, *arguments)
        rows, num_q_heads = graph.bucket(batch), group * KV_HEADS
        qo_indptr = None
        if window_len > 1:
            qo_indptr = np.arange(rows + 1, dtype=np.int32) * np.int32(window_len)
        attention = PagedAttention(pool, table, qo_indptr=qo_indptr)
        shape = (rows * window_len, num_q_heads, HEAD_DIM)
        q = upload(cupy, np.ones(shape, ml_dtypes.bfloat16))
        found = download(attention.run(0, q)).view(ml_dtypes.bfloat16)
        if attention.backend != "flashinfer":
            raise RuntimeError(f"{attention.backend} attends, and not flashinfer")
        return bool(np.isfinite(found.astype(np.float32)).all())
