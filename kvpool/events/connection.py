"""StreamConnection: the sockets of a subscriber, and whether anybody is at the other end."""

from __future__ import annotations

import time

from kvpool.events.guests import zmq
from kvpool.events.wire import message_of, sequence_bytes

_GONE = zmq.EVENT_DISCONNECTED
_THERE = zmq.EVENT_HANDSHAKE_SUCCEEDED


class StreamConnection:
    """A SUB socket, a DEALER socket for replays, and a monitor of the first.

    Parameters
    ----------
    endpoint, replay_endpoint, topic, hwm
        As `EventSubscriber`.
    """

    def __init__(self, endpoint: str, replay_endpoint: str | None, topic: bytes, hwm: int) -> None:
        self._context = zmq.Context()
        self._replay_endpoint = replay_endpoint
        self._replay: zmq.Socket[bytes] | None = None
        self.is_there = False
        try:
            self._subscription = self._context.socket(zmq.SUB)
            self._subscription.setsockopt(zmq.RCVHWM, hwm)
            self._subscription.setsockopt(zmq.LINGER, 0)
            self._subscription.setsockopt(zmq.IPV6, 1)
            self._monitor = self._subscription.get_monitor_socket(_GONE | _THERE)
            self._subscription.connect(endpoint)
            self._subscription.setsockopt(zmq.SUBSCRIBE, topic)
            if replay_endpoint is not None:
                self._connect_replay(replay_endpoint)
        except zmq.ZMQError as error:
            self.close()
            raise ValueError(
                f"expected endpoints as tcp://host:port or ipc://path, got {endpoint!r} and "
                f"{replay_endpoint!r}: {error.strerror}"
            ) from None
        self._poller = zmq.Poller()
        self._poller.register(self._subscription, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)

    @property
    def can_replay(self) -> bool:
        """Whether there is an endpoint to ask for what was missed."""
        return self._replay_endpoint is not None

    def receive(self) -> list[bytes] | None:
        """The next message that is there already."""
        try:
            return self._subscription.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return None

    def wait(self, seconds: float) -> None:
        """Until there is a message or news of the connection, at most so long."""
        self._poller.poll(max(0, round(seconds * 1000)))

    def lost(self) -> bool:
        """Whether the publisher has gone since it was asked last, even if one is back."""
        gone = False
        while self._monitor.poll(0):
            event = zmq.utils.monitor.recv_monitor_message(self._monitor)["event"]
            self.is_there = event == _THERE
            gone = gone or event == _GONE
        return gone

    def replay(self, sequence: int, timeout_s: float) -> tuple[list[tuple[int, bytes]], bool]:
        """Batches from `sequence` on, and whether all came that the publisher has."""
        batches: list[tuple[int, bytes]] = []
        if self._replay is None:
            return batches, False
        give_up = time.monotonic() + timeout_s
        try:
            self._replay.send_multipart((b"", sequence_bytes(sequence)), zmq.NOBLOCK)
            while self._replay.poll(max(0, round((give_up - time.monotonic()) * 1000))):
                message = message_of(self._replay.recv_multipart(zmq.NOBLOCK))
                if message is None:
                    break
                if message[0] < 0:
                    return batches, True
                batches.append(message)
        except zmq.Again:  # nobody to send it to, and what waits to be sent is enough
            pass
        # What still comes would be taken for the answer to the next request.
        self._replay.close(linger=0)
        assert self._replay_endpoint is not None
        self._connect_replay(self._replay_endpoint)
        return batches, False

    def close(self) -> None:
        """Close all sockets."""
        self._context.destroy(linger=0)

    def _connect_replay(self, endpoint: str) -> None:
        self._replay = self._context.socket(zmq.DEALER)
        self._replay.setsockopt(zmq.LINGER, 0)
        self._replay.setsockopt(zmq.IPV6, 1)
        self._replay.setsockopt(zmq.RCVHWM, 0)
        self._replay.connect(endpoint)
