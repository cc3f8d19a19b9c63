"""(d) Capture and replay of put, zero and page table, in a graph of CuPy and in one of torch."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from bench.gpu.report import bits, upload

BATCH, BUCKET, PAGE_SIZE, HEADS, HEAD_DIM = 3, 4, 16, 8, 128


def run(cupy, report, captures):
    """Add rows per kind of graph.

    Parameters
    ----------
    captures : dict
        Name -> function that captures another function's launches, as in `bench.gpu.capture`.
    """
    for name, capture in captures.items():
        with report.attempt("graphs", name):
            put_zero_and_table(cupy, report, name, capture)


def put_zero_and_table(cupy, report, name, capture):
    from kvpool import KVCachePool
    from kvpool.kernels import cuda

    bf16 = np.dtype(ml_dtypes.bfloat16)
    pool = KVCachePool(2, 256, HEADS, HEAD_DIM, page_size=PAGE_SIZE, device="cuda", dtype=bf16)
    with pool:
        step = pool.activate_step(*(pool.bind_request(range(20), 48) for _ in range(BATCH)))
        k = upload(cupy, np.zeros((BATCH, 1, HEADS, HEAD_DIM), bf16))
        v = upload(cupy, np.zeros((BATCH, 1, HEADS, HEAD_DIM), bf16))
        everything = upload(cupy, np.ones((BATCH, 48, HEADS, HEAD_DIM), bf16))
        for layer in range(2):
            step.put(layer, 0, everything, everything)
        slots = step.window_slot_indices(20, 1)
        zeroed = step.window_slot_indices(40, 2)
        buffers = [upload(cupy, np.zeros((2, 272, HEADS, HEAD_DIM), bf16)) for _ in "kv"]
        tables, launch_tables = page_tables(cupy, pool, step)
        pool.warm_up()
        launch_tables()
        cuda.zero(*buffers, zeroed)
        for buffer in buffers:
            buffer.view(np.uint16)[...] = 7

        def work():
            for layer in range(2):
                step.put(layer, 20, k, v, slots=slots)
            cuda.zero(*buffers, zeroed)
            launch_tables()

        replay = capture(work)
        report.add("graphs", f"{name}: capture", 0, "", ok=True)
        rng = np.random.default_rng(0)
        ok = True
        for lengths in ([21, 30, 48], [1, 16, 17]):
            wanted = [rng.standard_normal(k.shape).astype(bf16) for _ in "kv"]
            for there, host in zip((k, v), wanted, strict=True):
                there.view(np.uint16).set(bits(host))
            tables["lengths"].set(np.array([*lengths, 0], np.int32))
            replay()
            where = slots.get()
            for layer in range(2):
                found = pool.key_layer(layer), pool.value_layer(layer)
                for cache, host in zip(found, wanted, strict=True):
                    rows = cache.view(np.uint16).get()[where]
                    ok &= bool((rows == bits(host)[:, 0]).all())
            ok &= all(not buffer.view(np.uint16)[:, zeroed].any() for buffer in buffers)
            table = step.build_page_table(lengths)
            ok &= tables["indptr"].get()[: BATCH + 1].tolist() == table.indptr_host.tolist()
            ok &= tables["last"].get().tolist() == [*table.last_page_len_host.tolist(), 0]
            found = tables["indices"].get()[: len(table.indices_host)]
            ok &= found.tolist() == table.indices_host.tolist()
        report.add("graphs", f"{name}: two replays with new data and lengths", 0, "", ok=bool(ok))


def page_tables(cupy, pool, step):
    """Device buffers of a bucket of 4 rows, and a function that launches the page-table kernel."""
    from kvpool.kernels import cuda_kernels, cuda_moves, cuda_tables

    pages = [np.asarray(pool.request(each).page_ids, np.int32) for each in step.request_ids]
    page_map = np.zeros((BUCKET, max(map(len, pages))), np.int32)
    for row, each in enumerate(pages):
        page_map[row, : len(each)] = each
    ints = {
        "rows": np.arange(BUCKET, dtype=np.int32),
        "lengths": np.array([1] * BATCH + [0], np.int32),
        "starts": np.zeros(BUCKET, np.int32),
        "batch": np.array([BATCH], np.int32),
        "map": page_map,
        "indptr": np.zeros(BUCKET + 1, np.int32),
        "indices": np.zeros(page_map.size, np.int32),
        "last": np.zeros(BUCKET, np.int32),
        "slots": np.zeros(BUCKET, np.int64),
    }
    there = {name: cupy.asarray(host) for name, host in ints.items()}
    spec = cuda_kernels.page_table(8)
    kernel = cuda_moves.ready(spec, 0).bind(0, (BUCKET, 1, 1), (cuda_tables.THREADS, 1, 1))
    address = {name: array.data.ptr for name, array in there.items()}
    arguments = (
        *(address[name] for name in ("rows", "lengths", "starts", "batch", "map")),
        *(page_map.strides[0], PAGE_SIZE, 1, pool.num_slots),
        *(address[name] for name in ("indptr", "indices", "last", "slots")),
    )
    return there, lambda: cuda_moves.run(((0, kernel, arguments, None),))
