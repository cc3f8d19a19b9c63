"""Copies of a CUDA pool in the background, with a stand-in for CuPy: never run on a GPU.

What can be seen here: copies are on a stream of their own, each comes after a mark that the
scheduler's thread recorded, the host waits for them, and bytes arrive.
"""

import sys
import threading
import time
from importlib.util import find_spec

import pytest

from tests.fakes import cupy_like
from tests.helpers.pools import R
from tests.helpers.tiers import DIM, HEADS, LAYERS, PAGE, MemoryTier, attach

pytestmark = pytest.mark.skipif(
    find_spec("numba_cuda") is None, reason="numba-cuda is not installed"
)


class Stream:
    """``cupy.cuda.Stream``, which notes what is asked of it, and is current in a `with`."""

    made = []  # noqa: RUF012  all of them

    def __init__(self, non_blocking=False):
        assert non_blocking, "else it would wait for the scheduler's"
        self.ptr = 1000 + len(Stream.made)
        self.events, self.notes = [], []
        Stream.made.append(self)

    def __enter__(self):
        self.before, cupy_like.State.stream = cupy_like.State.stream, self.ptr
        return self

    def __exit__(self, *_):
        cupy_like.State.stream = self.before

    def wait_event(self, event):
        self.notes.append("wait")
        self.events.append(event)

    def synchronize(self):
        self.notes.append("synchronize")


@pytest.fixture
def cupy(monkeypatch):
    fake = cupy_like.module()
    Stream.made.clear()
    fake.cuda.Stream = Stream
    monkeypatch.setitem(sys.modules, "cupy", fake)
    monkeypatch.setattr(cupy_like.State, "device", 0)
    monkeypatch.setattr(cupy_like.State, "stream", 0)
    return fake


def cuda_pool(make_pool):
    return make_pool(LAYERS, 64 * PAGE, HEADS, DIM, page_size=PAGE, device="cuda", poison=False)


def fill(pool, prompt, value):
    """Cache `prompt` with K of one value and V of its negative."""
    request = pool.bind_request(prompt, len(prompt))
    for page in pool.request(request).page_ids.tolist():
        pool.key_cache.host[:, page * PAGE : (page + 1) * PAGE] = value + page
        pool.value_cache.host[:, page * PAGE : (page + 1) * PAGE] = -value - page
    pool.mark_written(request, len(prompt))
    pool.finish_request(request, prompt)
    return pool.radix.match_prefix(prompt).pages.tolist()


def test_pages_of_a_cuda_pool_go_down_and_come_back(make_pool, cupy):
    tier = MemoryTier()
    pool = cuda_pool(make_pool)
    attached = attach(pool, tier)
    written = fill(pool, R(1, 41), 100.0)
    done = []
    flushing = threading.Thread(target=lambda: done.append(attached.flush(20)))
    flushing.start()
    give_up = time.monotonic() + 20
    while not done:
        # A write-back waits for a mark, which the scheduler's thread makes with its next call.
        assert time.monotonic() < give_up
        pool.poll_tiers()
        time.sleep(0.001)
    flushing.join(20)
    assert done == [True]
    assert len(tier.records) == 10
    write_stream = next(stream for stream in Stream.made if stream.notes)
    assert write_stream.notes == ["wait", "synchronize"]
    assert len(write_stream.events) == 1
    pool.close()

    Stream.made.clear()
    other = cuda_pool(make_pool)
    attach(other, tier, write="none")
    assert other.prefetch(R(1, 41)).wait(20) == 40
    other.poll_tiers()
    found = other.radix.match_prefix(R(1, 41)).pages.tolist()
    assert len(found) == 10
    for page, source in zip(found, written, strict=True):
        rows = slice(page * PAGE, (page + 1) * PAGE)
        assert (other.key_cache.host[:, rows] == 100.0 + source).all()
        assert (other.value_cache.host[:, rows] == -100.0 - source).all()
    fetch_stream = next(stream for stream in Stream.made if stream.notes)
    assert fetch_stream.notes[:2] == ["wait", "synchronize"]
    other.check()


def test_in_a_graph_capture_nothing_is_fetched_and_no_mark_is_made(make_pool, cupy):
    pool = cuda_pool(make_pool)
    attached = attach(pool, MemoryTier())
    with cupy_like.capture():
        prefetch = pool.prefetch(R(1, 41))
    assert (prefetch.done, prefetch.found_len) == (True, 0)
    assert attached.stats()["prefetch_refused"] == 1
    assert cupy_like.State.events == []
    assert not pool.stats()["pages_taken"]
