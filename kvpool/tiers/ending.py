"""How threads of the background sleep, and how they are waited for."""

from __future__ import annotations

import threading

# A thread sleeps no longer: what a clean-up tells it, which the collector runs in the thread
# itself just before it sleeps, does not wake it.
LONGEST_SLEEP_S = 1.0


def ends_within(thread: threading.Thread, timeout_s: float) -> bool:
    """Wait for a thread that was told to end; whether it has.

    Called by the thread itself, in a clean-up that the collector runs there, it waits for nothing.
    """
    if thread is threading.current_thread():
        return False
    thread.join(max(0.0, timeout_s))
    return not thread.is_alive()
