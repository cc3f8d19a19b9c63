"""Streams, events and uploads of the stand-in for CuPy, and what a graph capture forbids.

Asynchronous uploads are done at once, but stay *in flight* until an event that was recorded behind
them is waited for. Until then their source must not change, nor their target be overwritten from a
stream that is not ordered behind them: on a GPU that would be a race, here it is an error.
"""

from __future__ import annotations

import ctypes

import numpy as np


class CUDARuntimeError(RuntimeError):
    """What CuPy raises for an error of the CUDA runtime."""


class State:
    """What the calling thread would see of the devices."""

    device = 0
    stream = 0
    capturing = False
    free, total = 6 * 2**30, 8 * 2**30
    emptied = 0
    events: list = []  # noqa: RUF012  what was done that a capture forbids
    flights: list = []  # noqa: RUF012  uploads that the device may not have read yet
    pinned: list = []  # noqa: RUF012  (address, bytes) of pinned memory
    waits = 0  # of the host, for uploads that were in flight


def forbid_in_capture(what):
    """Remember an allocation or an upload during capture, and fail as a driver would."""
    if State.capturing:
        State.events.append(what)
        raise CUDARuntimeError(f"cudaErrorStreamCaptureUnsupported: {what}")


class Flight:
    """An asynchronous upload, from its call until the host knows that it is done."""

    def __init__(self, target, source, size, stream):
        self.target, self.source, self.size = target, source, size
        self.bytes = ctypes.string_at(source, size)
        self.streams = {stream}  # whose later work comes behind it

    def check(self):
        assert ctypes.string_at(self.source, self.size) == self.bytes, (
            "the host overwrote the source of an upload that is in flight"
        )

    def meets(self, target, size):
        return target < self.target + self.size and self.target < target + size


def memcpy_async(target, source, size, kind, stream):
    forbid_in_capture("upload")
    assert kind == 1, "only uploads are known here"
    assert any(at <= source and source + size <= at + n for at, n in State.pinned), (
        "a copy from memory that is not pinned waits"
    )
    for flight in State.flights:
        flight.check()
        assert not flight.meets(target, size) or stream in flight.streams, (
            "an upload overwrites that of another stream, which it does not wait for"
        )
    ctypes.memmove(target, source, size)
    State.flights.append(Flight(target, source, size, stream))


def alloc_pinned_memory(size):
    forbid_in_capture("allocation")
    memory = np.full(size, 0xA5, np.uint8)
    State.pinned.append((memory.ctypes.data, size))
    return memory


class Stream:
    """``cupy.cuda.get_current_stream()``."""

    def __init__(self, ptr):
        self.ptr = ptr

    def wait_event(self, event):
        forbid_in_capture("wait for what is outside")
        for flight in event.covered:
            flight.streams.add(self.ptr)


class Event:
    """``cupy.cuda.Event``."""

    def __init__(self, block=False, disable_timing=False):
        assert disable_timing, "a timed event costs more"
        self.covered = []

    def record(self, stream=None):
        ptr = State.stream if stream is None else stream.ptr
        self.covered = [flight for flight in State.flights if ptr in flight.streams]

    @property
    def done(self):
        return not any(flight in State.flights for flight in self.covered)

    def synchronize(self):
        forbid_in_capture("synchronise")
        landed = [flight for flight in State.flights if flight in self.covered]
        State.waits += bool(landed)
        for flight in landed:
            flight.check()
            State.flights.remove(flight)


def forget_uploads():
    """Start anew: nothing is in flight, nobody has waited."""
    State.flights, State.pinned, State.waits = [], [], 0
