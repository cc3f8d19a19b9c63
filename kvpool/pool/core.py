"""PoolCore: the parts of a pool and what can be read off them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvpool import paging
from kvpool.device import Device, device_of
from kvpool.dtypes import KVDType, check_scale
from kvpool.errors import KVCacheStateError
from kvpool.graph_buffers import GraphMode
from kvpool.layout import KVCacheLayout
from kvpool.numbers import INT32_MAX, whole_number
from kvpool.poison import PoisonedStep, PoisonedTable, wants_poison
from kvpool.pool.extent import MAX_PAGE_SIZE, check_addressable, make_storage
from kvpool.request import Request
from kvpool.requests import RequestTable
from kvpool.step import LatestTable, Step
from kvpool.storage import KVStorage
from kvpool.switches import is_switched_on
from kvpool_ext.eviction import check_eviction
from kvpool_ext.gate import Gate
from kvpool_ext.radix import RadixCache

__all__ = ["DEFAULT_PAGE_SIZE", "PoolCore", "whole_number"]

DEFAULT_PAGE_SIZE = 16


class PoolCore:
    """Parts and properties of a pool; the calls are added by its subclasses."""

    # What tiers have brought and the tree has not got yet; see `kvpool.pool.tiering`.
    _arrivals: Collection[Any] = ()

    def __init__(
        self,
        num_layers: int,
        num_slots: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        page_size: int = DEFAULT_PAGE_SIZE,
        device: Any = "cpu",
        dtype: Any = "float32",
        k_scale: float | Sequence[float] = 1.0,
        v_scale: float | Sequence[float] = 1.0,
        compute_dtype: Any = None,
        zero_rejected_kv: bool | None = None,
        max_batch_size: int = 1,
        max_seq_len: int | None = None,
        eviction: str = "lru",
        eviction_history: int | None = None,
        poison: bool | None = None,
    ) -> None:
        num_slots = whole_number(num_slots, "num_slots", at_least=1)
        page_size = whole_number(page_size, "page_size", at_least=1, at_most=MAX_PAGE_SIZE)
        if num_slots % page_size:
            raise ValueError(
                f"num_slots must be a multiple of page_size {page_size}, got {num_slots}"
            )
        self._layout = KVCacheLayout(
            num_layers,
            num_kv_heads,
            head_dim,
            max_batch_size,
            num_slots if max_seq_len is None else max_seq_len,
        )
        self._device = device_of(device)
        self._dtype = KVDType.of(dtype, compute_dtype)
        check_addressable(self._layout, num_slots, page_size, self._dtype)
        self._k_scale = check_scale(k_scale, "k_scale", self._layout.num_layers, self._dtype)
        self._v_scale = check_scale(v_scale, "v_scale", self._layout.num_layers, self._dtype)
        # The tree would say it too, but only once the buffers are there.
        check_eviction(eviction)
        if eviction_history is not None:
            whole_number(eviction_history, "eviction_history", 0, INT32_MAX)
        if zero_rejected_kv is None:
            zero_rejected_kv = is_switched_on("KVPOOL_ZERO_REJECTED_KV", True)
        self._zero_rejected_kv = bool(zero_rejected_kv)
        self._num_slots = num_slots
        self._page_size = page_size
        self._storage: KVStorage | None = make_storage(
            self._layout,
            num_slots,
            page_size,
            self._dtype,
            self._device,
            self._k_scale,
            self._v_scale,
        )
        self._poison = wants_poison(poison)
        table = partial(PoisonedTable, self._storage) if self._poison else RequestTable
        self._step_class = PoisonedStep if self._poison else Step
        self._requests = table(
            num_slots // page_size,
            page_size,
            self._layout.num_layers,
            eviction,
            eviction_history=eviction_history,
        )
        self._gate = Gate(KVCacheStateError)
        self._requests.ledger.guard_by(self._gate)
        self._prefix_reuse = True
        # The rows to be active, and their step once somebody asks for it: a bind must not pay
        # for a step.
        self._active: list[Request] = []
        self._step: Step | None = None
        self._latest_table = LatestTable()
        self._graph_mode = GraphMode()

    # ---- reading it

    @property
    def layout(self) -> KVCacheLayout:
        """Shape of the cache."""
        return self._layout

    @property
    def num_layers(self) -> int:
        """Layers."""
        return self._layout.num_layers

    @property
    def num_slots(self) -> int:
        """Tokens that the pool holds, the scratch page not counted."""
        return self._num_slots

    @property
    def num_pages(self) -> int:
        """Pages that the pool hands out."""
        return self._num_slots // self._page_size

    @property
    def num_kv_heads(self) -> int:
        """K/V heads."""
        return self._layout.num_kv_heads

    @property
    def head_dim(self) -> int:
        """Elements of one head."""
        return self._layout.head_dim

    @property
    def page_size(self) -> int:
        """Tokens per page."""
        return self._page_size

    @property
    def device(self) -> Device:
        """Where the buffers live; compares equal to its string."""
        return self._device

    @property
    def array_namespace(self) -> ModuleType:
        """The array module of the device (NumPy for a CPU): write model code against it."""
        return self._device.array_namespace

    @property
    def dtype(self) -> str:
        """Storage dtype by name."""
        return self._dtype.name

    @property
    def compute_dtype(self) -> str:
        """Dtype that `get` returns, by name."""
        return self._dtype.compute

    @property
    def kv_is_compute_dtype(self) -> bool:
        """Whether K and V are stored as models see them, so that kernels can read the buffers."""
        return self._dtype.is_compute

    @property
    def k_scale(self) -> float | NDArray[np.float32]:
        """Scale of K, a float or float32 ``[num_layers]``; 1.0 unless FP8."""
        return self._k_scale

    @property
    def v_scale(self) -> float | NDArray[np.float32]:
        """Scale of V, a float or float32 ``[num_layers]``; 1.0 unless FP8."""
        return self._v_scale

    @property
    def zero_rejected_kv(self) -> bool:
        """Whether `truncate_to` zeroes rejected tails."""
        return self._zero_rejected_kv

    @property
    def eviction(self) -> str:
        """Policy by which cached pages go, one of `EVICTION_POLICIES`."""
        return self._requests.ledger.tree.eviction

    @property
    def key_cache(self) -> NDArray[Any]:
        """K, ``[num_layers, num_slots, num_kv_heads, head_dim]`` in the storage dtype, a view."""
        return self._open_storage().key_cache

    @property
    def value_cache(self) -> NDArray[Any]:
        """V of all layers, as `key_cache`."""
        return self._open_storage().value_cache

    def key_layer(self, layer: int) -> NDArray[Any]:
        """K of one layer, ``[num_slots, num_kv_heads, head_dim]``, a view."""
        return self.layer_with_scratch(layer)[0][: self._num_slots]

    def value_layer(self, layer: int) -> NDArray[Any]:
        """V of one layer, ``[num_slots, num_kv_heads, head_dim]``, a view."""
        return self.layer_with_scratch(layer)[1][: self._num_slots]

    def layer_with_scratch(self, layer: int) -> tuple[NDArray[Any], NDArray[Any]]:
        """K and V of one layer with the scratch page, views.

        Each is ``[num_slots + page_size, num_kv_heads, head_dim]``. For kernels that follow a page
        table whose padding names the scratch page.
        """
        storage = self._open_storage()
        return storage.layer(storage.check_layer(layer))

    def layer_scales(self, layer: int) -> tuple[float, float]:
        """FP8 scales of K and V of one layer; 1.0 for other dtypes."""
        storage = self._open_storage()
        return storage.scales(storage.check_layer(layer))

    @property
    def fp8_format(self) -> str | None:
        """The FP8 format of the stored bytes by its dtype's name, None where nothing is FP8."""
        return self._dtype.fp8_format

    @property
    def free_pages(self) -> int:
        """Pages that nobody holds."""
        return self._requests.free_pages

    @property
    def free_slots(self) -> int:
        """Slots of the free pages."""
        return self._requests.free_pages * self._page_size

    @property
    def radix(self) -> RadixCache:
        """The tree of cached prefixes.

        On a pool, `insert` takes only pages from `alloc`, and `evict` hands out pages for `free`.
        """
        return self._requests.ledger.tree

    # ---- page arithmetic of the reference class

    def num_pages_for_length(self, length: int) -> int:
        """Pages spanned by `length` tokens."""
        return paging.num_pages_for_length(length, self._page_size)

    def steps_until_page_boundary(self, cache_len: int) -> int:
        """Decode steps that still fit in the last page; 0 when the next step enters a new one."""
        return paging.steps_until_page_boundary(cache_len, self._page_size)

    def first_cache_len_in_next_page_bucket(self, num_pages: int) -> int:
        """Smallest cache length that spans ``num_pages + 1`` pages."""
        return paging.first_cache_len_in_next_page_bucket(num_pages, self._page_size)

    def _take_arrivals(self) -> int:
        return 0

    def _activate(self, requests: list[Request], step: Step | None = None) -> None:
        self._active = requests
        self._step = step

    def _live_rows(self) -> list[Request]:
        step = self._step
        # A step knows it in one pass of C; over 256 rows this loop takes ten microseconds.
        live = all(row.live for row in self._active) if step is None else step.is_alive
        return self._active if live else []

    def _make_step(self, requests: list[Request]) -> Step:
        return self._step_class(
            self._requests,
            self._open_storage(),
            requests,
            self._gate,
            self._zero_rejected_kv,
            self._graph_mode,
            self._latest_table,
        )

    def _open_storage(self) -> KVStorage:
        if self._storage is None:
            raise KVCacheStateError("the pool is closed")
        return self._storage
