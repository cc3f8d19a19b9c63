"""The one door for model code: attention over the pages of a pool.

It chooses a backend and computes nothing: FlashInfer on a GPU where it is installed and has
kernels for the shape, else plain array code; numba on a CPU. Model code has no branch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kvpool.device import is_torch
from kvpool.dtypes import FLOAT_DTYPES, dtype_name
from kvpool.errors import KVCacheStateError
from kvpool.kernels import attention_for_device
from kvpool.numbers import INT32_MAX, whole_number
from kvpool.page_table import PageTable

if TYPE_CHECKING:
    from kvpool.interop.plans import AttentionPlan
    from kvpool.poison.reading import CheckedPlan
    from kvpool.pool import KVCachePool


class PagedAttention:
    """Attention of one step: what is the same for all layers, checked and planned once.

    It may be held over many steps of a table that changes in place: the table of a graph's bucket,
    or a step's after `seal_length`. Where work is captured in a graph, `plan` before the capture,
    and after each `prepare` before the replay.

    Parameters
    ----------
    pool : KVCachePool
        Whose K and V are read, in place.
    table : PageTable
        The step's page table; lengths include this step's own tokens.
    qo_indptr : sequence of int, optional
        Host integers ``[batch + 1]``, CSR of each row's queries. Default: one query a row.
    causal : bool
        Mask bottom-right aligned: the last query of a row sees all of its positions.
    scale : float, optional
        Softmax scale, default ``head_dim ** -0.5``.
    """

    def __init__(
        self,
        pool: KVCachePool,
        table: PageTable,
        *,
        qo_indptr: Any = None,
        causal: bool = True,
        scale: float | None = None,
    ) -> None:
        self._pool = pool
        self._table = table
        self._causal = causal
        self._attend = attention_for_device(pool.device.kind)
        self._guard = pool.read_guard()
        self._scale = pool.head_dim**-0.5 if scale is None else float(scale)
        if table.page_size != pool.page_size:
            raise ValueError(
                f"the page table has page_size {table.page_size}, the pool {pool.page_size}"
            )
        if table.scratch_page > pool.num_pages:
            # A draft pool beside the main one: kernels do not check page ids.
            raise ValueError(
                f"the page table is of a pool of {table.scratch_page} pages, this one has "
                f"{pool.num_pages}: make a table by a step of the pool that is read"
            )
        one_each = np.arange(table.batch_size + 1, dtype=np.int32)
        self._qo_indptr = one_each if qo_indptr is None else _csr(qo_indptr, table.batch_size)
        # A graph keeps the kernel that it was captured with; elsewhere one query a row is decode.
        self._is_decode = qo_indptr is None or (
            not table.is_fixed and np.array_equal(self._qo_indptr, one_each)
        )
        self._num_queries = int(self._qo_indptr[-1])
        # What `q` was at the last plan; a `q` that is the same needs no look.
        self._shape: tuple[int, ...] | None = None
        self._dtype: Any = None
        self._flashinfer: AttentionPlan | CheckedPlan | None = None
        self._check_lengths()

    @property
    def backend(self) -> str | None:
        """Who attends: ``"flashinfer"``, ``"dense"`` or ``"numba"``; None before a first plan."""
        if self._pool.device.kind == "cpu":
            return "numba"
        if self._shape is None:
            return None
        return "dense" if self._flashinfer is None else "flashinfer"

    def plan(self, num_q_heads: int | None = None, q_dtype: Any = None) -> None:
        """Prepare for the present content of the table; costs little if that is prepared for.

        `run` does the same when it has to, but cannot in a graph capture.

        Parameters
        ----------
        num_q_heads : int, optional
            Query heads; default those of the last plan.
        q_dtype : str or dtype, optional
            Dtype of the queries; default that of the last plan.

        Raises
        ------
        ValueError
            The first plan names no heads or no dtype; the heads are no multiple of the KV heads;
            a row has more queries than positions.
        KVCacheStateError
            A plan is due, and the stream is in graph capture.
        """
        pool = self._pool
        heads = num_q_heads if num_q_heads is not None or not self._shape else self._shape[1]
        dtype = self._dtype if q_dtype is None else q_dtype
        if heads is None or dtype is None:
            raise ValueError("the first plan needs num_q_heads and q_dtype")
        heads = whole_number(heads, "num_q_heads", 0, INT32_MAX)
        if heads == 0 or heads % pool.num_kv_heads:
            raise ValueError(f"q has {heads} heads, no multiple of {pool.num_kv_heads} KV heads")
        if self._version != self._table.version:
            self._check_lengths()
        workspace = pool.flashinfer_workspace
        found: AttentionPlan | CheckedPlan | None = None
        if workspace is not None and workspace.unsupported(heads, dtype) is None:
            found = workspace.plan(
                self._table,
                num_q_heads=heads,
                q_dtype=dtype,
                qo_indptr=None if self._is_decode else self._qo_indptr,
                causal=self._causal,
                scale=self._scale,
            )
            if self._guard is not None:
                found = self._guard.around(found, self._table)
        self._flashinfer = found
        self._shape, self._dtype = (self._num_queries, heads, pool.head_dim), dtype

    def run(self, layer: int, q: Any, out: Any = None) -> Any:
        """Attention of one layer.

        Parameters
        ----------
        layer : int
            Layer index.
        q : array or torch.Tensor
            ``[nnz, num_q_heads, head_dim]`` on the pool's device, float; `num_q_heads` a multiple
            of the KV heads.
        out : array or torch.Tensor, optional
            Where to write, shape and dtype of `q`.

        Returns
        -------
        array or torch.Tensor
            `out`, or else ``[nnz, num_q_heads, head_dim]`` in the dtype of `q`: a tensor for a
            tensor, an array of the pool's device for anything else.
        """
        if self._pool.closed:
            raise KVCacheStateError("the pool is closed")
        if not is_torch(q):
            q = self._pool.device.float_array(q, "q")
        if q.dtype is not self._dtype or q.shape != self._shape:
            self._admit(q)
        elif self._version != self._table.version:
            self.plan()
        if self._flashinfer is not None:
            return self._flashinfer.run(layer, q, out)
        return self._run_arrays(layer, q, out)

    def _admit(self, q: Any) -> None:
        """Plan for queries of another kind than the last ones."""
        head_dim = self._pool.head_dim
        if q.ndim != 3 or q.shape[0] != self._num_queries or q.shape[2] != head_dim:
            expected = f"[{self._num_queries}, num_q_heads, {head_dim}]"
            raise ValueError(f"Invalid shape of q: expected {expected}, got {list(q.shape)}")
        if dtype_name(q.dtype) not in FLOAT_DTYPES:
            # `put` rounds float64 to the pool's dtype; there is no such dtype for a result.
            expected = ", ".join(FLOAT_DTYPES)
            raise TypeError(f"Invalid dtype of q: expected {expected}, got {dtype_name(q.dtype)}")
        self.plan(q.shape[1], q.dtype)

    def _run_arrays(self, layer: int, q: Any, out: Any) -> Any:
        pool, table = self._pool, self._table
        device = pool.device
        if device.kind == "cuda" and device.is_capturing():  # type: ignore[attr-defined]
            raise KVCacheStateError(
                f"{self._shape} queries of {dtype_name(q.dtype)} are attended by plain array "
                "code, which cannot be captured in a graph: install FlashInfer "
                "(kvpool[flashinfer]), or see FlashInferWorkspace.unsupported for what it lacks"
            )
        queries = device.float_array(q, "q")
        if out is None:
            out = q.new_empty(q.shape) if is_torch(q) else device.empty(q.shape, q.dtype)
        target = device.asarray(out, "out")
        if target.shape != queries.shape or target.dtype != queries.dtype:
            raise ValueError(
                f"Invalid out: expected {list(queries.shape)} of {queries.dtype}, got "
                f"{list(target.shape)} of {target.dtype}"
            )
        k_cache, v_cache = pool.layer_with_scratch(layer)
        if self._guard is not None:
            self._guard.check_table(layer, table)
        k_scale, v_scale = pool.layer_scales(layer)
        self._attend(
            queries,
            k_cache,
            v_cache,
            table.indptr_host,
            table.indices,
            table.lengths_host,
            table.page_size,
            self._qo_indptr,
            self._causal,
            self._scale,
            target,
            fp8_format=pool.fp8_format,
            k_scale=k_scale,
            v_scale=v_scale,
        )
        return out

    def _check_lengths(self) -> None:
        """ValueError if a row has more queries than positions; padding rows have none."""
        table = self._table
        queries, lengths = np.diff(self._qo_indptr), table.lengths_host
        over = queries > lengths
        if table.is_fixed:
            over &= lengths > 0
        if self._causal and over.any():
            row = int(np.argmax(over))
            raise ValueError(
                f"row {row} has {queries[row]} queries over {lengths[row]} positions: the lengths "
                "of a page table include the queries' own tokens"
            )
        self._version = table.version


def paged_attention(
    q: Any,
    pool: KVCachePool,
    layer: int,
    table: PageTable,
    *,
    qo_indptr: Any = None,
    causal: bool = True,
    scale: float | None = None,
    out: Any = None,
) -> Any:
    """Attention of `q` over the pages that `table` lists, read in place.

    `PagedAttention` takes the same arguments, and is to be held where one step serves many layers.
    FlashInfer plans once a step with either.

    Parameters
    ----------
    q : array or torch.Tensor
        ``[nnz, num_q_heads, head_dim]``; without `qo_indptr` one query per row.
    pool : KVCachePool
        Whose K and V are read.
    layer : int
        Layer index.
    table : PageTable
        Page table; lengths include the queries' own positions.
    qo_indptr, causal, scale
        See `PagedAttention`.
    out : array or torch.Tensor, optional
        Where to write, shape and dtype of `q`.

    Returns
    -------
    array or torch.Tensor
        ``[nnz, num_q_heads, head_dim]`` in the dtype of `q`; a tensor for a tensor.
    """
    attention = PagedAttention(pool, table, qo_indptr=qo_indptr, causal=causal, scale=scale)
    return attention.run(layer, q, out)


def _csr(qo_indptr: Any, batch_size: int) -> NDArray[np.int32]:
    given = np.asarray(qo_indptr)
    if given.dtype.kind not in "iu":
        if given.dtype != object:
            raise TypeError(f"qo_indptr must be integers, got dtype {given.dtype}")
        raise ValueError(f"qo_indptr must fit int32 (0 .. {INT32_MAX}), got {qo_indptr}")
    if given.size and not 0 <= int(given.min()) <= int(given.max()) <= INT32_MAX:
        raise ValueError(f"qo_indptr must be in 0 .. {INT32_MAX}, got {given.tolist()}")
    found = np.ascontiguousarray(given, dtype=np.int32)
    if found.shape != (batch_size + 1,) or found[0] != 0 or (np.diff(found) < 0).any():
        raise ValueError(
            f"qo_indptr must be [batch + 1] = [{batch_size + 1}], start at 0 and not decrease, "
            f"got {found.tolist()}"
        )
    return found
