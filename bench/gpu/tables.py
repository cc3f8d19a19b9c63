"""The page map: what `prepare` leaves on the device, against lists, for random batches.

Requests come, grow and go in between, so that rows of the map are used again, and the map grows.
"""

from __future__ import annotations

import numpy as np

MAX_SEQ_LEN, NUM_PAGES, MAX_BATCH, ROUNDS = 640, 400, 33, 60
PAGE_SIZES = (1, 16, 64)


def run(report):
    """Add a row per page size and kind of graph; the value is how many entries differ."""
    seed = np.random.SeedSequence()
    report.add("tables", f"seed {seed.entropy}", 0, "")
    for page_size in PAGE_SIZES:
        for kind in ("decode", "verify"):
            case = f"{kind} graph, pages of {page_size}"
            with report.attempt("tables", case):
                rounds = 8 if report.small else ROUNDS
                rng = np.random.default_rng(seed)
                differing, steps = random_steps(rng, page_size, kind, rounds)
                note = f"{steps} steps"
                report.add("tables", case, differing, "differ", ok=differing == 0, note=note)


def random_steps(rng, page_size, kind, rounds):
    """How many entries differ over many steps, and how many steps there were."""
    from kvpool import KVCachePool

    differing = steps = 0
    with KVCachePool(
        1,
        NUM_PAGES * page_size,
        1,
        8,
        page_size=page_size,
        device="cuda",
        dtype="bfloat16",
        max_batch_size=MAX_BATCH,
        max_seq_len=MAX_SEQ_LEN,
    ) as pool:
        bound = []
        for _ in range(rounds):
            change_requests(pool, rng, bound)
            if not bound:
                continue
            batch = int(rng.integers(1, min(len(bound), MAX_BATCH) + 1))
            requests = rng.permutation(bound)[:batch].tolist()
            window_len = 1 if kind == "decode" else int(rng.integers(1, 9))
            requests = [each for each in requests if pool.request(each).capacity > window_len]
            if not requests:
                continue
            step = pool.activate_step(*requests)
            capacities = np.array(step.capacities)
            starts = rng.integers(0, capacities - window_len + 1)
            lengths = rng.integers(starts + window_len, capacities + 1)
            graph = getattr(pool, f"{kind}_graph")
            arguments = (window_len,) if kind == "verify" else ()
            with graph:
                table = graph.prepare(lengths, starts, *arguments)
                slots = graph.write_slots(*(() if kind == "verify" else (len(requests),)))
                differing += differences(pool, requests, lengths, starts, window_len, table, slots)
                # Where no row changes its pages the table is bumped in place.
                lengths = np.maximum(starts + 1, lengths - 1)
                step.seal_length(lengths.tolist())
                differing += differences(pool, requests, lengths, starts, window_len, table, None)
            steps += 1
        pool.check()
    return differing, steps


def change_requests(pool, rng, bound):
    """Bind, extend and unbind at random; `bound` is kept up to date."""
    limit = min(MAX_SEQ_LEN, 12 * pool.page_size)
    for _ in range(int(rng.integers(1, 6))):
        capacity = int(rng.integers(1, limit + 1))
        if len(bound) < MAX_BATCH + 7 and pool.would_fit([1], capacity):
            bound.append(pool.bind_request([1], capacity))
    for request in bound:
        grown = min(pool.request(request).capacity + int(rng.integers(0, limit)), MAX_SEQ_LEN)
        needed = grown - pool.request(request).capacity + pool.page_size
        if rng.random() < 0.3 and needed > pool.page_size and pool.free_slots >= needed:
            pool.extend_request(request, grown)
    for request in list(bound):
        if rng.random() < 0.15:
            pool.unbind_request(request)
            bound.remove(request)


def differences(pool, requests, lengths, starts, window_len, table, slots):
    """Entries of the tables, on the device and on the host, that differ from lists."""
    size, bucket = pool.page_size, table.batch_size
    pages = [pool.request(request).page_ids for request in requests]
    counts = [-(-int(length) // size) for length in lengths]
    padding = [0] * (bucket - len(requests))
    last = [
        int(length) - (count - 1) * size for length, count in zip(lengths, counts, strict=True)
    ]
    indptr = np.cumsum([0, *counts, *padding])
    indices = np.concatenate([each[:n] for each, n in zip(pages, counts, strict=True)])
    pairs = [
        (table.indptr.get(), indptr),
        (table.indptr_host, indptr),
        (table.indices.get()[: len(indices)], indices),
        (table.last_page_len.get(), [*last, *padding]),
        (table.last_page_len_host, [*last, *padding]),
        (table.lengths_host, [*lengths, *padding]),
    ]
    differing = sum(int((np.asarray(found) != wanted).sum()) for found, wanted in pairs)
    if slots is None:
        return differing
    found = slots.get().reshape(bucket, window_len)
    for row, (each, start) in enumerate(zip(pages, starts, strict=True)):
        positions = int(start) + np.arange(window_len)
        wanted = np.asarray(each)[positions // size] * size + positions % size
        differing += int((found[row] != wanted).sum())
    behind = found[len(requests) :]
    is_scratch = (behind >= pool.num_slots) & (behind < pool.num_slots + size)
    return differing + int((~is_scratch).sum())
