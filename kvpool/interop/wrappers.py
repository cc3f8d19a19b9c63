"""The wrappers of FlashInfer that a pool uses, and which kernel decodes."""

from __future__ import annotations

from typing import Any

from kvpool.interop.plans import Problem
from kvpool.interop.sizing import int_workspace_bytes
from kvpool.interop.torch import tensor_of

# Query heads per KV head that decode without tensor cores is compiled for, in every release.
CUDA_CORE_GROUPS = (1, 2, 3, 4, 8)


def use_tensor_cores(group: int, is_fixed: bool) -> bool:
    """Whether decode runs on tensor cores, by the prefill kernel with one query a row.

    Parameters
    ----------
    group : int
        Query heads per KV head. From 4 on the tensor cores win, for K and V are loaded once for
        all of them; for a group that the other kernel was not compiled for there is no choice.
    is_fixed : bool
        Whether the table is a graph's bucket, whose padding rows have no pages. The planner of the
        other kernel does not count these when it fits its chunks to the grid, but then plans one
        each (`scheduler.cuh`, PartitionPagedKVCacheBinarySearchMinNumPagePerBatch): the last
        blocks of a full grid are never launched, and padding rows would be garbage, NaN perhaps,
        which a model writes on to the scratch page. The prefill planner counts them.
    """
    return is_fixed or group >= 4 or group not in CUDA_CORE_GROUPS


def eager_wrapper(
    flashinfer: Any,
    workspace: Any,
    backend: str,
    problem: Problem,
    use_tensor_cores: bool,
) -> Any:
    """A wrapper that takes its page table anew with each plan."""
    if problem.queries is None:
        return flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            float_workspace_buffer=workspace,
            kv_layout="NHD",
            use_tensor_cores=use_tensor_cores,
            backend=backend,
        )
    return flashinfer.BatchPrefillWithPagedKVCacheWrapper(
        float_workspace_buffer=workspace, kv_layout="NHD", backend=backend
    )


def fixed_wrapper(
    torch: Any,
    flashinfer: Any,
    workspace: Any,
    backend: str,
    problem: Problem,
    use_tensor_cores: bool,
) -> Any:
    """A wrapper over the arrays of a fixed table, for capture: its batch size is frozen.

    A plan copies the host arrays over the table's own device arrays, which hold the same already.
    """
    table = problem.table
    indptr, indices, last_page_len = (
        tensor_of(array) for array in (table.indptr, table.indices, table.last_page_len)
    )
    if problem.queries is None:
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            float_workspace_buffer=workspace,
            kv_layout="NHD",
            use_cuda_graph=True,
            use_tensor_cores=use_tensor_cores,
            paged_kv_indptr_buffer=indptr,
            paged_kv_indices_buffer=indices,
            paged_kv_last_page_len_buffer=last_page_len,
            backend=backend,
        )
    else:
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
            float_workspace_buffer=workspace,
            kv_layout="NHD",
            use_cuda_graph=True,
            qo_indptr_buf=torch.zeros(
                table.batch_size + 1, dtype=torch.int32, device=workspace.device
            ),
            paged_kv_indptr_buf=indptr,
            paged_kv_indices_buf=indices,
            paged_kv_last_page_len_buf=last_page_len,
            backend=backend,
        )
    # Not shared: a graph reads its plan from it, whatever was planned for others since.
    ints = torch.empty(int_workspace_bytes(problem), dtype=torch.uint8, device=workspace.device)
    wrapper.reset_workspace_buffer(workspace, ints)
    return wrapper
