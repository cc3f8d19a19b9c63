"""What FlashInfer was asked to plan, the wrapper that holds the plan, and how it is run."""

from __future__ import annotations

from inspect import signature
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvpool.interop.torch import Tensor, tensor_of
from kvpool.page_table import PageTable

if TYPE_CHECKING:
    from kvpool.interop.flashinfer import FlashInferWorkspace


class Problem(NamedTuple):
    """All that a plan depends on; two that are equal need one plan.

    Attributes
    ----------
    table, version : PageTable, int
        Together they name one content of the table.
    num_q_heads : int
        Query heads.
    q_dtype : str
        Dtype of the queries by its torch name.
    queries : bytes or None
        int32 ``qo_indptr`` as bytes; None is one query a row.
    causal : bool
        Whether a window of queries is masked.
    scale : float
        Softmax scale.
    """

    table: PageTable
    version: int
    num_q_heads: int
    q_dtype: str
    queries: bytes | None
    causal: bool
    scale: float

    @property
    def qo_indptr(self) -> NDArray[np.int32] | None:
        """CSR of the queries on the host, int32 ``[batch + 1]``, writable."""
        return None if self.queries is None else np.frombuffer(self.queries, np.int32).copy()

    @property
    def window_len(self) -> int | None:
        """Queries of every row, None where rows differ or have none."""
        if self.queries is None:
            return 1
        windows = np.diff(np.frombuffer(self.queries, np.int32))
        return int(windows[0]) if windows[0] and (windows == windows[0]).all() else None

    @property
    def num_queries(self) -> int:
        """Queries of all rows."""
        if self.queries is None:
            return self.table.batch_size
        return int(np.frombuffer(self.queries, np.int32)[-1])


class Shape(NamedTuple):
    """What a pool is to FlashInfer: the part of a plan that never changes."""

    num_kv_heads: int
    head_dim: int
    page_size: int
    kv_dtype: str


class PlannedWrapper:
    """A wrapper of FlashInfer with the plan that it holds.

    Parameters
    ----------
    torch : module
        torch.
    wrapper : BatchDecodeWithPagedKVCacheWrapper or BatchPrefillWithPagedKVCacheWrapper
        Made for this alone.
    table : PageTable, optional
        The fixed table whose device arrays the wrapper was given.
    """

    def __init__(self, torch: Any, wrapper: Any, table: PageTable | None = None) -> None:
        self._torch = torch
        self.wrapper = wrapper
        self.problem: Problem | None = None
        # The tensors that the wrapper holds keep the memory; these say whether it is still that
        # of the table.
        self._arrays = None if table is None else (table.indptr, table.indices)
        self._uploaded = torch.cuda.Event()
        # In a graph of verify windows, late releases plan for what every row has, not the worst.
        self._takes_window_len = table is not None and (
            "uniform_q_len" in signature(wrapper.plan).parameters
        )

    def serves(self, table: PageTable) -> bool:
        """Whether a fixed table still has the arrays that the wrapper was made over."""
        return self._arrays is None or (
            self._arrays[0] is table.indptr and self._arrays[1] is table.indices
        )

    def plan(self, problem: Problem, shape: Shape) -> None:
        """Plan for `problem`, on torch's current stream; FlashInfer forbids it in a capture."""
        torch = self._torch
        # The planner writes into one pinned buffer and uploads it without waiting. Written again
        # before the upload has run, it would give the previous step this step's plan.
        self._uploaded.synchronize()
        self.problem = None
        table = problem.table
        # On the host, where FlashInfer reads them without waiting for the device; their device
        # copies would make it wait. What a fixed table's indices have behind its rows is stale.
        indptr = tensor_of(table.indptr_host)
        last_page_len = tensor_of(table.last_page_len_host)
        indices = tensor_of(table.indices)[: int(table.indptr_host[-1])]
        # Both dtypes: that of q would else be float16, whatever the cache is.
        common: dict[str, Any] = {
            "num_qo_heads": problem.num_q_heads,
            "num_kv_heads": shape.num_kv_heads,
            "page_size": shape.page_size,
            "sm_scale": problem.scale,
            "q_data_type": getattr(torch, problem.q_dtype),
            "kv_data_type": getattr(torch, shape.kv_dtype),
        }
        qo_indptr = problem.qo_indptr
        if qo_indptr is None:
            self.wrapper.plan(
                indptr=indptr,
                indices=indices,
                last_page_len=last_page_len,
                head_dim=shape.head_dim,
                **common,
            )
        else:
            if self._takes_window_len:
                common["uniform_q_len"] = problem.window_len
            self.wrapper.plan(
                qo_indptr=tensor_of(qo_indptr),
                paged_kv_indptr=indptr,
                paged_kv_indices=indices,
                paged_kv_last_page_len=last_page_len,
                head_dim_qk=shape.head_dim,
                causal=problem.causal,
                # Else 0.6 looks for it in a Python loop over the rows.
                max_token_per_sequence=int(np.diff(qo_indptr).max(initial=0)),
                **common,
            )
        self._uploaded.record()
        self.problem = problem


class AttentionPlan:
    """One step, planned: `run` it once for each layer.

    If the table has changed in place, or the wrapper was planned for another step since, `run`
    plans again; in a capture it cannot, and says so.
    """

    __slots__ = ("_planned", "_problem", "_q_dtype", "_q_shape", "_workspace")

    def __init__(
        self, workspace: FlashInferWorkspace, planned: PlannedWrapper, problem: Problem
    ) -> None:
        self._workspace = workspace
        self._planned = planned
        # The wrapper's own, if it was planned before: then `run` need not compare.
        self._problem = planned.problem or problem
        self._q_shape = (problem.num_queries, problem.num_q_heads, workspace.shape.head_dim)
        self._q_dtype = getattr(workspace.torch, problem.q_dtype)

    @property
    def problem(self) -> Problem:
        """What it was planned for."""
        return self._problem

    def run(self, layer: int, q: Any, out: Any = None) -> Any:
        """Attention of one layer, on the pool's stream.

        Parameters
        ----------
        layer : int
            Layer index.
        q : torch.Tensor or CuPy array
            ``[nnz, num_q_heads, head_dim]`` on the pool's device, its last dimension contiguous.
        out : torch.Tensor or CuPy array, optional
            Where to write, contiguous, shape and dtype of `q`.

        Returns
        -------
        torch.Tensor or CuPy array
            `out`, or a new one of the kind of `q`.
        """
        workspace = self._workspace
        kv = workspace.tensors.paged_layer(layer)
        k_scale, v_scale = workspace.scales[layer]
        problem = self._problem
        if self._planned.problem is not problem or problem.table.version != problem.version:
            self._renew()
        with workspace.stream.joined():
            is_tensor = workspace.torch.is_tensor
            queries = q if is_tensor(q) else tensor_of(q)
            if out is None:
                out = (
                    queries.new_empty(self._q_shape)
                    if queries is q
                    else workspace.device.empty(q.shape, q.dtype)
                )
            target = out if is_tensor(out) else tensor_of(out)
            self._check(queries, "q")
            self._check(target, "out")
            if not target.is_contiguous():  # FlashInfer would write as if it were
                raise ValueError(f"out must be contiguous, got strides {target.stride()}")
            if self._q_shape[0]:
                self._planned.wrapper.run(
                    q=queries, paged_kv_cache=kv, k_scale=k_scale, v_scale=v_scale, out=target
                )
        return out

    def _renew(self) -> None:
        problem = self._problem
        self._problem = problem._replace(version=problem.table.version)
        self._planned = self._workspace.planned(self._problem)
        self._problem = self._planned.problem or self._problem

    def _check(self, tensor: Tensor, name: str) -> None:
        if tensor.shape != self._q_shape or tensor.dtype != self._q_dtype:
            raise ValueError(
                f"Invalid {name}: planned for {list(self._q_shape)} of {self._q_dtype}, got "
                f"{list(tensor.shape)} of {tensor.dtype}"
            )
        if tensor.get_device() != self._workspace.index:
            raise TypeError(
                f"{name} is on device {tensor.device}, the pool on cuda:{self._workspace.index}"
            )
        if tensor.stride(-1) != 1:
            raise ValueError(
                f"the last dimension of {name} must be contiguous, got strides {tensor.stride()}"
            )
