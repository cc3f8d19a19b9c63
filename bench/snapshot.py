"""What saving and loading the cached pages of a CPU pool costs.

`python -m bench.snapshot [--mib 512] [--folder DIR] [--json FILE]` prints bytes of K and V a
second, the median of three. Beside a save stands the plain write and fsync of as many bytes,
beside a load their read into a new array, both in the same folder and the same run. What was just
written is read from the page cache.
"""

import argparse
import os
import statistics
import tempfile
import time
from hashlib import sha256
from pathlib import Path

import numpy as np

from bench.clock import Table
from kvpool import KVCachePool

LAYERS, HEADS, HEAD_DIM, PAGE_SIZE = 32, 8, 128, 16  # 128 KiB a token in bfloat16
PROMPT_PAGES = 8
ROUNDS = 3
PIECE = 32 << 20


def filled_pool(num_mib):
    """A pool of that much K and V, all of it cached, in prompts of eight pages."""
    page_bytes = 2 * LAYERS * HEADS * HEAD_DIM * 2 * PAGE_SIZE
    num_pages = max(1, (num_mib << 20) // page_bytes)
    num_slots = num_pages * PAGE_SIZE
    pool = KVCachePool(LAYERS, num_slots, HEADS, HEAD_DIM, page_size=PAGE_SIZE, dtype="bfloat16")
    rng = np.random.default_rng(0)
    for cache in (pool.key_cache, pool.value_cache):
        for layer in cache:
            bits = rng.integers(0, 1 << 16, layer.shape, np.uint16)
            layer[...] = bits.view(layer.dtype)
    for begin in range(0, num_pages, PROMPT_PAGES):
        num_tokens = min(PROMPT_PAGES, num_pages - begin) * PAGE_SIZE
        prompt = np.arange(num_tokens, dtype=np.int32) + begin * PAGE_SIZE
        request = pool.bind_request(prompt, num_tokens)
        pool.mark_written(request, num_tokens)
        pool.finish_request(request, prompt)
    return pool


def plain_write(path, num_bytes):
    data = bytearray(os.urandom(1 << 20) * (PIECE >> 20))
    with path.open("wb") as file:
        for begin in range(0, num_bytes, PIECE):
            file.write(memoryview(data)[: num_bytes - begin])
        file.flush()
        os.fsync(file.fileno())


def plain_read(path):
    return np.fromfile(path, np.uint8)


def hashing(num_bytes):
    data = bytes(PIECE)
    for _ in range(0, num_bytes, PIECE):
        sha256(data)


def seconds_of(call):
    """Medians of a few rounds: on the clock, and of processor time over all threads."""
    times = []
    for _ in range(ROUNDS):
        start = time.perf_counter(), time.process_time()
        call()
        times.append((time.perf_counter() - start[0], time.process_time() - start[1]))
    return [statistics.median(each) for each in zip(*times, strict=True)]


def measure(num_mib, folder):
    pool = filled_pool(num_mib)
    path, plain = folder / "pool", folder / "plain"
    num_bytes = pool.key_cache.nbytes + pool.value_cache.nbytes
    write, _ = seconds_of(lambda: plain_write(plain, num_bytes))
    save, save_work = seconds_of(lambda: pool.save(path))
    read, _ = seconds_of(lambda: plain_read(plain))
    load, load_work = seconds_of(lambda: KVCachePool.load(path).close())
    digest, _ = seconds_of(lambda: hashing(num_bytes))
    table = Table(f"{num_bytes >> 20} MiB in {pool.num_pages} pages, {os.cpu_count()} CPUs")
    rate = num_bytes / 1e9
    table.add("plain write and fsync", rate / write, "GB/s")
    table.add("save", rate / save, "GB/s", ratio=save / write, to="the plain write")
    table.add("save, of processor time", rate / save_work, "GB/s")
    table.add("plain read, new array", rate / read, "GB/s")
    table.add("load, new pool", rate / load, "GB/s", ratio=load / read, to="the plain read")
    table.add("load, of processor time", rate / load_work, "GB/s")
    table.add("SHA-256, one thread", rate / digest, "GB/s")
    return table


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=int, default=512, help="K and V to save")
    parser.add_argument("--folder", help="where to, default the system's temporary folder")
    parser.add_argument("--json", help="write the table there too")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        table = measure(options.mib, Path(folder))
    table.show()
    if options.json:
        table.write_json(options.json)


if __name__ == "__main__":
    main()
