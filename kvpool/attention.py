"""The one door for model code: attention over the pages of a pool.

It chooses a backend and computes nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kvpool.kernels import attention_for_device
from kvpool.page_table import PageTable

if TYPE_CHECKING:
    from kvpool.pool import KVCachePool


class PagedAttention:
    """Attention of one step: what is the same for all layers, checked once.

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
        self._scale = pool.head_dim**-0.5 if scale is None else float(scale)
        if table.page_size != pool.page_size:
            raise ValueError(
                f"the page table has page_size {table.page_size}, the pool {pool.page_size}"
            )
        batch_size = table.batch_size
        if qo_indptr is None:
            self._qo_indptr = np.arange(batch_size + 1, dtype=np.int32)
        else:
            self._qo_indptr = np.ascontiguousarray(qo_indptr, dtype=np.int32)
        found = self._qo_indptr
        if found.shape != (batch_size + 1,) or found[0] != 0 or (np.diff(found) < 0).any():
            raise ValueError(
                f"qo_indptr must be [batch + 1] = [{batch_size + 1}], start at 0 and not "
                f"decrease, got {found.tolist()}"
            )
        queries = np.diff(found)
        if causal and (queries > table.lengths_host).any():
            row = int(np.argmax(queries > table.lengths_host))
            raise ValueError(
                f"row {row} has {queries[row]} queries over {table.lengths_host[row]} positions: "
                "the lengths of a page table include the queries' own tokens"
            )

    def run(self, layer: int, q: Any, out: NDArray[Any] | None = None) -> NDArray[Any]:
        """Attention of one layer.

        Parameters
        ----------
        layer : int
            Layer index.
        q : array
            ``[nnz, num_q_heads, head_dim]`` on the pool's device, float; `num_q_heads` a multiple
            of the KV heads.
        out : array, optional
            Where to write, shape and dtype of `q`.

        Returns
        -------
        array
            ``[nnz, num_q_heads, head_dim]`` in the dtype of `q`.
        """
        pool, table = self._pool, self._table
        q = pool.device.float_array(q, "q")
        num_queries = int(self._qo_indptr[-1])
        if q.ndim != 3 or q.shape[0] != num_queries or q.shape[2] != pool.head_dim:
            expected = f"[{num_queries}, num_q_heads, {pool.head_dim}]"
            raise ValueError(f"Invalid shape of q: expected {expected}, got {list(q.shape)}")
        if q.shape[1] == 0 or q.shape[1] % pool.num_kv_heads:
            raise ValueError(
                f"q has {q.shape[1]} heads, no multiple of {pool.num_kv_heads} KV heads"
            )
        if out is None:
            out = pool.device.empty(q.shape, q.dtype)
        else:
            out = pool.device.asarray(out, "out")
            if out.shape != q.shape or out.dtype != q.dtype:
                raise ValueError(
                    f"Invalid out: expected {list(q.shape)} of {q.dtype}, got {list(out.shape)} "
                    f"of {out.dtype}"
                )
        k_cache, v_cache = pool.layer_with_scratch(layer)
        k_scale, v_scale = pool.layer_scales(layer)
        self._attend(
            q,
            k_cache,
            v_cache,
            table.indptr_host,
            table.indices,
            table.lengths_host,
            table.page_size,
            self._qo_indptr,
            self._causal,
            self._scale,
            out,
            fp8_format=pool.fp8_format,
            k_scale=k_scale,
            v_scale=v_scale,
        )
        return out


def paged_attention(
    q: Any,
    pool: KVCachePool,
    layer: int,
    table: PageTable,
    *,
    qo_indptr: Any = None,
    causal: bool = True,
    scale: float | None = None,
    out: NDArray[Any] | None = None,
) -> NDArray[Any]:
    """Attention of `q` over the pages that `table` lists, read in place.

    `PagedAttention` takes the same arguments, and is to be held where one step serves many layers.

    Parameters
    ----------
    q : array
        ``[nnz, num_q_heads, head_dim]``; without `qo_indptr` one query per row.
    pool : KVCachePool
        Whose K and V are read.
    layer : int
        Layer index.
    table : PageTable
        Page table; lengths include the queries' own positions.
    qo_indptr, causal, scale
        See `PagedAttention`.
    out : array, optional
        Where to write, shape and dtype of `q`.

    Returns
    -------
    array
        ``[nnz, num_q_heads, head_dim]`` in the dtype of `q`.
    """
    return PagedAttention(pool, table, qo_indptr=qo_indptr, causal=causal, scale=scale).run(
        layer, q, out
    )
