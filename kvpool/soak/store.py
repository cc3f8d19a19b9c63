"""Store: the tiers of an episode, which outlive its pools, and what was attached of them."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvpool.dtypes import itemsize_of
from kvpool.soak.lineage import Lineage
from kvpool.soak.wild_tier import WildTier
from kvpool.tiers import HostTier

if TYPE_CHECKING:
    from kvpool.soak.calls import Calls
    from kvpool.soak.trace import PoolShape

PAUSE_S = 0.03
SHORT_S = 0.01  # a time-out that a pause exceeds
LONG_S = 10.0
POLICIES = ("insert", "evict", "none")
ORDERS = (("wild",), ("host", "wild"), ("wild", "host"))
# Of a tier that did all that it was asked for, none of these counts anything.
_TROUBLES = (
    "failures",
    "timeouts",
    "refused",
    "crowded_out",
    "unwritten_pages",
    "bad_pages",
    "evicted_records",
    "refused_records",
)
_FLOW_TROUBLES = (
    "write_dropped",
    "write_unreachable",
    "write_stale",
    "failed_fetches",
)


class _Errors(logging.Handler):
    """Keeps what threads in the background log as errors; what is less they may say of a tier."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep an error."""
        if record.levelno >= logging.ERROR:
            self.texts.append(self.format(record))


_errors = _Errors()
logging.getLogger("kvpool").addHandler(_errors)


@dataclass
class Fetching:
    """A prefetch as it must be.

    Attributes
    ----------
    name : str
        Of its object in the calls.
    lineage : Lineage
        Of the prompt.
    length : int
        Tokens that may come: whole pages of the prompt but its last token.
    local : int
        Tokens that the tree had.
    publishes : bool
        Whether pages go to the tree by themselves.
    resets : int
        Resets of the tree when it began: after another one nothing of it is published.
    gave_way : int or None
        Prefetches that had given way when it began; None where it had nothing to fetch.
    """

    name: str
    lineage: Lineage
    length: int
    local: int
    publishes: bool
    resets: int
    gave_way: int | None


class Store:
    """A tier of little room, and one of much room that misbehaves when it is told.

    Parameters
    ----------
    shape : PoolShape
        Of the pools that share them.
    calls : Calls
        Which writes them down.
    """

    def __init__(self, shape: PoolShape, calls: Calls) -> None:
        row_bytes = shape.num_kv_heads * shape.head_dim * itemsize_of(shape.dtype)
        page_bytes = 2 * shape.num_layers * shape.page_size * row_bytes
        # At least what a record has: K and V, tokens, and what tells whether it is whole.
        self.record_bytes = page_bytes + 4 * shape.page_size + 256
        little = (shape.num_pages // 2 + 1) * self.record_bytes
        much = (8 * shape.num_pages + 64) * self.record_bytes
        self.was_told = False
        _errors.texts.clear()
        wild = WildTier(HostTier(much, name="wild"), PAUSE_S)
        self.tiers: dict[str, Any] = {"host": HostTier(little, name="host"), "wild": wild}
        calls.say(f"host = HostTier({little}, name='host')")
        calls.say(f"wild = WildTier(HostTier({much}, name='wild'), {PAUSE_S})")
        calls.names.update(self.tiers)

    def misbehave(self, calls: Calls, fault: str, count: int) -> None:
        """Have the next calls of the large tier go wrong."""
        self.was_told = True
        calls.call("wild", "misbehave", fault, count)

    def options(self, num_pages: int, order: int, narrow: int) -> dict[str, Any]:
        """Options to attach with; bits of `narrow` say which of them leave little room."""
        num_buffers = 2 + 2 * len(ORDERS[order])
        num_rows = 1 if narrow & 1 else 32
        return {
            "staging_bytes": num_buffers * num_rows * self.record_bytes,
            "queue_pages": 2 if narrow & 2 else None,
            "timeout_s": SHORT_S if narrow & 4 else LONG_S,
            "max_fetching_pages": 2 if narrow & 8 else num_pages,
            "low_pages": -(-num_pages // 2) if narrow & 16 else None,
            "retry_s": 0.01,
        }

    def is_well(self, flow: dict[str, int], by_tier: dict[str, dict[str, int]]) -> bool:
        """Whether the large tier has had everything that it was given, and been given all."""
        troubles = sum(by_tier["wild"].get(name, 0) for name in _TROUBLES)
        return not (self.was_told or troubles or any(flow[name] for name in _FLOW_TROUBLES))

    @property
    def errors(self) -> list[str]:
        """What went wrong in the background since the store was made, and not in a tier."""
        return _errors.texts

    def close(self) -> None:
        """Let go of all records."""
        for tier in self.tiers.values():
            tier.close()
