"""KVCachePool: the whole pool. Wiring and public calls; the work is done one floor below."""

from __future__ import annotations

import os
from collections.abc import Sequence
from types import ModuleType, TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvpool import paging
from kvpool.budget import StaticKVBudget, compute_static_kv_budget
from kvpool.device import Device
from kvpool.dtypes import KVDType, check_scale
from kvpool.errors import KVCacheExhaustedError, KVCacheStateError
from kvpool.layout import KVCacheLayout
from kvpool.requests import ExtraKey, Request, RequestInfo, RequestTable
from kvpool.step import Step
from kvpool.storage import KVStorage
from kvpool_ext.gate import Gate
from kvpool_ext.radix import RadixCache

DEFAULT_PAGE_SIZE = 16


class KVCachePool:
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
        ``"cpu"``.
    dtype : str or dtype
        Storage dtype by its torch name, or an object that carries such a name: float32, float16,
        bfloat16.
    k_scale, v_scale : float or sequence of float
        Quantisation scales, one number or one per layer; 1.0 for a dtype that is not FP8.
    compute_dtype : str or dtype, optional
        What `get` returns; default `dtype`.
    zero_rejected_kv : bool, optional
        Whether `truncate_to` zeroes the rejected tail; default on, ``KVPOOL_ZERO_REJECTED_KV=0``
        turns it off.
    max_batch_size, max_seq_len : int
        Sizes of the graph buffers; `max_seq_len` defaults to `num_slots`.

    Raises
    ------
    ValueError, TypeError
        Sizes below 1, `num_slots` that is no multiple of `page_size`, an unknown dtype or device,
        a bad scale.
    """

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
    ) -> None:
        _check_sizes(num_slots, page_size)
        self._layout = KVCacheLayout(
            num_layers,
            num_kv_heads,
            head_dim,
            max_batch_size,
            num_slots if max_seq_len is None else max_seq_len,
        )
        self._device = Device(device)
        self._dtype = KVDType.of(dtype, compute_dtype)
        self._k_scale = check_scale(k_scale, "k_scale", num_layers, self._dtype)
        self._v_scale = check_scale(v_scale, "v_scale", num_layers, self._dtype)
        if zero_rejected_kv is None:
            zero_rejected_kv = os.environ.get("KVPOOL_ZERO_REJECTED_KV", "1") != "0"
        self._zero_rejected_kv = bool(zero_rejected_kv)
        self._num_slots = num_slots
        self._page_size = page_size
        self._storage: KVStorage | None = KVStorage(
            self._layout, num_slots, page_size, self._dtype, self._device
        )
        self._requests = RequestTable(num_slots // page_size, page_size, num_layers)
        self._gate = Gate(KVCacheStateError)
        self._prefix_reuse = True
        # The rows to be active, and their step once somebody asks for it: a bind must not pay
        # for a step.
        self._active: list[Request] = []
        self._step: Step | None = None

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
            ``(total, free)`` bytes instead of a reading. A CPU is not read: without `memory` the
            cap decides.

        Raises
        ------
        KVCacheExhaustedError
            Not one page fits; the message explains the budget.
        """
        Device(device)
        if memory is None:
            num_slots = _cap(layout, page_size)
        else:
            budget = compute_static_kv_budget(
                *memory,
                mem_fraction,
                layout.bytes_per_token(dtype),
                page_size,
                layout.max_batch_size,
                layout.max_seq_len,
            )
            if budget.num_pages == 0:
                raise _no_page(str(budget))
            num_slots = budget.num_slots
        return cls._of(layout, num_slots, page_size, device, dtype, **pool_options)

    @classmethod
    def for_testing(cls, layout: KVCacheLayout, device: Any = "cpu") -> KVCachePool:
        """A float32 pool of page size 1, ``max_batch_size * max_seq_len`` slots, for unit tests."""
        return cls._of(layout, _cap(layout, 1), 1, device, "float32")

    @classmethod
    def for_mtp(
        cls, layout: KVCacheLayout, device: Any, dtype: Any, page_size: int
    ) -> KVCachePool:
        """A pool of fixed size for the draft head's short-lived K/V of one multi-token-prediction
        round.

        Give it the main pool's dtype and page size: a batched draft step over a pool that differed
        in them ran into an illegal memory access, because both pools share one decode call
        (`tests/test_flow_pages.py` keeps this scar).
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
        """The draft head's own history of every bound request: the main pool's slots, prefix reuse
        off.

        Parameters
        ----------
        layout : KVCacheLayout
            Shape of the draft layers.
        device, dtype, page_size
            The main pool's.
        want_slots : int
            Usually the main pool's `num_slots`; rounded up to a page.
        memory : tuple of int, optional
            ``(total, free)`` bytes; at most half of what is free is used.

        Raises
        ------
        KVCacheExhaustedError
            Half of the free memory holds not one page.
        """
        if want_slots < 1:
            raise ValueError(f"want_slots must be at least 1, got {want_slots}")
        num_pages = paging.num_pages_for_length(want_slots, page_size)
        if memory is not None:
            half = memory[1] // 2
            num_pages = min(num_pages, half // layout.bytes_per_token(dtype) // page_size)
            if num_pages == 0:
                raise _no_page(
                    f"half of the free {memory[1]} bytes holds not one page of {page_size} tokens "
                    "at "
                    f"{layout.bytes_per_token(dtype)} bytes each"
                )
        pool = cls._of(layout, num_pages * page_size, page_size, device, dtype)
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
        self._gate.close()
        self._storage = None
        self._active = []
        self._step = None

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
        """K and V of one layer, scratch page included: ``[num_slots + page_size, num_kv_heads,
        head_dim]``, views.

        For kernels that follow a page table whose padding names the scratch page.
        """
        storage = self._open_storage()
        return storage.layer(storage.check_layer(layer))

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

    @property
    def flashinfer_workspace(self) -> None:
        """Workspace of FlashInfer, None where it is absent: it has no kernels for a CPU pool."""
        return None

    # ---- prefix reuse

    @property
    def prefix_reuse_enabled(self) -> bool:
        """Whether binds match and finishes insert; a request bound while off never inserts."""
        return self._prefix_reuse

    @prefix_reuse_enabled.setter
    def prefix_reuse_enabled(self, enabled: bool) -> None:
        self._prefix_reuse = bool(enabled)

    @property
    def prefix_prompt_tokens(self) -> int:
        """Prompt tokens of all successful prefix binds, full length."""
        return self._requests.prefix_prompt_tokens

    @property
    def prefix_match_tokens(self) -> int:
        """Of these, tokens found in the cache."""
        return self._requests.prefix_match_tokens

    @property
    def prefix_insert_tokens(self) -> int:
        """Tokens newly brought into the tree by requests."""
        return self._requests.prefix_insert_tokens

    def reset_prefix_cache(self) -> int:
        """Forget all cached prefixes, after new weights for instance.

        Unlocked pages are free at once; locked ones leave the index at once and are freed at their
        last unlock. A request bound before the reset inserts nothing.

        Returns
        -------
        int
            Tokens whose pages were freed.
        """
        self._gate.enter()
        try:
            return self._requests.ledger.reset()
        finally:
            self._gate.leave()

    # ---- raw pages

    def alloc(self, num_tokens: int) -> NDArray[np.int64]:
        """Take pages for `num_tokens`, evicting where it must.

        Returns
        -------
        ndarray
            int64 slots on the host, page-aligned length; pages need not be contiguous.

        Raises
        ------
        KVCacheExhaustedError
            Not so many pages are free or evictable.
        """
        self._gate.enter()
        try:
            if _count(num_tokens, "num_tokens") == 0:
                raise ValueError("num_tokens must be at least 1, got 0")
            num_pages = paging.num_pages_for_length(num_tokens, self._page_size)
            pages = self._requests.ledger.take(num_pages) if num_pages <= self.num_pages else None
            if pages is None:
                raise self._requests.exhausted(
                    f"allocating {num_tokens} tokens", num_pages, num_pages
                )
            return (
                pages[:, None] * np.int64(self._page_size) + np.arange(self._page_size)
            ).ravel()
        finally:
            self._gate.leave()

    def free(self, slots: Any) -> None:
        """Give back whole pages that `alloc` took.

        Parameters
        ----------
        slots : sequence of int
            All slots of each page, each page once.

        Raises
        ------
        ValueError
            A page that is not whole, stands twice, or was not taken by `alloc`: names page and
            owner.
        """
        self._gate.enter()
        try:
            pages = self._whole_pages(slots)
            bad = self._requests.ledger.give(pages)
            if bad >= 0:
                page = int(pages[bad])
                twice = page in pages[:bad]
                owner = (
                    "given twice in this call"
                    if twice
                    else f"owner: {self._requests.page_owner(page)}"
                )
                raise ValueError(f"page {page} was not taken by alloc ({owner})")
        finally:
            self._gate.leave()

    def _whole_pages(self, slots: Any) -> NDArray[np.int32]:
        found = np.asarray(slots)
        if found.dtype.kind not in "iu" and found.size:
            raise TypeError(f"slots must be integers, got dtype {found.dtype}")
        if found.ndim != 1:
            raise ValueError(f"slots must be one-dimensional, got shape {found.shape}")
        if found.size % self._page_size:
            raise ValueError(f"{found.size} slots are no whole pages of {self._page_size}")
        grouped = found.astype(np.int64).reshape(-1, self._page_size)
        expected = grouped[:, :1] + np.arange(self._page_size)
        if (grouped != expected).any():
            grouped = np.sort(grouped.ravel()).reshape(-1, self._page_size)
            expected = grouped[:, :1] + np.arange(self._page_size)
        ragged = (grouped != expected).any(axis=1) | (grouped[:, 0] % self._page_size != 0)
        outside = (grouped[:, 0] < 0) | (grouped[:, 0] >= self._num_slots)
        if outside.any():
            slot = grouped[np.argmax(outside), 0]
            raise ValueError(
                f"page {slot // self._page_size} (slot {slot}) is none of the pool's "
                f"{self.num_pages} pages"
            )
        if ragged.any():
            page = grouped[np.argmax(ragged), 0] // self._page_size
            raise ValueError(f"the slots of page {page} are not whole, or stand twice")
        return (grouped[:, 0] // self._page_size).astype(np.int32)

    # ---- binding

    def bind_request(
        self, prompt: Any, total_capacity: int, *, extra_key: ExtraKey = None, priority: int = 0
    ) -> int:
        """Bind a request: match its prompt, lock the match, reserve pages for all of
        `total_capacity`.

        Parameters
        ----------
        prompt : sequence of int
            Token ids ``[n]``; an int32 array is read in place and not kept.
        total_capacity : int
            Tokens to reserve, prompt included; rounded up to whole pages.
        extra_key : str, bytes, int or None
            Namespace (adapter, tenant, weight version): nothing is shared across namespaces.
        priority : int
            Of what this request will insert; lower is evicted first.

        Returns
        -------
        int
            The request id, from 1 up. If nothing was bound, the request becomes the active step.

        Raises
        ------
        KVCacheExhaustedError
            The pages cannot be had now; nothing was changed, no eviction either.
        ValueError
            Empty prompt, capacity below the prompt, a token beyond int32.
        TypeError
            Tokens that are no integers.
        """
        self._gate.enter()
        try:
            alone = len(self._requests) == 0
            request = self._requests.bind(
                prompt, total_capacity, extra_key, priority, self._prefix_reuse
            )
            if alone:
                self._activate([request])
            return request.request_id
        finally:
            self._gate.leave()

    def bind_with_prefix(
        self, prompt: Any, total_capacity: int, *, extra_key: ExtraKey = None
    ) -> int:
        """Release every other request and bind one, clamped to what can be had; it becomes the
        active step.

        Returns
        -------
        int
            Matched prefix length in tokens; 0 with prefix reuse off.

        Raises
        ------
        ValueError
            Not even the prompt fits; then nothing was released.
        """
        self._gate.enter()
        try:
            request = self._requests.bind_alone(
                prompt, total_capacity, extra_key, self._prefix_reuse
            )
            self._activate([request])
            return request.lease.matched_pages * self._page_size
        finally:
            self._gate.leave()

    def bind_requests(self, batch_size: int, capacity: int) -> list[int]:
        """Release every other request and bind `batch_size` without a prompt, clamped equally;
        they become active.

        Raises
        ------
        KVCacheExhaustedError
            Not one page each; then nothing was released.
        """
        self._gate.enter()
        try:
            for value, name in ((batch_size, "batch_size"), (capacity, "capacity")):
                if _count(value, name) == 0:
                    raise ValueError(f"{name} must be at least 1, got 0")
            requests = self._requests.bind_equal(batch_size, capacity, self._prefix_reuse)
            self._activate(requests)
            return [request.request_id for request in requests]
        finally:
            self._gate.leave()

    def would_fit(self, prompt: Any, total_capacity: int, *, extra_key: ExtraKey = None) -> bool:
        """Whether `bind_request` would succeed now; changes nothing, not even recency."""
        self._gate.enter()
        try:
            return self._requests.ledger.would_fit(
                prompt, total_capacity, extra_key, self._prefix_reuse
            )
        finally:
            self._gate.leave()

    def fork_request(self, request_id: int, total_capacity: int) -> int:
        """A second request over the same written tokens, for beam search and parallel sampling.

        Whole written pages are held by both, read-only from now on, and counted once; the partial
        page is copied. Namespace and priority are inherited. The first holder that finishes or
        checkpoints brings the shared pages into the tree.

        Returns
        -------
        int
            The new request's id.

        Raises
        ------
        KVCacheExhaustedError
            The private pages cannot be had now.
        ValueError
            `total_capacity` below what is written.
        """
        self._gate.enter()
        try:
            storage = self._open_storage()
            request = self._requests.get(request_id)
            child, copied = self._requests.fork(request, _count(total_capacity, "total_capacity"))
            if copied is not None:
                offsets = np.arange(self._page_size)
                source, target = (page * self._page_size + offsets for page in copied)
                storage.copy(self._device.to_device(source), self._device.to_device(target))
                # What the parent wrote past its valid length is not the child's.
                rest = target[self._requests.valid_len(child) % self._page_size :]
                storage.zero(self._device.to_device(rest))
            return child.request_id
        finally:
            self._gate.leave()

    # ---- while bound

    def extend_request(self, request_id: int, total_capacity: int) -> None:
        """Reserve more pages for a bound request, all or nothing; page ids and addresses of what
        is there stay.

        Raises
        ------
        KVCacheExhaustedError
            The pages cannot be had now.
        """
        self._gate.enter()
        try:
            self._requests.extend(
                self._requests.get(request_id), _count(total_capacity, "total_capacity")
            )
        finally:
            self._gate.leave()

    def shrink_request(self, request_id: int, total_capacity: int) -> None:
        """Give whole unused pages past `total_capacity` back; pages that were written to stay."""
        self._gate.enter()
        try:
            self._requests.shrink(
                self._requests.get(request_id), _count(total_capacity, "total_capacity")
            )
        finally:
            self._gate.leave()

    def mark_written(self, request_id: int, length: int) -> None:
        """Declare K and V of ``[0, length)`` present on every layer, for code that writes without
        `put`.

        Such code answers for the rest of the last page too. Only ever raises `valid_len`.

        Raises
        ------
        KVCacheExhaustedError
            `length` past the request's capacity.
        """
        self._gate.enter()
        try:
            self._requests.mark_written(self._requests.get(request_id), _count(length, "length"))
        finally:
            self._gate.leave()

    def checkpoint_request(self, request_id: int, tokens: Any) -> int:
        """Insert what is written so far and keep the request bound, so that others can share it at
        once.

        Page ids of the request do not change; its whole written pages become read-only.

        Parameters
        ----------
        request_id : int
            A bound request.
        tokens : sequence of int
            Its tokens from position 0; cut at `valid_len`.

        Returns
        -------
        int
            Tokens newly inserted.

        Raises
        ------
        ValueError
            Tokens that contradict those given at bind.
        """
        self._gate.enter()
        try:
            return self._requests.checkpoint(
                self._requests.get(request_id), tokens, self._prefix_reuse
            )
        finally:
            self._gate.leave()

    def finish_request(self, request_id: int, tokens: Any) -> int:
        """Insert the request's written whole pages into the tree, then unbind it.

        Parameters
        ----------
        request_id : int
            A bound request.
        tokens : sequence of int
            Prompt and generated tokens from position 0, no padding; may be shorter than what was
            written, and is cut at `valid_len`.

        Returns
        -------
        int
            Tokens newly inserted.

        Raises
        ------
        ValueError
            Tokens that contradict those given at bind; then nothing was changed.
        """
        self._gate.enter()
        try:
            return self._requests.finish(
                self._requests.get(request_id), tokens, self._prefix_reuse
            )
        finally:
            self._gate.leave()

    def finish_active(self, tokens: Any) -> int:
        """`finish_request` of the only bound request, else of the only active one.

        Raises
        ------
        KVCacheStateError
            Several requests are bound, and not exactly one is active.
        """
        self._gate.enter()
        try:
            candidates = list(self._requests) if len(self._requests) == 1 else self._live_rows()
            if len(candidates) != 1:
                raise KVCacheStateError(
                    f"{len(self._requests)} requests are bound and {len(candidates)} active, "
                    "expected one of either: "
                    "name it with finish_request"
                )
            return self._requests.finish(candidates[0], tokens, self._prefix_reuse)
        finally:
            self._gate.leave()

    def unbind_request(self, request_id: int) -> None:
        """Give the request's private pages back at once; nothing is inserted."""
        self._gate.enter()
        try:
            self._requests.unbind(self._requests.get(request_id))
        finally:
            self._gate.leave()

    def unbind_requests(self) -> None:
        """Unbind every request."""
        self._gate.enter()
        try:
            self._requests.unbind_all()
        finally:
            self._gate.leave()

    # ---- looking at requests

    def is_bound(self, request_id: int) -> bool:
        """Whether the id is bound now."""
        return request_id in self._requests

    def matched_prefix_len(self, request_id: int) -> int:
        """Tokens found in the cache at bind, 0 for an unknown id."""
        if request_id not in self._requests:
            return 0
        return self._requests.get(request_id).lease.matched_pages * self._page_size

    def valid_len(self, request_id: int) -> int:
        """Leading tokens written on every layer and not taken back."""
        return self._requests.valid_len(self._requests.get(request_id))

    def request(self, request_id: int) -> RequestInfo:
        """What is known of a bound request, a copy."""
        return self._requests.info(self._requests.get(request_id))

    @property
    def bound_request_count(self) -> int:
        """Requests bound now."""
        return len(self._requests)

    @property
    def request_capacity(self) -> int:
        """The smallest capacity of the active rows in tokens, 0 if none."""
        return min((self._requests.capacity(request) for request in self._live_rows()), default=0)

    # ---- steps

    def activate_step(self, *request_ids: int) -> Step:
        """Make these requests, in this order, the rows of the step.

        Earlier steps stay usable while all of their requests are bound.

        Raises
        ------
        UnknownRequestError
            An id that is not bound.
        ValueError
            No ids, or one twice.
        """
        self._gate.enter()
        try:
            if not request_ids:
                raise ValueError("activate_step expects at least one request id, got none")
            if len(set(request_ids)) < len(request_ids):
                raise ValueError(
                    f"activate_step expects each request once, got {list(request_ids)}"
                )
            self._activate([self._requests.get(request_id) for request_id in request_ids])
            return self._make_step()
        finally:
            self._gate.leave()

    @property
    def step(self) -> Step:
        """The latest active step.

        Raises
        ------
        KVCacheStateError
            There is none, or one of its requests has ended.
        """
        self._gate.enter()
        try:
            if not self._live_rows():
                raise KVCacheStateError("no step is active: bind a request and call activate_step")
            return self._make_step()
        finally:
            self._gate.leave()

    def _activate(self, requests: list[Request]) -> None:
        self._active = requests
        self._step = None

    def _live_rows(self) -> list[Request]:
        return self._active if all(request.lease.live for request in self._active) else []

    def _make_step(self) -> Step:
        if self._step is None:
            self._step = Step(
                self._requests,
                self._open_storage(),
                self._active,
                self._gate,
                self._zero_rejected_kv,
            )
        return self._step

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

    # ---- looking after it

    def page_owner(self, page: int) -> str:
        """The owner of a page in words: free, a request, the tree, taken or scratch. May walk."""
        self._gate.enter()
        try:
            return self._requests.page_owner(_count(page, "page"))
        finally:
            self._gate.leave()

    def check(self) -> None:
        """Verify ledger, tree and locks, O(pages).

        Raises
        ------
        KVCacheStateError
            Naming the page and its claimants, or the node whose locks do not add up.
        """
        self._gate.enter()
        try:
            self._requests.check()
        finally:
            self._gate.leave()

    def stats(self) -> dict[str, int]:
        """Counters and gauges as a plain dict; may be read from another thread."""
        if self._gate.closed:
            raise KVCacheStateError("the pool is closed")
        ledger = self._requests.ledger
        return {
            "pages_total": self.num_pages,
            "pages_free": self._requests.free_pages,
            "pages_private": ledger.private_pages,
            "pages_tree": ledger.tree.total_size // self._page_size,
            "pages_evictable": ledger.evictable_pages,
            "pages_taken": ledger.allocator.num_taken,
            "requests_bound": len(self._requests),
            "prefix_prompt_tokens": self._requests.prefix_prompt_tokens,
            "prefix_match_tokens": self._requests.prefix_match_tokens,
            "prefix_insert_tokens": self._requests.prefix_insert_tokens,
            "evicted_pages": ledger.tree.evicted_pages,
            "bind_failures": self._requests.bind_failures,
        }

    def _open_storage(self) -> KVStorage:
        if self._storage is None:
            raise KVCacheStateError("the pool is closed")
        return self._storage


def _count(value: int, name: str) -> int:
    """A non-negative int, else TypeError or ValueError."""
    if type(value) is not int:
        if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
            raise TypeError(f"{name} must be an int, got {type(value).__name__}")
    if value < 0:
        raise ValueError(f"{name} must be >= 0, got {value}")
    return int(value)


def _check_sizes(num_slots: int, page_size: int) -> None:
    for value, name in ((num_slots, "num_slots"), (page_size, "page_size")):
        if _count(value, name) == 0:
            raise ValueError(f"{name} must be at least 1, got 0")
    if num_slots % page_size:
        raise ValueError(f"num_slots must be a multiple of page_size {page_size}, got {num_slots}")


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
