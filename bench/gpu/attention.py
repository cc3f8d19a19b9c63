"""Attention through `kvpool.attention` against float64: decode, prefill and verify windows.

The requests of one pool are prefilled, ragged and two of them behind a cached prefix, decode one
token, and verify a window: the K and V of all that are there then, in pages in no order.
"""

from __future__ import annotations

from contextlib import nullcontext
from types import MappingProxyType

import ml_dtypes
import numpy as np

from bench.gpu import reference
from bench.gpu.report import download, upload
from kvpool.dtypes import FP8_DTYPES

LAYERS, KV_HEADS, HEAD_DIM, NUM_SLOTS = 2, 2, 128, 2048
GROUPS = (1, 4, 8)  # query heads per KV head
PAGE_SIZES = (1, 16, 64)
WINDOW = 4
# Tokens of each prompt; the first two begin with PREFIX tokens that are cached when they come.
PROMPTS, PREFIX = (165, 133, 70, 1, 64), 128
# One per layer, so that a layer that is given another's fails; K and V stay far from saturation.
SCALES = {"k_scale": (0.02, 0.05), "v_scale": (0.04, 0.01)}
BF16 = np.dtype(ml_dtypes.bfloat16)


def run_array_code(cupy, report):
    """Add a row per stored dtype and page size; FlashInfer does not take float32 queries."""
    for stored in ("float32", "bfloat16", *FP8_DTYPES):
        for page_size in PAGE_SIZES:
            flow(cupy, report, "attention", stored, page_size, np.dtype(np.float32))


def run_flashinfer(cupy, report, missing):
    """Add a row per stored dtype, page size and kind of step, by FlashInfer.

    Parameters
    ----------
    missing : dict
        (kind, stored dtype) of kernels that could not be compiled, and why.
    """
    for stored in ("bfloat16", *FP8_DTYPES):
        for page_size in PAGE_SIZES:
            flow(cupy, report, "flashinfer", stored, page_size, BF16, missing)


def flow(cupy, report, section, stored, page_size, q_dtype, missing=MappingProxyType({})):
    """All kinds of steps over one pool."""
    from kvpool import KVCachePool

    about = f"{stored}, pages of {page_size}"
    if report.time_is_up:
        report.skip(section, about, "out of time")
        return
    with report.attempt(section, about):
        rng = np.random.default_rng(page_size)
        shape = {"num_layers": LAYERS, "num_kv_heads": KV_HEADS, "head_dim": HEAD_DIM}
        scales = SCALES if stored in FP8_DTYPES else {}
        with KVCachePool(
            num_slots=NUM_SLOTS,
            page_size=page_size,
            device="cuda",
            dtype=stored,
            max_batch_size=8,
            **shape,
            **scales,
        ) as pool:
            requests = bind(cupy, pool, rng)
            step = pool.activate_step(*requests)
            cached = [pool.matched_prefix_len(request) for request in requests]
            lengths = np.array(PROMPTS)
            steps = {
                "prefill": (lengths, lengths - cached),
                "decode": (lengths + 1, np.ones_like(lengths)),
                "verify": (lengths + 1 + WINDOW, np.full_like(lengths, WINDOW)),
            }
            for name, (ends, queries) in steps.items():
                write(cupy, pool, step, rng, ends, queries)
                case = f"{name}, {about}"
                why = {group: missing.get((kernel(name, group), stored)) for group in GROUPS}
                for reason in sorted(set(filter(None, why.values()))):
                    skipped = [str(group) for group in GROUPS if why[group] == reason]
                    report.skip(section, f"{case}, groups {' '.join(skipped)}", reason)
                groups = [group for group in GROUPS if not why[group]]
                if not groups:
                    continue
                with (
                    report.attempt(section, case),
                    step.verify_window() if name == "verify" else nullcontext(),
                ):
                    backend = "flashinfer" if section == "flashinfer" else "dense"
                    worst = compare(cupy, pool, backend, ends, queries, groups, rng, q_dtype)
                    note = "; ".join(f"group {group}: {away:.3f}" for group, away in worst.items())
                    value = max(worst.values())
                    report.add(section, case, value, "tolerances", ok=value <= 1.0, note=note)


def kernel(name, group):
    """Which of FlashInfer's kernels attends in such a step."""
    from kvpool.interop.wrappers import use_tensor_cores

    return "decode" if name == "decode" and not use_tensor_cores(group, False) else "prefill"


def bind(cupy, pool, rng):
    """Requests that match a cached prefix, in pages in no order."""
    held = [pool.bind_request([i], 3 * pool.page_size) for i in range(12)]
    for request in held[::2] + held[1::2]:
        pool.unbind_request(request)
    prefix = rng.integers(0, 30_000, PREFIX)
    first = pool.bind_request(prefix, PREFIX)
    write(cupy, pool, pool.activate_step(first), rng, [PREFIX], [PREFIX])
    pool.finish_request(first, prefix)
    requests = []
    for row, length in enumerate(PROMPTS):
        prompt = rng.integers(0, 30_000, length)
        if row < 2:
            prompt[:PREFIX] = prefix
        requests.append(pool.bind_request(prompt, length + 1 + WINDOW))
        matched = pool.matched_prefix_len(requests[-1])
        if matched != (PREFIX if row < 2 else 0):
            raise RuntimeError(f"request {row} matched {matched} of a prefix of {PREFIX} tokens")
    return requests


def write(cupy, pool, step, rng, ends, counts):
    """Put random K and V at the last `counts` positions up to `ends` of each row."""
    ends, counts = np.asarray(ends), np.asarray(counts)
    shape = (int(counts.sum()), pool.num_kv_heads, pool.head_dim)
    qo_indptr = np.concatenate([[0], np.cumsum(counts)])
    starts = (ends - counts).tolist()
    for layer in range(pool.num_layers):
        k, v = (upload(cupy, rng.standard_normal(shape).astype(BF16)) for _ in "kv")
        step.put(layer, starts, k, v, qo_indptr=qo_indptr)


def compare(cupy, pool, backend, ends, queries, groups, rng, q_dtype):
    """Group of query heads -> the worst element of all layers, in units of its tolerance."""
    from kvpool.attention import PagedAttention

    step, worst = pool.step, {}
    qo_indptr = np.concatenate([[0], np.cumsum(queries)]).astype(np.int32)
    is_decode = bool((queries == 1).all())
    table = step.page_table(ends.tolist())
    caches = [reference.stored(pool, layer) for layer in range(pool.num_layers)]
    for group in groups:
        num_q_heads = group * pool.num_kv_heads
        attention = PagedAttention(pool, table, qo_indptr=None if is_decode else qo_indptr)
        attention.plan(num_q_heads, q_dtype.name)
        if attention.backend != backend:
            raise RuntimeError(f"{attention.backend} attends, and not {backend}")
        for layer in range(pool.num_layers):
            # Scores of some size: a few positions have most of the weight.
            q = 2 * rng.standard_normal((int(qo_indptr[-1]), num_q_heads, pool.head_dim))
            q = q.astype(q_dtype)
            out = attention.run(layer, upload(cupy, q))
            found = download(out).view(q_dtype)
            away = reference.error(
                pool, caches[layer], step.request_ids, ends, q, found, qo_indptr
            )
            worst[group] = max(away, worst.get(group, 0.0))
    return worst
