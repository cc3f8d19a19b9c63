"""How a soak is ended from outside: by Ctrl-C, by SIGTERM, or by the end of its parent."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

INTERRUPTED = 130
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_PR_SET_PDEATHSIG = 1
_noted: list[int] = []


class Ended(KeyboardInterrupt):
    """A signal asked for the end; `exit_code` is what a shell calls it."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.exit_code = 128 + number


def exit_code_of(interrupt: KeyboardInterrupt) -> int:
    """The exit code of a process that this interrupt ends."""
    return interrupt.exit_code if isinstance(interrupt, Ended) else INTERRUPTED


@contextmanager
def orderly_end() -> Iterator[None]:
    """While the block runs, SIGTERM and SIGHUP raise as Ctrl-C does: nothing is left behind.

    Signals that somebody ignores or handles stay as they are, and only a main thread has a say.
    """
    before = {}
    if threading.current_thread() is threading.main_thread():
        for number in _ENDING[1:]:
            if signal.getsignal(number) is signal.SIG_DFL:
                before[number] = signal.signal(number, _raise)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def held_back() -> Iterator[None]:
    """While the block runs no such signal is delivered; nor to a process that it starts.

    That one gets what has come once it says `take_signals`.
    """
    came: list[int] = []
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)
    handlers = {}
    if threading.current_thread() is threading.main_thread():
        # The mask is one thread's: another one, of a BLAS, may take the signal for all.
        for number in _ENDING:
            if signal.getsignal(number) not in (signal.SIG_IGN, None):
                handlers[number] = signal.signal(number, lambda number, _: came.append(number))
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if came:
            signal.raise_signal(came[0])


def take_signals() -> None:
    """Take note of signals from now on, for `heed`: an exception may be lost in a destructor."""
    for number in _ENDING:
        signal.signal(number, _take_note)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDING)


def heed() -> None:
    """Raise `Ended` if a signal has asked for the end."""
    if _noted:
        raise Ended(_noted[0])


def end_with(parent: int) -> None:
    """End this process when its parent does, however that ends; on Linux only."""
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)  # it ended before it could be asked


def _raise(number: int, _: FrameType | None) -> NoReturn:
    raise Ended(number)


def _take_note(number: int, _: FrameType | None) -> None:
    _noted.append(number)
