"""kvpool: a KV-cache pool for LLM inference, in pages, with shared prefixes and page tables."""

try:
    import kvpool_ext.tables  # noqa: F401
except ImportError as error:
    # As Python, Cython and NumPy say it.
    said = ("loading in subinterpreters", "one interpreter per process", "once per process")
    if any(words in str(error) for words in said):
        raise ImportError(
            "kvpool serves one interpreter of a process, as NumPy does, and this is a second one: "
            "import it in the main interpreter, or give each worker a process of its own"
        ) from error
    raise ImportError(
        f"kvpool's compiled part is missing or broken ({error}). A source folder hides an "
        "installed kvpool: run from another folder, or build it here with `make setup`"
    ) from error

from kvpool.budget import StaticKVBudget, compute_static_kv_budget
from kvpool.errors import (
    KVCacheCorruptionError,
    KVCacheError,
    KVCacheExhaustedError,
    KVCacheStateError,
    SnapshotError,
    UnknownRequestError,
)
from kvpool.explain import Explanation
from kvpool.graphs import DecodeGraph, VerifyGraph
from kvpool.layout import KVCacheLayout
from kvpool.page_keys import Partition
from kvpool.page_table import PageTable
from kvpool.pool import DEFAULT_PAGE_SIZE, KVCachePool
from kvpool.pool.attached import PoolTiers
from kvpool.pool.prefetch import Prefetch
from kvpool.request import RequestInfo
from kvpool.snapshot import LoadReport, SaveReport
from kvpool.step import Step
from kvpool_ext.eviction import EVICTION_POLICIES
from kvpool_ext.pages import PageAllocator
from kvpool_ext.radix import RadixCache
from kvpool_ext.views import InsertResult, MatchResult, NodeView

__version__ = "0.1.0"

__all__ = [
    "DEFAULT_PAGE_SIZE",
    "EVICTION_POLICIES",
    "DecodeGraph",
    "Explanation",
    "InsertResult",
    "KVCacheCorruptionError",
    "KVCacheError",
    "KVCacheExhaustedError",
    "KVCacheLayout",
    "KVCachePool",
    "KVCacheStateError",
    "LoadReport",
    "MatchResult",
    "NodeView",
    "PageAllocator",
    "PageTable",
    "Partition",
    "PoolTiers",
    "Prefetch",
    "RadixCache",
    "RequestInfo",
    "SaveReport",
    "SnapshotError",
    "StaticKVBudget",
    "Step",
    "UnknownRequestError",
    "VerifyGraph",
    "compute_static_kv_budget",
]
