"""A graph bucket's buffers, refreshed through the page map, against lists of the requests' pages.

Pool, steps, upload ring, launcher and kernels are the real ones, CuPy is the stand-in.
"""

import sys
from itertools import chain

import numpy as np
import pytest

from kvpool import KVCacheStateError
from kvpool.kernels import cuda_kernels, cuda_moves, cuda_page_map, cuda_tables
from kvpool.kernels.cuda_page_map import PageMap
from kvpool.kernels.launch import SimulatedKernel
from tests.fakes import cupy_like
from tests.fakes.cupy_streams import State

pytestmark = pytest.mark.sim

UNTOUCHED = -77


@pytest.fixture
def cupy(monkeypatch):
    """The stand-in, in CuPy's place."""
    fake = cupy_like.module()
    monkeypatch.setitem(sys.modules, "cupy", fake)
    for name in ("device", "stream", "capturing"):
        monkeypatch.setattr(State, name, 0)
    return fake


@pytest.fixture(autouse=True)
def few_threads(monkeypatch):
    """Blocks of four threads: the simulator starts one of the system for each."""
    kernels = (cuda_kernels.page_table, cuda_kernels.map_pages)
    monkeypatch.setattr(cuda_tables, "THREADS", 4)
    for kernel in kernels:
        kernel.cache_clear()
    yield
    for kernel in kernels:
        kernel.cache_clear()


@pytest.fixture
def launched(monkeypatch):
    """Names of the kernels that were launched."""
    names, launch = [], SimulatedKernel.launch

    def noting(self, stream, arguments):
        names.append((self.kernel.name, self.grid[0]))
        launch(self, stream, arguments)

    monkeypatch.setattr(SimulatedKernel, "launch", noting)
    return names


TABLE, PAGES = "kvpool_page_table_slots64", "kvpool_map_pages_int32"


class Bucket:
    """The buffers of one bucket of a pool."""

    def __init__(self, cupy, pool, page_map, bucket, window_len=1, capacity=200):
        self.pool, self.map, self.size, self.window_len = pool, page_map, bucket, window_len
        shapes = {"indptr": bucket + 1, "indices": capacity, "last_page_len": bucket}
        self.arrays = {n: cupy.full(size, UNTOUCHED, np.int32) for n, size in shapes.items()}
        self.arrays["slots"] = cupy.full(bucket * window_len, UNTOUCHED, np.int64)

    def refresh(self, step, lengths, starts):
        lengths = np.array(lengths, np.int64)
        starts = None if starts is None else np.array(starts, np.int64)
        scratch, arrays = self.pool.num_slots, self.arrays.values()
        self.map.refresh(step._rows, lengths, starts, self.window_len, self.size, scratch, *arrays)

    def check(self, step, lengths, starts):
        """Refresh for a step, and compare every element."""
        self.refresh(step, lengths, starts)
        size, scratch, page_size = self.window_len, self.pool.num_slots, self.pool.page_size
        held = [self.pool.request(each).page_ids for each in step.request_ids]
        used = [-(-n // page_size) for n in lengths] + [0] * (self.size - len(held))
        pages = list(chain(*(ids[:n] for ids, n in zip(held, used, strict=False))))
        last = [n - (count - 1) * page_size if n else 0 for n, count in zip(lengths, used)]  # noqa: B905
        slots = [scratch + i % page_size for i in range(self.size * size)]
        for b, start in enumerate(starts or ()):
            for i, position in enumerate(range(start, start + size)):
                if start >= 0:
                    page, offset = divmod(position, page_size)
                    slots[b * size + i] = held[b][page] * page_size + offset
        found = {name: array.get().tolist() for name, array in self.arrays.items()}
        assert found["indptr"] == np.cumsum([0, *used]).tolist()
        assert found["indices"][: len(pages)] == pages
        assert found["last_page_len"] == last + [0] * (self.size - len(held))
        assert found["slots"] == slots


def pool_of(make_pool, num_slots=480, page_size=4, **options):
    return make_pool(1, num_slots, 1, 8, page_size=page_size, device="cuda", **options)


def test_pages_go_up_once_and_a_step_is_one_kernel(cupy, make_pool, launched):
    pool = pool_of(make_pool)
    step = pool.activate_step(pool.bind_request([1], 20), pool.bind_request([1], 9))
    bucket = Bucket(cupy, pool, PageMap(pool.device, 4), 2)
    bucket.check(step, [7, 1], [6, 0])
    assert launched == [(PAGES, 2), (TABLE, 2)]
    addresses = [array.data.ptr for array in bucket.arrays.values()]
    for lengths in ([8, 2], [9, 3], [20, 12], [1, 0]):
        launched.clear()
        bucket.check(step, lengths, [max(n - 1, 0) for n in lengths])
        assert launched == [(TABLE, 2)]
    pool.extend_request(step.request_ids[1], 30)
    launched.clear()
    bucket.check(step, [8, 25], [7, 24])
    assert launched == [(PAGES, 1), (TABLE, 2)]
    assert addresses == [array.data.ptr for array in bucket.arrays.values()]


def test_padding_and_prefetch_write_to_scratch(cupy, make_pool):
    pool = pool_of(make_pool, page_size=3)
    step = pool.activate_step(*(pool.bind_request([1], 15) for _ in range(3)))
    bucket = Bucket(cupy, pool, PageMap(pool.device, 3), 8, window_len=5)
    bucket.check(step, [15, 0, 4], [10, 1, 0])
    bucket.check(step, [15, 0, 4], None)
    bucket.check(step, [9, 2, 15], [-1, 10, -3])
    assert set(bucket.arrays["slots"].get()[15:].tolist()) == {480, 481, 482}


def test_buckets_and_steps_share_the_map(cupy, make_pool, launched):
    pool = pool_of(make_pool)
    ids = [pool.bind_request([1], 8 + i) for i in range(5)]
    page_map = PageMap(pool.device, 4)
    small, large = (Bucket(cupy, pool, page_map, n) for n in (2, 8))
    step, all_of_them = pool.activate_step(*ids[1:3]), pool.activate_step(*reversed(ids))
    small.check(step, [5, 6], [4, 5])
    large.check(all_of_them, [8, 7, 6, 5, 4], [7, 6, 5, 4, 3])
    small.check(step, [6, 7], [5, 6])
    # Only what the small step had not sent.
    assert [name for name in launched if name[0] == PAGES] == [(PAGES, 2), (PAGES, 3)]


def test_row_of_a_new_request_shows_its_pages(cupy, make_pool):
    pool = pool_of(make_pool)
    a, b = pool.bind_request([1], 20), pool.bind_request([1], 12)
    bucket = Bucket(cupy, pool, PageMap(pool.device, 4), 2)
    bucket.check(pool.activate_step(a, b), [20, 12], [19, 11])
    pool.unbind_request(a)
    taken = pool.alloc(3)  # so that the new request gets other pages than the old one had
    c = pool.bind_request([1], 20)
    bucket.check(pool.activate_step(b, c), [12, 20], [11, 19])
    pool.free(taken)


def test_pages_after_shrink_and_extend(cupy, make_pool):
    pool = pool_of(make_pool)
    a, b = pool.bind_request([1], 40), pool.bind_request([1], 4)
    step = pool.activate_step(a, b)
    bucket = Bucket(cupy, pool, PageMap(pool.device, 4), 2)
    bucket.check(step, [40, 4], [39, 3])
    before = pool.request(a).page_ids
    pool.shrink_request(a, 8)
    pool.extend_request(b, 20)
    pool.extend_request(a, 40)
    assert list(pool.request(a).page_ids) != list(before)
    bucket.check(step, [40, 20], [39, 19])


def test_map_grows_with_requests_and_pages(cupy, make_pool, monkeypatch):
    monkeypatch.setattr(cuda_page_map, "LEAST_ROWS", 2)
    monkeypatch.setattr(cuda_page_map, "LEAST_PAGES", 2)
    pool, ids = pool_of(make_pool), []
    page_map = PageMap(pool.device, 4)
    shapes = []
    for capacity in (4, 12, 4, 60, 8, 4, 300):
        ids.append(pool.bind_request([1], capacity))
        step = pool.activate_step(*ids)
        lengths = step.capacities
        bucket = Bucket(cupy, pool, page_map, len(ids))
        bucket.check(step, lengths, [n - 1 for n in lengths])
        shapes.append(page_map._map.shape)
    # The pool has 120 pages, and so has no request more of them.
    assert shapes == [(2, 2), (2, 4), (4, 4), (4, 16), (8, 16), (8, 16), (8, 120)]


@pytest.mark.parametrize("seed", range(4))
def test_random_lives(cupy, make_pool, seed):
    """Batches and windows of any size, while requests come, grow, shrink and go."""
    rng = np.random.default_rng(seed)
    page_size = int(rng.choice([1, 3, 4, 16]))
    pool = pool_of(make_pool, num_slots=page_size * 120, page_size=page_size)
    page_map, buckets, ids = PageMap(pool.device, page_size), {}, []
    for _ in range(60):
        verb = rng.choice(["bind", "unbind", "extend", "shrink", "step", "step"])
        capacity = int(rng.integers(1, 12 * page_size))
        if verb == "bind" and len(ids) < 7:
            ids.append(pool.bind_request([1], capacity))
        if not ids:
            continue
        one = ids[rng.integers(len(ids))]
        if verb == "unbind":
            ids.remove(one)
            pool.unbind_request(one)
        elif verb == "extend":
            pool.extend_request(one, capacity)
        elif verb == "shrink":
            pool.shrink_request(one, capacity)
        elif verb == "step":
            chosen = rng.permutation(ids)[: rng.integers(1, len(ids) + 1)].tolist()
            step = pool.activate_step(*chosen)
            window_len = int(rng.choice([1, 4, 7]))
            key = (1 << (len(chosen) - 1).bit_length(), window_len)
            if key not in buckets:
                buckets[key] = Bucket(cupy, pool, page_map, *key)
            lengths = [int(rng.integers(n + 1)) for n in step.capacities]
            starts = [
                int(rng.integers(n - window_len + 1)) if n >= window_len else -1
                for n in step.capacities
            ]
            State.stream = int(rng.integers(3))
            buckets[key].check(step, lengths, starts if rng.random() < 0.8 else None)


def test_failed_launch_is_made_good_by_the_next(cupy, make_pool, monkeypatch):
    pool = pool_of(make_pool)
    step = pool.activate_step(pool.bind_request([1], 20))
    bucket = Bucket(cupy, pool, PageMap(pool.device, 4), 1)

    def fail(*_):
        raise RuntimeError("no such luck")

    for broken in (SimulatedKernel, cupy.cuda.runtime):
        name = "launch" if broken is SimulatedKernel else "memcpyAsync"
        with monkeypatch.context() as patch:
            patch.setattr(broken, name, fail)
            with pytest.raises(RuntimeError, match="no such luck"):
                bucket.refresh(step, [20], [19])
    bucket.check(step, [20], [19])


def test_nothing_is_refreshed_in_a_capture(cupy, make_pool, launched):
    pool = pool_of(make_pool)
    step = pool.activate_step(pool.bind_request([1], 20))
    bucket = Bucket(cupy, pool, PageMap(pool.device, 4), 1)
    refused = pytest.raises(KVCacheStateError, match="before the capture")
    with cupy_like.capture(), refused:
        bucket.refresh(step, [20], [19])  # the map would be made, too
    bucket.check(step, [20], [19])
    with cupy_like.capture(), refused:
        bucket.refresh(step, [20], [19])
    assert State.events == []
    assert launched == [(PAGES, 1), (TABLE, 1)]


def test_kernels_are_not_compiled_in_a_capture(cupy, make_pool, monkeypatch):
    pool = pool_of(make_pool)
    page_map = PageMap(pool.device, 4)
    page_map.warm_up()
    monkeypatch.setattr(cuda_moves.Kernel, "is_ready", lambda self, device: False)
    with cupy_like.capture(), pytest.raises(KVCacheStateError, match="kvpool_map_pages_int32"):
        page_map.warm_up()


def test_another_device_is_entered_and_left(cupy, make_pool):
    pool = make_pool(1, 64, 1, 8, page_size=4, device="cuda:1")
    step = pool.activate_step(pool.bind_request([1], 20))
    with cupy.cuda.Device(1):
        bucket = Bucket(cupy, pool, PageMap(pool.device, 4), 2)
    bucket.check(step, [20], [19])
    assert State.device == 0
    assert bucket.map._map.data.device_id == 1


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"bucket": 1}, "a step of 2 rows, a bucket of 1"),
        ({"bucket": 3}, "a bucket of 3 with an indptr of 3 and a last_page_len of 2"),
        ({"window_len": 3}, r"slots must have 2 \* 3 elements, got 4"),
        ({"lengths": [20, 21]}, "request 2 has 20 slots, got length 21"),
        ({"capacity": 4}, "room for 4 pages, the rows have 10"),
    ],
)
def test_what_does_not_fit_is_refused(cupy, make_pool, launched, change, named):
    pool = pool_of(make_pool)
    step = pool.activate_step(pool.bind_request([1], 20), pool.bind_request([1], 20))
    capacity = change.get("capacity", 200)
    bucket = Bucket(cupy, pool, PageMap(pool.device, 4), 2, window_len=2, capacity=capacity)
    bucket.size = change.get("bucket", 2)
    bucket.window_len = change.get("window_len", 2)
    with pytest.raises(ValueError, match=named):
        bucket.refresh(step, change.get("lengths", [20, 20]), [17, 17])
    assert launched == []
