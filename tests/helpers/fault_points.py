"""Injectors: each lets a call go on to its n-th point of a kind, and fails that.

``run(act, at, point)`` answers what the call raised (its text, or None), what it returned, and
whether it came as far as the point.
"""

import sys
import threading

from kvpool.device import Device
from kvpool_ext import faults


class Fault(RuntimeError):
    """What an injected kernel or copy fails with."""


class CMemory:
    """Memory of the C library, where the debug build asks for it."""

    cuts_off = False

    def __init__(self, times=1):
        self.times = times

    def install(self, at):
        """Nothing to do: the hook is in the extension."""

    def run(self, act, at, point):
        """``(error or None, result, reached)`` of the call with that request refused."""
        error = result = None
        faults.fail_after(point, self.times)
        try:
            result = act(at)
        except MemoryError as raised:
            error = repr(raised)  # not itself: its traceback holds requests
        reached = faults.count() > point
        faults.clear()
        return error, result, reached


class PythonMemory:
    """Objects of Python, by CPython's own test hook: each allocation of a call in turn.

    What NumPy allocates for data is not among them; the array object that goes with it is.
    """

    cuts_off = True

    def install(self, at):
        """Nothing to do: the hook is in the interpreter."""

    def run(self, act, at, point):
        """``(error or None, result, reached)`` of the call with that allocation refused."""
        from _testcapi import remove_mem_hooks, set_nomemory

        error, result, reached = None, None, True
        set_nomemory(point, point + 1)
        try:
            result = act(at)
        except Exception as raised:
            remove_mem_hooks()
            error = repr(raised)
        try:
            if error is None:
                # What the call left over is refused now.
                for _ in SPARE[: point + 1]:
                    object()
        except MemoryError:
            reached = False
        remove_mem_hooks()
        return error, result, reached


SPARE = (None,) * 100_000


class Interrupts:
    """Ctrl-C, at each line of Python that moves pages between prefetches, tree and free list."""

    cuts_off = True
    files = ("prefetching.py", "prefetch.py", "tiering.py", "attached.py", "fetch.py")

    def install(self, at):
        """Nothing to do: the hook is in the interpreter."""

    def run(self, act, at, point):
        """``(error or None, result, reached)`` of the call interrupted before that line."""
        error, result, lines = None, None, 0

        def trace(frame, event, _):
            nonlocal lines
            if not frame.f_code.co_filename.endswith(self.files):
                return None
            if event == "line":
                lines += 1
                if lines == point + 1:
                    raise KeyboardInterrupt
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            result = act(at)
        except KeyboardInterrupt as raised:
            error = repr(raised)
        finally:
            sys.settrace(before)
        return error, result, lines > point


class Threads:
    """Threads of Python, which a machine may have no more of."""

    cuts_off = False

    def install(self, at):
        """Nothing to do: the hook is in `threading`."""

    def run(self, act, at, point):
        """``(error or None, result, reached)`` of the call with that thread not started."""
        error = result = None
        started, start = [], threading.Thread.start

        def counted(thread):
            started.append(thread)
            if len(started) == point + 1:
                raise RuntimeError("can't start new thread")
            start(thread)

        threading.Thread.start = counted
        try:
            result = act(at)
        except RuntimeError as raised:
            error = repr(raised)
        finally:
            threading.Thread.start = start
        return error, result, len(started) > point


class Counted:
    """Counts the calls that pass through it, and fails one."""

    def __init__(self):
        self.calls = 0
        self.fails_at = None

    def note(self, name):
        """One more call; Fault where it is the one to fail, before it has done anything."""
        self.calls += 1
        if self.fails_at is not None and self.calls == self.fails_at + 1:
            raise Fault(f"injected: {name}")

    def of(self, name, function):
        """`function`, counted."""

        def counted(*arguments, **options):
            self.note(name)
            return function(*arguments, **options)

        return counted


KERNELS = ("scatter", "gather", "scatter_fp8", "gather_fp8", "zero", "copy_slots")


class KernelProxy:
    """Stands where a storage has its kernels."""

    def __init__(self, kernels, counted):
        self._kernels, self._counted = kernels, counted

    def __getattr__(self, name):
        found = getattr(self._kernels, name)
        return self._counted.of(name, found) if name in KERNELS else found


def copying_device(counted, *, shares):
    """A device whose every transfer and array passes `counted`.

    With `shares` it hands host arrays on as they are, which the graphs of a CPU pool rely on.
    """

    class Counting(Device):
        __slots__ = ()

        def zeros(self, shape, dtype):
            counted.note("zeros")
            return super().zeros(shape, dtype)

        def empty(self, shape, dtype):
            counted.note("empty")
            return super().empty(shape, dtype)

        def to_device(self, host):
            counted.note("to_device")
            return host if shares else host.copy()

        def to_host(self, array):
            counted.note("to_host")
            return array if shares else array.copy()

        def refresh(self, array, host):
            counted.note("refresh")
            super().refresh(array, host)

        def asarray(self, array, name):
            counted.note("asarray")
            return super().asarray(array, name)

        def float_array(self, array, name):
            counted.note("float_array")
            return super().float_array(array, name)

        rows = float_array

        def known_max(self, array):
            counted.note("known_max")
            return super().known_max(array)

        def check_upload(self):
            counted.note("check_upload")

    return Counting()


class Transfers:
    """Kernel calls, or what the device is asked for.

    Parameters
    ----------
    kernels, copies : bool
        Which of them count.
    shares : bool
        As for `copying_device`.
    """

    def __init__(self, *, kernels=True, copies=True, shares=False):
        self.kernels, self.copies = kernels, copies
        self.counted = Counted()
        self.device = copying_device(self.counted, shares=shares) if copies else "cpu"

    def install(self, at):
        """Count what the pool of a scene does from now on."""
        pool = at.pool
        storage = pool._open_storage()
        if self.kernels:
            storage._kernels = KernelProxy(storage._kernels, self.counted)
            page_map = pool.decode_graph._wiring.page_map
            page_map.refresh = self.counted.of("page map", page_map.refresh)

    def run(self, act, at, point):
        """``(error or None, result, reached)`` of the call with that one failed."""
        error = result = None
        self.counted.calls, self.counted.fails_at = 0, point
        try:
            result = act(at)
        except Fault as raised:
            error = repr(raised)
        self.counted.fails_at = None
        return error, result, self.counted.calls > point
