"""Tiers: places for cached pages outside of the pool.

>>> from kvpool.tiers import HostTier
>>> pool.attach_tiers([HostTier(64 << 20)], model="llama-3-8b@4f1c")  # doctest: +SKIP

`Tier` is what a place must do, and the classes here do it: `HostTier` in memory, `FileTier` in a
directory, `MooncakeTier` in a Mooncake Store (extra ``mooncake``), `ValkeyTier` in a Valkey or
Redis server (extra ``valkey``). How pages flow between a pool and its tiers is in `flow`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvpool.tiers.contract import Tier
    from kvpool.tiers.file import FileTier
    from kvpool.tiers.host import HostTier
    from kvpool.tiers.mooncake import MooncakeTier
    from kvpool.tiers.valkey import ValkeyTier

__all__ = ["FileTier", "HostTier", "MooncakeTier", "Tier", "ValkeyTier"]

# Imported when they are asked for: a pool without tiers needs no HTTP client.
_PLACES = {
    "FileTier": "file",
    "HostTier": "host",
    "MooncakeTier": "mooncake",
    "Tier": "contract",
    "ValkeyTier": "valkey",
}


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_PLACES[name]}"), name)
