"""Counters and gauges of pools as Prometheus text, with or without its Python client.

`metrics_text` needs nothing else: serve what it returns as `CONTENT_TYPE`. A program that already
has a registry of `prometheus_client` (extra `metrics`) registers one `PoolCollector` in it. Both
read `KVCachePool.stats` when they are asked, and may be asked from any thread: all numbers of a
pool are of one moment between two of its calls, so the pages of all states add up.
"""

from __future__ import annotations

import re
import threading
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import kvpool
from kvpool.errors import KVCacheStateError
from kvpool.request_counts import FAILURE_CAUSES

if TYPE_CHECKING:
    from kvpool.pool import KVCachePool

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""Of `metrics_text`, for an HTTP response."""


@dataclass(frozen=True)
class Family:
    """One metric of a pool.

    Attributes
    ----------
    name : str
        As the ecosystem names it, without ``_total`` or ``_info``.
    kind : str
        ``"gauge"``, ``"counter"`` or ``"info"``.
    help : str
        What it counts, in which unit.
    label : str
        The label that distinguishes its samples, empty where it has one sample.
    keys : dict
        Value of that label -> key of `KVCachePool.stats`.
    """

    name: str
    kind: str
    help: str
    label: str = ""
    keys: Mapping[str, str] = field(default_factory=dict)

    @property
    def sample_name(self) -> str:
        """Name in the text."""
        return self.name + {"counter": "_total", "info": "_info"}.get(self.kind, "")


INFO = Family("kvpool_pool", "info", "What the pool is made of.")


def _sum(name: str, key: str, text: str) -> Family:
    return Family(f"kvpool_{name}", "counter", text, keys={"": key})


def _now(name: str, text: str) -> Family:
    return Family(f"kvpool_{name}", "gauge", text, keys={"": name})


FAMILIES = (
    Family(
        "kvpool_pages",
        "gauge",
        "Pages of the pool by state; each page is in one.",
        "state",
        {state: f"pages_{state}" for state in ("free", "private", "tree", "taken")},
    ),
    _now("pages_evictable", "Pages of state tree that no request has locked."),
    _now("pages_fetching", "Pages of state taken that wait for what a prefetch reads."),
    _now("requests_bound", "Requests that hold pages."),
    _sum("evicted_pages", "evicted_pages", "Cached pages taken out of the tree to make room."),
    _sum("prefix_prompt_tokens", "prefix_prompt_tokens", "Prompt tokens of prefix binds."),
    _sum("prefix_hit_tokens", "prefix_match_tokens", "Prompt tokens found in the cache."),
    _sum("prefix_inserted_tokens", "prefix_insert_tokens", "Tokens newly brought into the cache."),
    Family(
        "kvpool_bind_failures",
        "counter",
        "Calls that found too few pages: binds (no_pages) and forks (fork) that can succeed "
        "later, and any that never can (too_large).",
        "cause",
        {cause: f"bind_failures_{cause}" for cause in FAILURE_CAUSES},
    ),
)
"""Every metric but `INFO`, in the order of the text."""

_LABEL = re.compile(r"(?!__)[a-zA-Z_][a-zA-Z0-9_]*", re.ASCII)
_INFO_LABELS = ("version", "device", "dtype", "page_size", "num_pages")
_TAKEN = {*_INFO_LABELS, *(family.label for family in FAMILIES)}


def metrics_text(
    pools: KVCachePool | Mapping[str, KVCachePool], labels: Mapping[str, str] | None = None
) -> str:
    """Metrics in Prometheus' text format 0.0.4; nothing but kvpool is needed.

    Parameters
    ----------
    pools : KVCachePool or mapping of str to KVCachePool
        One pool, or several by name, which becomes their label ``pool``. Of several, closed ones
        are left out.
    labels : mapping of str to str, optional
        Labels of every sample: model, instance, rank.

    Raises
    ------
    ValueError
        A name that is no label name, or that the metrics have a label of themselves.
    KVCacheStateError
        The one pool is closed.

    Examples
    --------
    >>> from kvpool import KVCachePool
    >>> with KVCachePool(1, 64, 1, 8) as pool:
    ...     print(metrics_text(pool, {"model": "tiny"}).splitlines()[5])
    kvpool_pages{model="tiny",state="free"} 4
    """
    common = _checked(labels or {}, {"pool"} if isinstance(pools, Mapping) else set())
    if isinstance(pools, Mapping):
        readings = [
            ({"pool": name, **common}, reading)
            for name, pool in pools.items()
            if (reading := _read(pool)) is not None
        ]
    else:
        readings = [(common, _Reading(pools))]
    lines: list[str] = []
    for family in (INFO, *FAMILIES):
        kind = "gauge" if family.kind == "info" else family.kind
        lines += [
            f"# HELP {family.sample_name} {_escape(family.help)}",
            f"# TYPE {family.sample_name} {kind}",
        ]
        for known, reading in readings:
            lines += [
                f"{family.sample_name}{_labels({**known, **own})} {value}"
                for own, value in reading.samples(family)
            ]
    return "\n".join(lines) + "\n"


class PoolCollector:
    """Pools as a collector of `prometheus_client`, each under its name as the label ``pool``.

    Register one collector for all pools of a process: a registry takes each metric from one
    collector. Pools are held weakly; a pool that was closed or collected is in no scrape any more.

    Parameters
    ----------
    pool : KVCachePool
        The first one; `add` takes more.
    name : str
        Value of its label ``pool``.

    Raises
    ------
    ImportError
        prometheus-client is not installed.

    Examples
    --------
    ::

        collector = PoolCollector(pool, "main")
        prometheus_client.REGISTRY.register(collector)
        collector.add(draft_pool, "draft")
    """

    def __init__(self, pool: KVCachePool, name: str) -> None:
        self._metric = _import_metric()
        self._lock = threading.Lock()
        self._pools: dict[str, weakref.ref[KVCachePool]] = {}
        self.add(pool, name)

    def add(self, pool: KVCachePool, name: str) -> None:
        """Collect another pool as well.

        Raises
        ------
        ValueError
            Another open pool has this name.
        """
        with self._lock:
            known = self._pools.get(name)
            other = None if known is None else known()
            if other is not None and other is not pool and not other.closed:
                raise ValueError(
                    f"another open pool is collected as {name!r}: name it differently"
                )
            self._pools[name] = weakref.ref(pool)

    def describe(self) -> Iterator[Any]:
        """The metrics without samples: a registry asks for their names."""
        for family in (INFO, *FAMILIES):
            yield self._empty(family)

    def collect(self) -> Iterator[Any]:
        """The metrics of all open pools, read now."""
        with self._lock:
            known = [(name, reference()) for name, reference in self._pools.items()]
        readings = [
            (name, reading)
            for name, pool in known
            if pool is not None and (reading := _read(pool)) is not None
        ]
        for family in (INFO, *FAMILIES):
            made = self._empty(family)
            for name, reading in readings:
                for own, value in reading.samples(family):
                    made.add_sample(family.sample_name, {"pool": name, **own}, value)
            yield made

    def _empty(self, family: Family) -> Any:
        return self._metric(family.name, family.help, family.kind)


class _Reading:
    """What a pool said at one moment."""

    def __init__(self, pool: KVCachePool) -> None:
        self._stats = pool.stats()
        values = (kvpool.__version__, pool.device, pool.dtype, pool.page_size, pool.num_pages)
        self._parts = dict(zip(_INFO_LABELS, map(str, values), strict=True))

    def samples(self, family: Family) -> Iterator[tuple[dict[str, str], int]]:
        """Labels and value of each sample."""
        if family is INFO:
            yield self._parts, 1
        for value, key in family.keys.items():
            yield ({family.label: value} if family.label else {}), self._stats[key]


def _read(pool: KVCachePool) -> _Reading | None:
    """A reading, or None of a pool that is closed, perhaps in this moment by another thread."""
    try:
        return _Reading(pool)
    except KVCacheStateError:
        return None


def _checked(labels: Mapping[str, str], taken: set[str]) -> dict[str, str]:
    for name in labels:
        if not _LABEL.fullmatch(name):
            raise ValueError(
                f"a label name has letters, digits and _ and starts with no digit and not with "
                f"__, got {name!r}"
            )
        if name in _TAKEN | taken:
            raise ValueError(f"the metrics have a label {name!r} of their own: choose another")
    return {name: str(value) for name, value in labels.items()}


def _labels(labels: Mapping[str, str]) -> str:
    if not labels:
        return ""
    escaped = {name: _escape(value).replace('"', r"\"") for name, value in labels.items()}
    return "{" + ",".join(f'{name}="{value}"' for name, value in escaped.items()) + "}"


def _escape(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n")


def _import_metric() -> Any:
    try:
        from prometheus_client import Metric
    except ImportError as error:
        raise ImportError(
            f"a collector needs prometheus-client, which cannot be imported ({error}): pip "
            "install 'kvpool[metrics]', or serve metrics_text, which needs nothing"
        ) from error
    return Metric
