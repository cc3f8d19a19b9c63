"""Uploads that neither wait nor overwrite what is in flight, on the stand-in for CuPy.

The stand-in knows what is in flight, and fails where a ring of this many buffers would race.
"""

import sys
from importlib.util import find_spec

import numpy as np
import pytest

from kvpool import KVCacheStateError
from kvpool.device import device_of
from kvpool.device.staging import LEAST_INTS, NUM_BUFFERS, UploadRing
from tests.fakes import cupy_like
from tests.fakes.cupy_streams import State

pytestmark = pytest.mark.skipif(
    find_spec("numba_cuda") is None, reason="numba-cuda is not installed"
)


@pytest.fixture
def ring(monkeypatch):
    """A ring on the stand-in, which takes CuPy's place."""
    monkeypatch.setitem(sys.modules, "cupy", cupy_like.module())
    for name in ("device", "stream", "capturing"):
        monkeypatch.setattr(State, name, 0)
    return UploadRing(device_of("cuda"))


def upload(ring, values):
    """One upload; the device's copy of it, read before the next one."""
    ring.host(len(values))[:] = values
    address = ring.send()
    try:
        copy = np.frombuffer(ring._copy.get(), np.int32)[: len(values)]
        assert address == ring._copy.data.ptr
    finally:
        ring.release()
    return copy.tolist()


def test_uploads_arrive_and_the_host_waits_a_round_later_only(ring):
    for i in range(NUM_BUFFERS):
        assert upload(ring, [i, i + 1]) == [i, i + 1]
        assert (State.waits, len(State.flights)) == (0, i + 1)
    for i in range(5):
        assert upload(ring, [9 * i] * 7) == [9 * i] * 7
        assert (State.waits, len(State.flights)) == (i + 1, NUM_BUFFERS)


def test_host_does_not_wait_for_what_is_done(ring):
    for i in range(3 * NUM_BUFFERS):
        upload(ring, [i])
        State.flights.clear()
    assert State.waits == 0


def test_buffers_grow(ring):
    for n in (1, LEAST_INTS, LEAST_INTS + 1, 5, 4 * LEAST_INTS + 1):
        values = np.arange(n)
        assert upload(ring, values) == values.tolist()
    # The copy on the device grew twice, after a wait each: what it was may still have been read.
    assert State.waits == 2
    assert ring._copy.shape == (8 * LEAST_INTS,)


def test_another_stream_waits_for_the_last_one(ring):
    for stream in (7, 8, 8, 0, 7):
        State.stream = stream
        upload(ring, [stream])


@pytest.mark.parametrize("broken", ["no wait for the event", "no order of streams"])
def test_stand_in_notices_a_race(ring, monkeypatch, broken):
    """What the tests above rely on."""
    if broken == "no wait for the event":
        monkeypatch.setattr("tests.fakes.cupy_streams.Event.synchronize", lambda self: None)
    else:
        monkeypatch.setattr("tests.fakes.cupy_streams.Stream.wait_event", lambda *_: None)
    with pytest.raises(AssertionError, match="overw"):  # noqa: PT012
        for i in range(NUM_BUFFERS + 1):
            State.stream = i % 2 if broken == "no order of streams" else 0
            upload(ring, [i])


def test_nothing_is_uploaded_in_a_capture(ring):
    upload(ring, [1])
    with cupy_like.capture():
        with pytest.raises(KVCacheStateError, match="before the capture"):
            ring.host(1)
        assert State.events == []
    assert upload(ring, [2]) == [2]


def test_failed_upload_is_followed_by_a_good_one(ring):
    ring.host(3)
    ring.host(2)[:] = 5
    assert upload(ring, [1, 2, 3]) == [1, 2, 3]


def test_ring_that_goes_waits_for_what_is_in_flight(ring):
    upload(ring, [1, 2, 3])
    assert len(State.flights) == 1
    ring.__del__()
    # Its pinned memory may be anybody's from here on.
    assert State.flights == []
