"""The messages of a stream of events, as vLLM 0.33 and whoever reads it write them.

A message has three frames: topic, sequence (8 bytes, big-endian), payload. The payload is
msgpack: ``[ts, events, data_parallel_rank]``, each event a map whose ``type`` is the name of its
class here. Readers ignore keys that they do not know, and here too: streams of vLLM and of SGLang
decode as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvpool.events.guests import msgspec

BlockHash = bytes | int

END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)
_UINT64 = 8  # bytes


class BlockStored(msgspec.Struct, tag=True):
    """Pages that came, each below the one before.

    Attributes
    ----------
    block_hashes : list of bytes or int
        Page keys ``[n]``, or 64 bits of each.
    parent_block_hash : bytes, int or None
        That of the page above the first; None where that begins its namespace.
    token_ids : list of int
        ``[n * block_size]``.
    block_size : int
        Tokens per page.
    lora_id : int or None
        Of older readers; kvpool publishes None.
    medium : str or None
        ``"GPU"`` or ``"CPU"``.
    lora_name : str or None
        The adapter, where the publisher was told how to find it.
    extra_keys : list or None
        ``[n]``, per page None or what its hash depends on besides tokens: the adapter's name on
        every page, then, on the first of a namespace, the namespace.
    cache_salt : str or None
        The namespace as text, on every event: SGLang's field, unknown to vLLM.
    """

    block_hashes: list[BlockHash]
    parent_block_hash: BlockHash | None
    token_ids: list[int]
    block_size: int
    # Written even where they are None: to vLLM's readers they are no options.
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    cache_salt: str | None = None


class BlockRemoved(msgspec.Struct, tag=True):
    """Pages that went, in the order of eviction."""

    block_hashes: list[BlockHash]
    medium: str | None = None


class AllBlocksCleared(msgspec.Struct, tag=True):
    """All pages went, or what is there is told anew."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(msgspec.Struct, array_like=True):
    """The payload of one message.

    Attributes
    ----------
    ts : float
        Seconds since 1970 by the publisher's clock, which may jump: to look at, not to order by.
    events : list of BlockStored, BlockRemoved or AllBlocksCleared
        In their order.
    data_parallel_rank : int or None
        As given to the publisher.
    """

    ts: float
    events: list[Event]
    data_parallel_rank: int | None = None


@dataclass(frozen=True)
class ReceivedBatch:
    """A batch as a subscriber received it.

    Attributes
    ----------
    sequence : int
        Its number: they rise by one from 0.
    missed : int
        Batches right before it that are lost for good.
    restarted : bool
        The stream began anew before it: nothing told earlier holds.
    ts, events, data_parallel_rank
        As in `EventBatch`.
    """

    sequence: int
    missed: int
    restarted: bool
    ts: float
    events: list[Event]
    data_parallel_rank: int | None


def short_hash(key: bytes) -> int:
    """The last 64 bits of a page key, as vLLM shortens its hashes for those who want integers."""
    return int.from_bytes(key[-_UINT64:], "big")


def sequence_bytes(sequence: int) -> bytes:
    """A sequence number as its frame."""
    return sequence.to_bytes(8, "big")


def message_of(frames: Sequence[bytes]) -> tuple[int, bytes] | None:
    """Sequence and payload of a message, -1 for the end of a replay; None for what is none.

    Both stand last: what comes before differs between a subscription, a replay, and releases.
    """
    if len(frames) < 2 or len(frames[-2]) != 8:
        return None
    return int.from_bytes(frames[-2], "big", signed=True), frames[-1]
