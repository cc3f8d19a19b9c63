"""Attention by FlashInfer over the pages of a CUDA pool: planned once a step, run once a layer.

One plan serves all layers, for K and V lie in the same pages on each of them. It is made from the
host copies of the page table, so nothing waits for the device, and it can never be made in a graph
capture. A graph is captured over a fixed table, planned before the capture, and planned again
before each replay: the plan lies in memory that the graph reads, so that a replay after a new plan
computes the new step.

Written for flashinfer-python 0.6.7 to 0.7; the two agree where keywords are used.
"""

from __future__ import annotations

import os
import warnings
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kvpool.dtypes import FP8_DTYPES, dtype_name
from kvpool.errors import KVCacheStateError
from kvpool.interop.plans import AttentionPlan, PlannedWrapper, Problem, Shape
from kvpool.interop.sizing import DEFAULT_WORKSPACE_BYTES, float_workspace_bytes
from kvpool.interop.streams import TorchStream, in_capture
from kvpool.interop.torch import Tensor, pool_tensors
from kvpool.interop.wrappers import eager_wrapper, fixed_wrapper, use_tensor_cores
from kvpool.page_table import PageTable

if TYPE_CHECKING:
    from kvpool.pool import KVCachePool

# Kernels for other sizes exist in some releases, and in none for all of decode, prefill and FP8.
HEAD_DIMS = (64, 128, 256)


def workspace_of(pool: KVCachePool) -> FlashInferWorkspace | None:
    """The workspace of a CUDA pool, made at the first call; None where FlashInfer is absent."""
    if pool.closed:
        raise KVCacheStateError("the pool is closed")
    guests = pool._guests
    if "flashinfer" not in guests:
        pool._gate.check()
        found = _import_guests()
        guests["flashinfer"] = None if found is None else FlashInferWorkspace(pool, *found)
    made: FlashInferWorkspace | None = guests["flashinfer"]
    return made


class FlashInferWorkspace:
    """What FlashInfer needs to attend over one pool: wrappers, and the memory that they share.

    `KVCachePool.flashinfer_workspace` makes it. Nothing is allocated before the first plan.
    """

    def __init__(self, pool: KVCachePool, torch: Any, flashinfer: Any) -> None:
        # Not the pool itself: it holds this, and would be collected late.
        self.device = pool.device
        self.index: int = pool.device.index  # type: ignore[attr-defined]
        self.tensors = pool_tensors(pool)
        self.scales = [
            tuple(None if scale == 1.0 else float(scale) for scale in pool.layer_scales(layer))
            for layer in range(pool.num_layers)
        ]
        self.shape = Shape(pool.num_kv_heads, pool.head_dim, pool.page_size, pool.dtype)
        self.torch, self._flashinfer = torch, flashinfer
        self.stream = TorchStream(torch, pool.device)
        properties = torch.cuda.get_device_properties(self.index)
        self._capability = (properties.major, properties.minor)
        self._num_sms: int = properties.multi_processor_count
        self._float_workspace: Tensor | None = None
        self._num_bytes = _given_bytes()
        self._backend = "fa2"
        self._use_tensor_cores: bool | None = None
        # By what is frozen in a wrapper: see `_key`.
        self._eager: dict[tuple[bool | None, int], PlannedWrapper] = {}
        self._fixed: dict[tuple[Any, ...], PlannedWrapper] = {}

    def configure(
        self,
        *,
        num_bytes: int | None = None,
        backend: str | None = None,
        use_tensor_cores: bool | None = None,
    ) -> None:
        """Change what all plans of this pool use; before the first one.

        Parameters
        ----------
        num_bytes : int, optional
            Size of the workspace that wrappers share; ``KVPOOL_FLASHINFER_WORKSPACE_BYTES`` is
            its default. If neither is given it is 128 MiB, or what a plan needs: many verify
            windows on many heads can need more. Then a new one is made, and the old one kept for
            the graphs that have its address, so plan the largest bucket first.
        backend : str, optional
            FlashInfer's kernels: ``"fa2"`` by default, the same on every GPU; ``"auto"`` lets it
            choose by device and dtype.
        use_tensor_cores : bool, optional
            For decode. By default `use_tensor_cores` decides.

        Raises
        ------
        KVCacheStateError
            Something was planned already.
        """
        if self._float_workspace is not None:
            raise KVCacheStateError("FlashInfer has planned for this pool: configure it before")
        if num_bytes is not None:
            self._num_bytes = num_bytes
        if backend is not None:
            self._backend = backend
        if use_tensor_cores is not None:
            self._use_tensor_cores = use_tensor_cores

    def unsupported(self, num_q_heads: int, q_dtype: Any) -> str | None:
        """Why FlashInfer cannot attend with such queries over this pool; None where it can."""
        name, shape = dtype_name(q_dtype), self.shape
        if name not in ("float16", "bfloat16"):
            return f"queries of {name}: it takes float16 and bfloat16"
        if shape.kv_dtype not in (name, *FP8_DTYPES):
            return f"queries of {name} over a cache of {shape.kv_dtype}"
        if shape.head_dim not in HEAD_DIMS:
            return f"head_dim {shape.head_dim}: it has kernels for {HEAD_DIMS}"
        if self._capability < (8, 0):
            return f"compute capability {self._capability}: it needs (8, 0)"
        if num_q_heads % shape.num_kv_heads:
            return f"{num_q_heads} query heads, no multiple of {shape.num_kv_heads} KV heads"
        return None

    def plan(
        self,
        table: PageTable,
        *,
        num_q_heads: int,
        q_dtype: Any,
        qo_indptr: NDArray[np.int32] | None = None,
        causal: bool = True,
        scale: float | None = None,
    ) -> AttentionPlan:
        """Plan one step, unless it was the last one planned; for all layers.

        Parameters
        ----------
        table : PageTable
            Of the step, or of a graph's bucket.
        num_q_heads : int
            Query heads.
        q_dtype : str or dtype
            Dtype of the queries and of the result.
        qo_indptr : ndarray, optional
            int32 ``[batch + 1]`` on the host, CSR of each row's queries: prefill and verify
            windows. Default: decode, one query a row.
        causal : bool
            Mask windows bottom-right aligned.
        scale : float, optional
            Softmax scale, default ``head_dim ** -0.5``.

        Raises
        ------
        KVCacheStateError
            A plan is due, and the stream is in graph capture.
        """
        problem = Problem(
            table,
            table.version,
            int(num_q_heads),
            dtype_name(q_dtype),
            None if qo_indptr is None else np.ascontiguousarray(qo_indptr, np.int32).tobytes(),
            bool(causal) and qo_indptr is not None,
            self.shape.head_dim**-0.5 if scale is None else float(scale),
        )
        return AttentionPlan(self, self.planned(problem), problem)

    def planned(self, problem: Problem) -> PlannedWrapper:
        """The wrapper for a problem, planned for it."""
        is_fixed, is_decode = problem.table.is_fixed, problem.queries is None
        tensor_cores = self._tensor_cores(problem) if is_decode else None
        wrappers: dict[Any, PlannedWrapper] = self._fixed if is_fixed else self._eager
        # A graph has its batch and its number of queries frozen, and late releases the window.
        key: tuple[Any, ...] = (tensor_cores, problem.num_q_heads)
        if is_fixed:
            key = (problem.table, *key, problem.num_queries, problem.window_len)
        found = wrappers.get(key)
        if found is not None and found.problem == problem:
            return found
        if in_capture(self.torch, self.device):
            raise KVCacheStateError(
                "attention would be planned while the stream is in graph capture: call "
                "PagedAttention.plan(num_q_heads, q_dtype) before it, and after each prepare"
            )
        with self.stream.joined():
            if found is None or not found.serves(problem.table):
                wrappers[key] = self._make(problem, bool(tensor_cores))
            else:
                found.plan(problem, self.shape)
        return wrappers[key]

    def _make(self, problem: Problem, tensor_cores: bool) -> PlannedWrapper:
        torch, table = self.torch, problem.table
        workspace = self._workspace(problem)
        arguments = (self._flashinfer, workspace, self._backend, problem, tensor_cores)
        if not table.is_fixed:
            made = PlannedWrapper(torch, eager_wrapper(*arguments))
            made.plan(problem, self.shape)
            return made
        made = PlannedWrapper(torch, fixed_wrapper(torch, *arguments), table)
        made.plan(problem, self.shape)
        # What FlashInfer loads, builds and uploads at a first run would be refused in a capture.
        shape = (problem.num_queries, problem.num_q_heads, self.shape.head_dim)
        dtype = getattr(torch, problem.q_dtype)
        q = torch.zeros(shape, dtype=dtype, device=workspace.device)
        made.wrapper.run(q=q, paged_kv_cache=self.tensors.paged_layer(0), out=torch.empty_like(q))
        return made

    def _tensor_cores(self, problem: Problem) -> bool:
        if self._use_tensor_cores is not None:
            return self._use_tensor_cores
        group = problem.num_q_heads // self.shape.num_kv_heads
        return use_tensor_cores(group, problem.table.is_fixed)

    def _workspace(self, problem: Problem) -> Tensor:
        """A float workspace for a problem. Shared: what is in it lives for one run of a layer."""
        num_bytes = self._num_bytes
        if num_bytes is None:
            needed = float_workspace_bytes(problem, self.shape, self._num_sms)
            num_bytes = max(DEFAULT_WORKSPACE_BYTES, needed)
        found = self._float_workspace
        if found is None or found.numel() < num_bytes:
            # Zeros, as FlashInfer's constructors ask for.
            torch = self.torch
            found = self._float_workspace = torch.zeros(
                num_bytes, dtype=torch.uint8, device=f"cuda:{self.index}"
            )
        return found


def _given_bytes() -> int | None:
    text = os.environ.get("KVPOOL_FLASHINFER_WORKSPACE_BYTES")
    if text is None:
        return None
    if not text.isdecimal() or int(text) == 0:
        raise ValueError(
            f"KVPOOL_FLASHINFER_WORKSPACE_BYTES must be a positive number of bytes, got {text!r}"
        )
    return int(text)


def _import_guests() -> tuple[Any, Any] | None:
    """Torch and FlashInfer, or None where one of them is not there or has no CUDA."""
    try:
        if find_spec("flashinfer") is None:
            return None
        import flashinfer
        import torch
    except (ImportError, ValueError) as error:
        # Installed and broken is not absent: the other attention is many times slower.
        warnings.warn(
            f"FlashInfer cannot be imported, so attention does without: {error}",
            RuntimeWarning,
            stacklevel=4,
        )
        return None
    return (torch, flashinfer) if torch.cuda.is_available() else None
