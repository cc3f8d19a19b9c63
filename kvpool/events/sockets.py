"""EventSockets: the two sockets of a publisher, bound before anything else is changed."""

from __future__ import annotations

from kvpool.events.endpoints import bind, check_endpoint
from kvpool.events.guests import zmq
from kvpool.numbers import INT32_MAX, whole_number


class EventSockets:
    """A PUB socket for batches and, if asked for, a ROUTER socket for replays, in one context.

    Parameters
    ----------
    endpoint, replay_endpoint, allow_remote
        As `KVCachePool.publish_events`.
    hwm : int
        Batches that wait for one slow subscriber before it loses some.
    replay_hwm : int
        Messages of a replay that wait for one slow subscriber.

    Raises
    ------
    ValueError, TypeError, OSError
        As `check_endpoint` and `bind`; nothing stays bound.
    """

    def __init__(
        self,
        endpoint: str,
        replay_endpoint: str | None,
        *,
        allow_remote: bool,
        hwm: int,
        replay_hwm: int,
    ) -> None:
        whole_number(hwm, "hwm", 1, INT32_MAX)
        check_endpoint(endpoint, "endpoint", allow_remote)
        if replay_endpoint is not None:
            check_endpoint(replay_endpoint, "replay_endpoint", allow_remote)
            if replay_endpoint == endpoint and not endpoint.endswith((":0", ":*")):
                raise ValueError(f"endpoint and replay_endpoint must differ, got {endpoint!r}")
        # Of its own, so that closing it ends no other's sockets, and ends in bounded time.
        self._context = zmq.Context()
        self.replay: zmq.Socket[bytes] | None = None
        self.replay_endpoint: str | None = None
        try:
            self.publish = self._context.socket(zmq.PUB)
            self.publish.setsockopt(zmq.SNDHWM, hwm)
            # What an exit without close leaves behind must not hold it up.
            self.publish.setsockopt(zmq.LINGER, 0)
            self.endpoint = bind(self.publish, endpoint, "endpoint")
            if replay_endpoint is not None:
                self.replay = self._context.socket(zmq.ROUTER)
                self.replay.setsockopt(zmq.SNDHWM, replay_hwm)
                self.replay.setsockopt(zmq.LINGER, 0)
                self.replay_endpoint = bind(self.replay, replay_endpoint, "replay_endpoint")
        except BaseException:
            self._context.destroy(linger=0)
            raise

    def close(self, linger_s: float) -> None:
        """Close both; what was sent may take `linger_s` to leave."""
        self._context.destroy(linger=round(linger_s * 1000))
