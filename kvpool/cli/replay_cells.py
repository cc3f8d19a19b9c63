"""What ``kvpool replay`` is asked to replay: its options that are lists, as cells."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kvpool.cli.numbers import option_value, parse_bytes, parse_list, parse_tokens
from kvpool.cli.output import CommandError
from kvpool.layout import KVCacheLayout
from kvpool.replay import Cell, Fleet, fleets, grid
from kvpool.replay.fleet import ROUTES, WRITES
from kvpool_ext.eviction import EVICTION_POLICIES


@dataclass(frozen=True)
class Costs:
    """What one token costs, as the options say it.

    Attributes
    ----------
    bytes_per_token : str or None
        In words.
    config : Path or None
        Or by a model's config.json, with the two that follow.
    dtype : str
        Of K and V.
    tp : int
        Tensor-parallel ranks.
    """

    bytes_per_token: str | None
    config: Path | None
    dtype: str
    tp: int

    def capacities(
        self, capacity: str | None, memory: str | None, has_tiers: bool
    ) -> tuple[list[int | None], int | None]:
        """Tokens of each pool, None for one without bound; and the bytes of one, where known."""
        is_told = self.bytes_per_token is not None or self.config is not None
        if memory is None:
            if is_told and not has_tiers:
                raise CommandError("--bytes-per-token and --config go with --memory or a tier")
            text = "unbounded" if capacity is None else capacity
            tokens = option_value("--capacity", lambda text: parse_list(parse_tokens, text), text)
            return tokens, self._cost() if is_told else None
        if capacity is not None:
            raise CommandError("expected --capacity or --memory, got both")
        if not is_told:
            raise CommandError("--memory needs what a token costs: --bytes-per-token or --config")
        budgets = option_value("--memory", lambda text: parse_list(parse_bytes, text), memory)
        cost = self._cost()
        if cost < 1 or min(budgets) < cost:
            raise CommandError(f"--memory: {min(budgets):,} bytes hold no token of {cost:,} bytes")
        return [budget // cost for budget in budgets], cost

    def _cost(self) -> int:
        if self.bytes_per_token is not None and self.config is not None:
            raise CommandError("expected --bytes-per-token or --config, got both")
        if self.config is not None:
            return _cost_by_config(self.config, self.dtype, self.tp)
        return option_value("--bytes-per-token", parse_bytes, self.bytes_per_token or "")


def _cost_by_config(config: Path, dtype: str, tp: int) -> int:
    try:
        return KVCacheLayout.from_config(config, tp_size=tp).bytes_per_token(dtype)
    except OSError as error:
        raise CommandError(f"--config: cannot read {config}: {error.strerror}") from None
    except (ValueError, TypeError, AttributeError) as error:
        raise CommandError(f"--config {config}: {error}") from None


def make_fleets(
    instances: str, route: str, host_tier: str, remote_tier: str, write: str
) -> list[Fleet]:
    """Every combination of instances, routes and tiers."""
    counts = option_value("--instances", lambda text: parse_list(_count, text), instances)
    routes = option_value("--route", lambda text: parse_list(str, text), route)
    hosts = option_value("--host-tier", lambda text: parse_list(_tier, text), host_tier)
    remotes = option_value("--remote-tier", lambda text: parse_list(_tier, text), remote_tier)
    writes = option_value("--write", lambda text: parse_list(str, text), write)
    try:
        found = fleets(counts, routes, hosts, remotes, writes)
    except ValueError as error:
        raise CommandError(str(error)) from None
    if routes != [ROUTES[0]] and max(counts) == 1:
        raise CommandError(f"--route {route}: one instance serves all: say --instances too")
    if writes != [WRITES[0]] and not any(fleet.has_tiers for fleet in found):
        raise CommandError(f"--write {write}: nothing is written without a tier: say one too")
    return found


def make_cells(
    capacities: list[int | None], page_size: str, policy: str, fleets: list[Fleet]
) -> list[Cell]:
    """Every combination of these."""
    page_sizes = option_value("--page-size", lambda text: parse_list(_page_size, text), page_size)
    policies = option_value("--policy", lambda text: parse_list(str, text), policy)
    try:
        cells = grid(capacities, page_sizes, policies, fleets)
    except ValueError as error:
        raise CommandError(str(error)) from None
    if capacities == [None] and policies != [EVICTION_POLICIES[0]]:
        raise CommandError(
            f"--policy {policy}: a pool without bound evicts nothing: say a --capacity too"
        )
    return cells


def _page_size(text: str) -> int:
    if not (text.isascii() and text.isdecimal()):
        raise ValueError(f"expected tokens per page such as 16, got {text!r}")
    return int(text)


def _count(text: str) -> int:
    if not (text.isascii() and text.isdecimal()):
        raise ValueError(f"expected a number of instances such as 4, got {text!r}")
    return int(text)


def _tier(text: str) -> int | None:
    """Tokens of a tier; 0 where there is none."""
    return 0 if text.lower() in ("none", "0") else parse_tokens(text)
