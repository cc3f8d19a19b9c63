"""Lane: one tier, one thread, and calls that are let go of when they take too long.

Whoever asks waits for as long as the time-out says, never longer. A call that does not return in
time is abandoned: its staging buffer stays with it, and until it does return the lane refuses all
others at once. Reads go before writes, for somebody waits for them.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvpool.tiers.breaker import CircuitBreaker
from kvpool.tiers.calls import TierCall
from kvpool.tiers.contract import Tier
from kvpool.tiers.ending import LONGEST_SLEEP_S, ends_within

_log = logging.getLogger("kvpool.tiers")
COUNTERS = ("calls", "failures", "timeouts", "late_returns", "refused", "crowded_out")


class Lane:
    """The way to one tier.

    Parameters
    ----------
    tier : Tier
        Called in the lane's thread only; others may call it too.
    memory : ndarray
        uint8, the staging memory that the tier is told of before its first call.
    timeout_s : float
        The longest that a call may take, and the longest that it waits for its turn.
    max_calls : int
        Calls that may wait for their turn.
    breaker : CircuitBreaker
        Whether the tier is asked at all.
    """

    def __init__(
        self,
        tier: Tier,
        memory: NDArray[np.uint8],
        *,
        timeout_s: float,
        max_calls: int,
        breaker: CircuitBreaker,
    ) -> None:
        self.tier, self.name = tier, tier.name
        self.breaker = breaker
        self.last_error = ""
        self._memory = memory
        self._timeout_s = timeout_s
        self._max_calls = max_calls
        self._counts = dict.fromkeys(COUNTERS, 0)
        self._changed = threading.Condition()
        self._queues: tuple[deque[TierCall], deque[TierCall]] = (deque(), deque())
        self._running: TierCall | None = None
        self._is_registered = False
        self._closing = False
        self._thread = threading.Thread(target=self._run, name=f"kvpool-{self.name}", daemon=True)
        self._thread.start()

    # ---- asking

    def ask(self, call: TierCall) -> Any:
        """The answer to `call`; None where the tier failed, is not asked now, or took too long."""
        return self.wait(call) if self.send(call) else None

    def send(self, call: TierCall) -> bool:
        """Queue `call`, if the tier is asked at all now and there is room; waits for nothing."""
        with self._changed:
            self._look_at_running()
            running = self._running
            if self._closing or (running is not None and running.ended):
                self._counts["refused"] += 1
                return False
            if sum(map(len, self._queues)) >= self._max_calls:
                self._counts["crowded_out"] += 1
                return False
            if not self.breaker.allows():
                self._counts["refused"] += 1
                return False
            if call.buffer is not None:
                call.buffer.hold()
            self._queues[call.verb == "write"].append(call)
            self._changed.notify_all()
        return True

    def wait(self, call: TierCall) -> Any:
        """The answer to a call that was sent, None if it has none in time."""
        with self._changed:
            patience = time.monotonic() + self._timeout_s
            while True:
                self._look_at_running()
                if call.ended:
                    return call.answer
                now, running = time.monotonic(), self._running
                limit = patience
                if running is not None and running.started_at is not None:
                    ends_at = running.started_at + self._timeout_s
                    limit = ends_at if running is call else min(patience, ends_at)
                if now >= patience and running is not call:
                    self._counts["crowded_out"] += 1
                    self._withdraw(call)
                    return None
                self._changed.wait(max(0.0, limit - now))

    # ---- what becomes of a call; the lock is held

    def _look_at_running(self) -> None:
        """Let go of the call that runs, if it takes too long."""
        call = self._running
        if call is None or call.ended or call.started_at is None:
            return
        if time.monotonic() >= call.started_at + self._timeout_s:
            self._abandon(call)

    def _abandon(self, call: TierCall) -> None:
        self._counts["timeouts"] += 1
        self.last_error = f"{call.verb} took more than {self._timeout_s} s"
        self._say_if(self.breaker.trip())
        self._end(call, None)
        for queue in self._queues:
            while queue:
                self._end(queue.popleft(), None).let_go()

    def _withdraw(self, call: TierCall) -> None:
        self._queues[call.verb == "write"].remove(call)
        self.breaker.withdraw()
        self._end(call, None).let_go()

    def _end(self, call: TierCall, answer: Any) -> TierCall:
        call.answer, call.ended = answer, True
        self._changed.notify_all()
        return call

    def _say_if(self, opened: bool) -> None:
        if opened:
            _log.warning("tier %s is not asked for a while: %s", self.name, self.last_error)

    # ---- the thread

    def _run(self) -> None:
        while (call := self._next()) is not None:
            answer, error = None, ""
            try:
                if not self._is_registered:
                    self.tier.register(self._memory)
                    self._is_registered = True
                answer = call.perform(self.tier)
            except BaseException as raised:  # a tier must not end its lane, whatever it raises
                error = f"{call.verb}: {type(raised).__name__}: {raised}"
            with self._changed:
                self._running = None
                is_late = call.ended
                if is_late:
                    self._counts["late_returns"] += 1
                elif error:
                    self._counts["failures"] += 1
                    self.last_error = error
                    self._say_if(self.breaker.failed())
                else:
                    self.breaker.succeeded()
                if not is_late:
                    self._end(call, answer)
                self._changed.notify_all()
            call.let_go()
            if call.then is not None and not is_late:
                call.then(answer)
        if self._is_registered:
            try:
                self.tier.unregister(self._memory)
            except Exception as raised:
                _log.warning("tier %s: unregister: %s", self.name, raised)

    def _next(self) -> TierCall | None:
        with self._changed:
            while not self._closing:
                queue = self._queues[0] or self._queues[1]
                if queue:
                    call = self._running = queue.popleft()
                    call.started_at = time.monotonic()
                    self._counts["calls"] += 1
                    return call
                self._changed.wait(LONGEST_SLEEP_S)
            return None

    # ---- looking, and the end

    def stats(self) -> dict[str, int]:
        """Counters, and ``is_open`` of the breaker."""
        with self._changed:
            self._look_at_running()
            return {
                **self._counts,
                "opened": self.breaker.num_opened,
                "is_open": int(self.breaker.state != "closed"),
            }

    def stop(self) -> None:
        """Answer all that wait with None, and end the thread once its call returns."""
        with self._changed:
            if self._closing:
                return
            self._closing = True
            if self._running is not None and not self._running.ended:
                self._end(self._running, None)
            for queue in self._queues:
                while queue:
                    self._end(queue.popleft(), None).let_go()
            self._changed.notify_all()

    def join(self, timeout_s: float) -> bool:
        """Wait for the thread after `stop`; whether it has ended."""
        return ends_within(self._thread, timeout_s)
