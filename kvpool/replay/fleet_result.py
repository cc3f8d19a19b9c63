"""FleetResult: of a cell with tiers or several instances, where hits came from and who served."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kvpool.replay.instance import Instance
from kvpool.replay.tiers import TierModel

PLACES = ("local", "host", "remote")  # where hits come from


@dataclass
class FleetResult:
    """What tiers and routing did in one cell.

    Attributes
    ----------
    host_hit_tokens, remote_hit_tokens : int
        Prompt tokens that bind found because a host tier, or the shared store, had them.
    host_peak_pages, remote_peak_pages : int
        Most pages that one host tier had, and the store.
    host_evicted_pages, remote_evicted_pages : int
        Pages that all host tiers, and the store, let go to make room.
    instance_requests, instance_prompt_tokens : list of int
        What each instance served.
    """

    host_hit_tokens: int = 0
    remote_hit_tokens: int = 0
    host_peak_pages: int = 0
    remote_peak_pages: int = 0
    host_evicted_pages: int = 0
    remote_evicted_pages: int = 0
    instance_requests: list[int] = field(default_factory=list)
    instance_prompt_tokens: list[int] = field(default_factory=list)

    def count(self, host_tokens: int, remote_tokens: int) -> None:
        """Add what a request got from below."""
        self.host_hit_tokens += host_tokens
        self.remote_hit_tokens += remote_tokens

    def look(self, instances: Sequence[Instance], remote: TierModel | None) -> None:
        """Take over what instances and tiers count themselves."""
        hosts = [instance.host for instance in instances if instance.host is not None]
        # Pages of a tier never become fewer.
        self.host_peak_pages = max((host.num_pages for host in hosts), default=0)
        self.host_evicted_pages = sum(host.evicted_pages for host in hosts)
        if remote is not None:
            self.remote_peak_pages = remote.num_pages
            self.remote_evicted_pages = remote.evicted_pages
        self.instance_requests = [instance.num_requests for instance in instances]
        self.instance_prompt_tokens = [instance.prompt_tokens for instance in instances]

    @property
    def request_shares(self) -> tuple[float, float] | None:
        """Least and largest share of the requests that an instance served; None without one."""
        return _extremes(self.instance_requests)

    @property
    def prompt_token_shares(self) -> tuple[float, float] | None:
        """Least and largest share of the prompt tokens."""
        return _extremes(self.instance_prompt_tokens)

    def as_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        found = dict(vars(self))
        for name in ("request_shares", "prompt_token_shares"):
            shares = getattr(self, name)
            found[name] = None if shares is None else {"least": shares[0], "most": shares[1]}
        return found


def _extremes(counts: Sequence[int]) -> tuple[float, float] | None:
    total = sum(counts)
    return (min(counts) / total, max(counts) / total) if total else None
