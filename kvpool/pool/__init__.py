"""KVCachePool: the whole pool. Wiring and public calls; the work is done one floor below."""

from __future__ import annotations

from types import TracebackType
from typing import Any, cast

from kvpool import paging
from kvpool.budget import StaticKVBudget, check_mem_fraction, compute_static_kv_budget
from kvpool.device import device_of
from kvpool.errors import KVCacheExhaustedError
from kvpool.layout import KVCacheLayout
from kvpool.numbers import whole_number
from kvpool.pool.binds import PoolBinds
from kvpool.pool.closed import ClosedTable
from kvpool.pool.core import DEFAULT_PAGE_SIZE
from kvpool.pool.figures import PoolFigures
from kvpool.pool.graphs import PoolGraphs
from kvpool.pool.guests import PoolGuests
from kvpool.pool.pages import PoolPages
from kvpool.pool.poisoned import PoolPoison
from kvpool.pool.restarts import PoolRestarts
from kvpool.pool.streams import PoolStreams
from kvpool.pool.tiering import PoolTiering
from kvpool.request import Request
from kvpool.requests import RequestTable
from kvpool.step import LatestTable

__all__ = ["DEFAULT_PAGE_SIZE", "KVCachePool"]


class KVCachePool(
    PoolBinds,
    PoolFigures,
    PoolGraphs,
    PoolGuests,
    PoolPages,
    PoolPoison,
    PoolRestarts,
    PoolStreams,
    PoolTiering,
):
    """K and V of a model in pages, shared between requests through a radix tree.

    The pool is static: its buffers are allocated once, binds claim pages of them and never grow
    them. It serves one scheduler thread; concurrent entry raises `KVCacheStateError`.

    Parameters
    ----------
    num_layers : int
        Layers with K and V of their own.
    num_slots : int
        Tokens that the pool holds, a multiple of `page_size`.
    num_kv_heads, head_dim : int
        Shape of one token's K (and V) in one layer.
    page_size : int
        Tokens per page.
    device : str or Device
        ``"cpu"``, ``"cuda"`` or ``"cuda:1"``.
    dtype : str or dtype
        Storage dtype by its torch name, or an object that carries such a name: float32, float16,
        bfloat16, float8_e4m3fn, float8_e5m2.
    k_scale, v_scale : float or sequence of float
        Quantisation scales, one number or one per layer: ``x / scale`` is stored. 1.0 for a dtype
        that is not FP8.
    compute_dtype : str or dtype, optional
        What `get` returns; default `dtype`, or bfloat16 for FP8.
    zero_rejected_kv : bool, optional
        Whether `truncate_to` zeroes the rejected tail; default on, ``KVPOOL_ZERO_REJECTED_KV=0``
        turns it off.
    max_batch_size, max_seq_len : int
        They size the buffers of `decode_graph` and `verify_graph`, and limit no bind.
        `max_seq_len` defaults to `num_slots`.
    eviction : str
        Which cached page goes first where pages are short, one of `EVICTION_POLICIES`; each within
        the lowest priority, exact, and described at `RadixCache`.
    eviction_history : int, optional
        Evicted tokens that `explain` can tell of, 0: none; unless told, `num_slots`, of more than
        65,536 a sixteenth. They take 4 bytes each on the host, and 88 for each run of pages.
    poison : bool, optional
        Poison mode, for debugging: stale reads, writes after free and unwritten hits raise
        `KVCacheCorruptionError`. Default off, ``KVPOOL_POISON=1`` turns it on.

    Raises
    ------
    ValueError, TypeError
        Sizes below 1, `num_slots` that is no multiple of `page_size`, an unknown dtype, device or
        eviction policy, a bad scale.
    """

    # ---- making one

    @classmethod
    def allocate(
        cls,
        layout: KVCacheLayout,
        device: Any,
        dtype: Any,
        mem_fraction: float,
        page_size: int = DEFAULT_PAGE_SIZE,
        *,
        memory: tuple[int, int] | None = None,
        **pool_options: Any,
    ) -> KVCachePool:
        """A pool sized by SGLang's mem-fraction rule; call it after the weights are loaded.

        Parameters
        ----------
        layout : KVCacheLayout
            Shape and the cap ``max_batch_size * max_seq_len``.
        device, dtype, page_size, pool_options
            As the constructor.
        mem_fraction : float
            Static region as a fraction of the device's memory, in ``(0, 1]``.
        memory : tuple of int, optional
            ``(total, free)`` bytes instead of a reading. A GPU is read after CuPy's cache, and
            torch's if it is loaded, were emptied. A CPU is not read: without `memory` the cap
            decides.

        Raises
        ------
        KVCacheExhaustedError
            Not one page fits; the message explains the budget.
        """
        place = device_of(device)
        check_mem_fraction(mem_fraction)
        found = place.read_memory() if memory is None else _checked_memory(memory)
        if found is None:
            num_slots = _cap(layout, page_size)
        else:
            budget = compute_static_kv_budget(
                *found,
                mem_fraction,
                layout.bytes_per_token(dtype),
                page_size,
                layout.max_batch_size,
                layout.max_seq_len,
            )
            if budget.num_pages == 0:
                raise _no_page(str(budget))
            num_slots = budget.num_slots
        return cls._of(layout, num_slots, page_size, place, dtype, **pool_options)

    @classmethod
    def for_testing(cls, layout: KVCacheLayout, device: Any = "cpu") -> KVCachePool:
        """A float32 pool for unit tests, ``max_batch_size * max_seq_len`` slots of page size 1."""
        return cls._of(layout, _cap(layout, 1), 1, device, "float32")

    @classmethod
    def for_mtp(
        cls, layout: KVCacheLayout, device: Any, dtype: Any, page_size: int
    ) -> KVCachePool:
        """A pool of fixed size for a draft head's K/V of one multi-token-prediction round.

        Give it the main pool's dtype and page size: a batched draft step over a pool that differed
        in them ran into an illegal memory access, because both pools share one decode call
        (`tests/test_flow_mtp.py` keeps this scar).
        """
        return cls._of(layout, _cap(layout, page_size), page_size, device, dtype)

    @classmethod
    def for_mtp_history(
        cls,
        layout: KVCacheLayout,
        device: Any,
        dtype: Any,
        page_size: int,
        want_slots: int,
        *,
        memory: tuple[int, int] | None = None,
    ) -> KVCachePool:
        """A draft head's own history of every bound request; prefix reuse is off.

        Parameters
        ----------
        layout : KVCacheLayout
            Shape of the draft layers.
        device, dtype, page_size
            The main pool's.
        want_slots : int
            Usually the main pool's `num_slots`; rounded up to a page.
        memory : tuple of int, optional
            ``(total, free)`` bytes instead of a reading; at most half of what is free is used.

        Raises
        ------
        KVCacheExhaustedError
            Half of the free memory holds not one page.
        """
        want_slots = whole_number(want_slots, "want_slots", 1)
        num_pages = paging.num_pages_for_length(want_slots, page_size)
        place = device_of(device)
        found = place.read_memory() if memory is None else _checked_memory(memory)
        if found is not None:
            free = found[1]
            half = free // 2
            num_pages = min(num_pages, half // layout.bytes_per_token(dtype) // page_size)
            if num_pages == 0:
                raise _no_page(
                    f"half of the free {free} bytes holds not one page of {page_size} tokens "
                    "at "
                    f"{layout.bytes_per_token(dtype)} bytes each"
                )
        num_slots = num_pages * page_size
        pool = cls._of(layout, num_slots, page_size, place, dtype, eviction_history=0)
        pool.prefix_reuse_enabled = False
        return pool

    @classmethod
    def _of(
        cls,
        layout: KVCacheLayout,
        num_slots: int,
        page_size: int,
        device: Any,
        dtype: Any,
        **options: Any,
    ) -> KVCachePool:
        sizes = {"max_batch_size": layout.max_batch_size, "max_seq_len": layout.max_seq_len}
        return cls(
            layout.num_layers,
            num_slots,
            layout.num_kv_heads,
            layout.head_dim,
            page_size=page_size,
            device=device,
            dtype=dtype,
            **(sizes | options),
        )

    compute_static_kv_budget = staticmethod(compute_static_kv_budget)
    StaticKVBudget = StaticKVBudget

    def close(self) -> None:
        """Let go of the buffers; views handed out stay valid. A second close does nothing."""
        no_requests, no_table, no_rows = ClosedTable(), LatestTable(), list[Request]()
        self._gate.close()
        self._close_publishers()
        self._stop_following()
        self._stop_tiers()
        self._storage = None
        self._requests = cast(RequestTable, no_requests)
        self._active = no_rows
        self._step = None
        self._latest_table = no_table
        self._graphs.clear()
        self._graph_wiring = None
        self._guests.clear()

    @property
    def closed(self) -> bool:
        """Whether `close` was called; every other call raises then."""
        return self._gate.closed

    def __enter__(self) -> KVCachePool:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = ", closed" if self._gate.closed else ""
        return (
            f"KVCachePool({self.num_pages} pages of {self._page_size}, {self._layout.num_layers} "
            "layers, "
            f"{self._layout.num_kv_heads} heads of {self._layout.head_dim}, {self._dtype.name} on "
            f"{self._device}{state})"
        )


def _checked_memory(memory: tuple[int, int]) -> tuple[int, int]:
    if len(memory) != 2:
        raise ValueError(f"memory must be (total, free) bytes, got {len(memory)} numbers")
    total, free = (whole_number(part, "memory") for part in memory)
    if free > total:
        raise ValueError(
            f"memory must be (total, free) bytes with 0 <= free <= total, got {memory}"
        )
    return total, free


def _cap(layout: KVCacheLayout, page_size: int) -> int:
    return layout.max_batch_size * paging.round_up_to_page(layout.max_seq_len, page_size)


def _no_page(explanation: str) -> KVCacheExhaustedError:
    return KVCacheExhaustedError(
        explanation,
        needed_pages=1,
        free_pages=0,
        evictable_pages=0,
        total_pages=0,
        can_ever_fit=False,
    )
