"""Polling: a thread in the background that looks again and again, and less often at what rests."""

from __future__ import annotations

import contextlib
import logging
import threading
import weakref
from typing import Protocol, TypeVar

_LONGEST_NAP_S = 0.016
_logger = logging.getLogger(__name__)


class Alarm:
    """Ends a sleep, also one that has not begun.

    A lock, and not `threading.Event`: one that runs out of memory in the middle of `set` is shut
    for ever.
    """

    def __init__(self) -> None:
        self._asleep = threading.Lock()
        self._asleep.acquire()

    def ring(self) -> None:
        """Let the sleeper wake."""
        with contextlib.suppress(RuntimeError):  # it rings already
            self._asleep.release()

    def sleep(self, seconds: float) -> None:
        """Return after so long, or as soon as it rings."""
        self._asleep.acquire(timeout=seconds)


class Looks(Protocol):
    """What is polled."""

    def look(self) -> bool | None:
        """Do what there is to do; whether that was anything, None to be left alone."""


Looking = TypeVar("Looking", bound=Looks)


def start_polling(looking: Looking, interval_s: float, alarm: Alarm) -> threading.Thread:
    """Call ``looking.look()`` from a daemon thread until that is None, or nobody has it.

    Parameters
    ----------
    looking : Looks
        The thread keeps no reference to it while it sleeps. What it raises is logged.
    interval_s : float
        Sleep after a look that found something; twice as long after each that did not, up to
        16 ms or the interval.
    alarm : Alarm
        Ends a sleep.
    """
    thread = threading.Thread(
        target=_poll,
        args=(weakref.ref(looking), interval_s, alarm),
        name="kvpool-follower",
        daemon=True,
    )
    thread.start()
    return thread


def _poll(reference: weakref.ref[Looking], interval_s: float, alarm: Alarm) -> None:
    nap_s = 0.0
    while True:
        alarm.sleep(nap_s)
        looking = reference()
        if looking is None:
            return
        try:
            found = looking.look()
        except Exception:
            _logger.exception("following the tree failed; all of it will be told anew")
            found = False
        # Not to be kept alive by a thread that sleeps.
        del looking
        if found is None:
            return
        longest_s = max(_LONGEST_NAP_S, interval_s)
        nap_s = interval_s if found else min(max(2 * nap_s, interval_s), longest_s)
