"""Fleet: how many instances a trace is spread over, by which rule, and what lies below them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product

from kvpool.numbers import INT64_MAX, counted, whole_number

MAX_INSTANCES = 1024
ROUTES = ("round-robin", "prefix")
WRITES = ("insert", "evict")


def check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    """ValueError if `value` is none of `choices`."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}, got {value!r}")


@dataclass(frozen=True)
class Fleet:
    """Instances with a pool each, and tiers below.

    Attributes
    ----------
    instances : int
        Pools, each of the capacity of its cell.
    route : str
        Who serves a request, one of `ROUTES`; see `kvpool.replay.routing`.
    host_tier : int or None
        Tokens of host memory below each instance; 0: none, None: without bound.
    remote_tier : int or None
        Tokens of one store that all instances share; 0: none, None: without bound.
    write : str
        When a page goes to the tiers, one of `WRITES`: when it comes to the tree, or when it is
        evicted from there.

    Raises
    ------
    ValueError, TypeError
        A number out of range, or none; no such route or write; a route for one instance, or a
        write without a tier.
    """

    instances: int = 1
    route: str = ROUTES[0]
    host_tier: int | None = 0
    remote_tier: int | None = 0
    write: str = WRITES[0]

    def __post_init__(self) -> None:
        count = whole_number(self.instances, "instances", 1, MAX_INSTANCES)
        object.__setattr__(self, "instances", count)
        for name in ("host_tier", "remote_tier"):
            tokens = getattr(self, name)
            if tokens is not None:
                object.__setattr__(self, name, whole_number(tokens, name, 0, INT64_MAX))
        check_choice("route", self.route, ROUTES)
        check_choice("write", self.write, WRITES)
        if self.instances == 1 and self.route != ROUTES[0]:
            raise ValueError(f"one instance needs no route: leave it out, got {self.route!r}")
        if not self.has_tiers and self.write != WRITES[0]:
            raise ValueError(f"nothing is written without a tier: got write {self.write!r}")

    @property
    def has_tiers(self) -> bool:
        """Whether pages can come from below."""
        return self.host_tier != 0 or self.remote_tier != 0

    @property
    def is_plain(self) -> bool:
        """One instance, and nothing below."""
        return self.instances == 1 and not self.has_tiers

    def __str__(self) -> str:
        parts = [counted(self.instances, "instance")]
        parts += [self.route] if self.instances > 1 else []
        for name, tokens in (("host", self.host_tier), ("remote", self.remote_tier)):
            if tokens != 0:
                parts.append(f"{name} tier {'unbounded' if tokens is None else f'{tokens:,}'}")
        return ", ".join([*parts, *([f"write on {self.write}"] if self.has_tiers else [])])


PLAIN = Fleet()


def fleets(
    instances: Iterable[int] = (1,),
    routes: Iterable[str] = ROUTES[:1],
    host_tiers: Iterable[int | None] = (0,),
    remote_tiers: Iterable[int | None] = (0,),
    writes: Iterable[str] = WRITES[:1],
) -> list[Fleet]:
    """Every combination; one instance has no route, and what has no tier no write.

    >>> [str(fleet) for fleet in fleets([1, 2], ["round-robin", "prefix"])]
    ['1 instance', '2 instances, round-robin', '2 instances, prefix']

    Raises
    ------
    ValueError, TypeError
        A value out of range, also where it does not matter.
    """
    routes, writes = list(routes), list(writes)
    for route in routes:
        check_choice("route", route, ROUTES)
    for write in writes:
        check_choice("write", write, WRITES)
    found = (
        Fleet(
            count,
            ROUTES[0] if count == 1 else route,
            host,
            remote,
            WRITES[0] if host == 0 and remote == 0 else write,
        )
        for write, host, remote, count, route in product(
            writes, host_tiers, remote_tiers, instances, routes
        )
    )
    return list(dict.fromkeys(found))
