"""PoolStreams: the events of a pool, for routers."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kvpool.page_keys import Partition
from kvpool.pool.following import PoolFollowing
from kvpool.request import ExtraKey

if TYPE_CHECKING:
    from kvpool.events import EventPublisher


class PoolStreams(PoolFollowing):
    """Calls of a pool that tell others what it has cached."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._publishers: list[EventPublisher] = []

    def publish_events(
        self,
        endpoint: str = "tcp://127.0.0.1:5557",
        *,
        replay_endpoint: str | None = None,
        topic: str = "",
        model: str | None = None,
        partition: Partition | None = None,
        hash_as: str = "bytes",
        lora_name: Callable[[ExtraKey], str | None] | None = None,
        data_parallel_rank: int | None = None,
        replay_batches: int = 10_000,
        replay_bytes: int = 64 << 20,
        hwm: int = 10_000,
        announce_interval_s: float = 10.0,
        allow_remote: bool = False,
    ) -> EventPublisher:
        """Publish what comes to the cache and leaves it, in the format of vLLM's KV events.

        Nothing of it is done in this thread, but for a few nanoseconds a page where the tree
        changes. The stream begins with what is cached now. Closing the pool closes it.

        Parameters
        ----------
        endpoint : str
            ``tcp://host:port`` to bind, port 0 for any free one (`EventPublisher.endpoint` says
            which), or ``ipc://path``.
        replay_endpoint : str, optional
            Where subscribers ask for batches that they missed; by default nowhere.
        topic : str
            First frame of each message; what llm-d expects is ``kv@<pod>@<model>``.
        model, partition
            What page keys are made of: pools that agree in it publish equal hashes for equal
            prefixes. By default those of the tiers that are attached, if there are any, else none
            and all layers and heads.
        hash_as : str
            ``"bytes"`` for whole page keys of 32 bytes, ``"int"`` for their last 64 bits: some
            readers want numbers.
        lora_name : callable, optional
            Given a namespace, the adapter's name or None. By default a namespace is published as
            what vLLM calls a cache salt. Runs in the follower's thread.
        data_parallel_rank : int, optional
            Published with each batch; it changes no port.
        replay_batches, replay_bytes : int
            At most so many batches and bytes are kept for replays.
        hwm : int
            Batches that may wait for one slow subscriber; it loses those beyond.
        announce_interval_s : float
            Whoever asks for more than is kept has everything told anew, no oftener than this.
        allow_remote : bool
            Take endpoints that other machines reach. Events hold the tokens of all prompts.

        Raises
        ------
        ImportError
            pyzmq or msgspec is not installed.
        OSError
            An endpoint is in use or cannot be bound to.
        ValueError, TypeError
            An argument out of range, an endpoint that other machines reach, or a `model` or
            `partition` other than that of the tiers or events that there are already.
        """
        try:
            self._gate.enter()
            # Here and not above: a pool must not need its guests.
            from kvpool.events.past import PastBatches
            from kvpool.events.publisher import EventPublisher
            from kvpool.events.sockets import EventSockets
            from kvpool.events.wording import Wording

            self._open_storage()
            kind = self._device.kind
            wording = Wording.of(topic, kind, hash_as, lora_name, data_parallel_rank)
            past = PastBatches(replay_batches, replay_bytes)
            if not announce_interval_s >= 0:
                raise ValueError(
                    f"announce_interval_s must be at least 0, got {announce_interval_s}"
                )
            sockets = EventSockets(
                endpoint,
                replay_endpoint,
                allow_remote=allow_remote,
                hwm=hwm,
                # A slow reader's acknowledgements may trail by half of it: so a whole replay fits.
                replay_hwm=2 * (past.most_batches + 1),
            )
            try:
                follower = self._follow(model, partition)
                publisher = EventPublisher(follower, sockets, wording, past, announce_interval_s)
            except BaseException:
                sockets.close(0)
                raise
            self._publishers = [each for each in self._publishers if not each.closed]
            self._publishers.append(publisher)
            return publisher
        finally:
            self._gate.leave()

    def _close_publishers(self) -> None:
        for publisher in self._publishers:
            publisher.close()
