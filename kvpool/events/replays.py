"""ReplayServer: a thread that answers those who missed batches."""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Callable

from kvpool.events.guests import zmq
from kvpool.events.stream import EventStream
from kvpool.events.wire import END_OF_REPLAY, sequence_bytes

_log = logging.getLogger(__name__)


class ReplayServer:
    """Answers requests on a ROUTER socket, which only its thread uses.

    A request is one frame, the first sequence wanted as 8 big-endian bytes, behind an empty one
    as a REQ socket puts it. The answer is one message for each batch from there on, with the
    frames of the subscription, and one with the sequence -1 and an empty payload for the end.

    Parameters
    ----------
    router : zmq.Socket
        Bound.
    topic : bytes
        Of the stream.
    stream : EventStream
        Has the batches.
    announce : weak method
        Has everything told anew, where what is kept does not reach back far enough; may decline.
    """

    def __init__(
        self,
        router: zmq.Socket[bytes],
        topic: bytes,
        stream: EventStream,
        announce: weakref.WeakMethod[Callable[[], None]],
    ) -> None:
        self._router, self._topic, self._stream = router, topic, stream
        self._announce = announce
        self._at_the_end: Callable[[], None] | None = None
        self._woken, self._wake = os.pipe()
        self._thread = threading.Thread(target=self._run, name="kvpool-replays", daemon=True)
        self.num_requests = self.num_refused = self.num_replayed = 0
        self._thread.start()

    def stop(self, timeout_s: float) -> bool:
        """End the thread; whether it did within `timeout_s`."""
        os.write(self._wake, b"\0")
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            return False
        os.close(self._wake)
        os.close(self._woken)
        return True

    def abandon(self, at_the_end: Callable[[], None]) -> None:
        """End the thread without waiting for it; the last that it does is `at_the_end`."""
        self._at_the_end = at_the_end
        os.write(self._wake, b"\0")

    def _run(self) -> None:
        self._serve()
        if self._at_the_end is not None:
            self._at_the_end()
            os.close(self._wake)
            os.close(self._woken)

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._router, zmq.POLLIN)
        poller.register(self._woken, zmq.POLLIN)
        # Whoever stops it writes to the pipe.
        while self._woken not in (found := dict(poller.poll())):
            try:
                if self._router in found:
                    self._answer(self._router.recv_multipart(zmq.NOBLOCK))
            except Exception:
                _log.exception("a replay of events failed")

    def _answer(self, frames: list[bytes]) -> None:
        client, *delimiter, wanted = frames if len(frames) > 1 else (b"", b"", b"")
        if len(wanted) != len(END_OF_REPLAY) or delimiter not in ([], [b""]):
            self.num_refused += 1
            return
        self.num_requests += 1
        sequence = int.from_bytes(wanted, "big")
        batches, complete = self._stream.since(sequence)
        announce = self._announce()
        if not complete and announce is not None:
            announce()
            batches, _ = self._stream.since(sequence)
        envelope = (client, *delimiter)
        for number, payload in batches:
            self._router.send_multipart((*envelope, self._topic, sequence_bytes(number), payload))
            self.num_replayed += 1
        self._router.send_multipart((*envelope, b"", END_OF_REPLAY, b""))
