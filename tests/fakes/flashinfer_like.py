"""A stand-in for FlashInfer that checks what the real one checks, remembers, and computes.

It takes the keywords of both supported releases and refuses what breaks in either: a list for the
tuple of caches, K and V of different strides, a uint8 cache (which would be read as NVFP4), a page
table that is not int32, host arrays on the device and the other way round, a plan in a capture, a
batch that changes under a graph. The attention that it computes reads the wrapper's own buffers
when it runs, or when its graph is replayed: `State.captured` is what a capture took up.
"""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace

import numpy as np

from tests.fakes import cupy_like, torch_like
from tests.fakes.paged_reference import attend
from tests.fakes.torch_like import Tensor


class State:
    """What was done."""

    calls: list = []  # noqa: RUF012  (what, wrapper, arguments)
    captured: list = []  # noqa: RUF012  launches of the capture, to be replayed

    @classmethod
    def count(cls, what):
        """How often something was done."""
        return sum(1 for name, _, _ in cls.calls if name == what)


def replay():
    """Launch the captured graph: every kernel reads what its buffers hold now."""
    for launch in State.captured:
        launch()


def _on_host(tensor, length, name):
    assert isinstance(tensor, Tensor), f"{name} is no tensor"
    assert not tensor.is_cuda, f"{name} is on the device: plan would wait for it"
    assert repr(tensor.dtype) == "torch.int32", f"{name} is {tensor.dtype}"
    assert tensor.shape == (length,), f"{name} has shape {tensor.shape}, expected {length}"
    assert tensor.is_contiguous(), f"{name} is read as a raw pointer"


def _on_device(tensor, name):
    assert isinstance(tensor, Tensor), f"{name} is no tensor"
    assert tensor.is_cuda, f"{name} is on the host"
    assert repr(tensor.dtype) == "torch.int32", f"{name} is {tensor.dtype}"


class Wrapper:
    """What decode and prefill have in common."""

    def __init__(self, workspace, kv_layout, use_cuda_graph, backend, buffers):
        assert kv_layout == "NHD"
        assert workspace.is_cuda
        assert repr(workspace.dtype) == "torch.uint8"
        assert workspace.data_ptr() % 16 == 0
        assert not workspace.host.any(), "must be zeros for its first use"
        self.device, self.backend = workspace.device, backend
        self.graph = use_cuda_graph
        if use_cuda_graph:
            for name, buffer in buffers.items():
                if not isinstance(buffer, Tensor):
                    raise ValueError(f"{name} should be a torch.Tensor in cudagraph mode")
                _on_device(buffer, name)
            self.buffers = dict(buffers)
            self.batch = len(buffers["last_page_len"])
            if len(buffers["indptr"]) != self.batch + 1:
                raise ValueError("The size of paged_kv_indptr_buffer should be batch_size + 1")
        else:
            assert not any(buffers.values()), "buffers are for graphs"
            self.buffers = {}
        self.addresses = {name: t.data_ptr() for name, t in self.buffers.items()}
        self.floats = workspace
        self.ints = torch_like.empty(8 * 2**20, dtype=workspace.dtype, device=self.device)
        self.planned = None
        State.calls.append(("make", self, {"backend": backend, "graph": use_cuda_graph}))

    def reset_workspace_buffer(self, float_workspace_buffer, int_workspace_buffer):
        assert int_workspace_buffer.is_cuda
        self.floats, self.ints = float_workspace_buffer, int_workspace_buffer

    def _plan(self, tables, heads, kv_heads, dim, page_size, dtypes, **rest):
        captures = cupy_like.State.capturing or torch_like.current_stream_is_capturing()
        assert not captures, "plan cannot be used in Cuda Graph"
        batch = len(tables["last_page_len"])
        for name, tensor in tables.items():
            if name != "indices":
                _on_host(tensor, batch + (name != "last_page_len"), name)
        _on_device(tables["indices"], "indices")
        nnz = int(tables["indptr"].host[-1])
        assert len(tables["indices"]) == nnz, "indices behind the rows are stale"
        last, pages = tables["last_page_len"].host, np.diff(tables["indptr"].host)
        assert ((last >= 1) == (pages > 0)).all()
        assert (last <= page_size).all()
        q_dtype, kv_dtype = dtypes
        assert isinstance(q_dtype, torch_like.dtype), "q would be float16"
        assert isinstance(kv_dtype, torch_like.dtype), "kv would have the dtype of q"
        assert heads % kv_heads == 0
        if self.graph:
            if batch != self.batch:
                raise ValueError("The batch size should be fixed in cudagraph mode")
            if nnz > len(self.buffers["indices"]):
                raise ValueError("The size of indices should be at most the allocated buffer")
            for name, tensor in tables.items():
                self.buffers[name][: len(tensor)].copy_(tensor)
        else:
            # The host arrays may change later: the copies on the device are of now.
            self.buffers = {name: t.to(self.device) for name, t in tables.items()}
        self.planned = SimpleNamespace(
            lengths=np.where(pages > 0, (pages - 1) * page_size + last, 0),
            heads=heads,
            kv_heads=kv_heads,
            dim=dim,
            page_size=page_size,
            q_dtype=q_dtype,
            kv_dtype=kv_dtype,
            **rest,
        )
        State.calls.append(("plan", self, {"stream": torch_like.State.stream, **rest}))

    def run(self, q, paged_kv_cache, *, k_scale=None, v_scale=None, out=None):
        plan = self.planned
        assert plan is not None, "plan info is not initialized"
        if not isinstance(paged_kv_cache, tuple):
            raise KeyError(f"Unrecognized paged_kv_cache type {type(paged_kv_cache)}")
        k, v = paged_kv_cache
        for name, cache in (("k", k), ("v", v)):
            assert cache.ndim == 4, f"{name} is {cache.ndim}-dimensional"
            assert cache.shape[1:] == (plan.page_size, plan.kv_heads, plan.dim)
            assert repr(cache.dtype) != "torch.uint8", "read as NVFP4"
            if cache.dtype is not plan.kv_dtype:
                raise ValueError(f"{name} is {cache.dtype}, planned for {plan.kv_dtype}")
        assert k.stride() == v.stride(), "K/V strides differ"
        if q.dtype is not plan.q_dtype:
            raise ValueError(f"q is {q.dtype}, planned for {plan.q_dtype}")
        assert q.device == out.device == k.device == self.device
        assert q.shape == out.shape == (plan.qo_indptr[-1], plan.heads, plan.dim)
        assert q.dtype is out.dtype
        assert q.stride(-1) == 1
        assert out.is_contiguous(), "written as if it were"
        for scale in (k_scale, v_scale):
            assert scale is None or type(scale) is float, "a tensor would be read on the host"
            assert scale != 1.0, "one launch more for nothing"
        scales = {"k_scale": k_scale, "v_scale": v_scale}
        State.calls.append(("run", self, {"stream": torch_like.State.stream, **scales}))

        def launch():
            self._attend(q.numpy_float(), k, v, k_scale or 1.0, v_scale or 1.0, out)

        if torch_like.current_stream_is_capturing():
            assert self.graph, "captured without fixed buffers"
            State.captured.append(launch)
            return out
        launch()
        return out

    def _attend(self, q, k, v, k_scale, v_scale, out):
        for name, address in self.addresses.items():
            assert self.buffers[name].data_ptr() == address, f"{name} has moved under the graph"
        found = (self.buffers[name].host for name in ("indptr", "indices", "last_page_len"))
        attend(self.planned, *found, q, (k, k_scale), (v, v_scale), out)


class BatchDecodeWithPagedKVCacheWrapper(Wrapper):
    """One query a row. Buffers of a graph are called ``..._buffer`` here."""

    def __init__(
        self,
        *,
        float_workspace_buffer,
        kv_layout="NHD",
        use_cuda_graph=False,
        use_tensor_cores=False,
        paged_kv_indptr_buffer=None,
        paged_kv_indices_buffer=None,
        paged_kv_last_page_len_buffer=None,
        backend="auto",
    ):
        buffers = {
            "indptr": paged_kv_indptr_buffer,
            "indices": paged_kv_indices_buffer,
            "last_page_len": paged_kv_last_page_len_buffer,
        }
        super().__init__(float_workspace_buffer, kv_layout, use_cuda_graph, backend, buffers)
        self.use_tensor_cores = use_tensor_cores

    def plan(
        self,
        *,
        indptr,
        indices,
        last_page_len,
        num_qo_heads,
        num_kv_heads,
        head_dim,
        page_size,
        q_data_type="float16",
        kv_data_type=None,
        sm_scale=None,
    ):
        group = num_qo_heads // num_kv_heads
        if not self.use_tensor_cores and group not in (1, 2, 3, 4, 8):
            raise RuntimeError(f"Unsupported group_size: {group}")
        if self.graph and not self.use_tensor_cores:
            assert (np.diff(indptr.host) > 0).all(), "rows without pages are not counted"
        self._plan(
            {"indptr": indptr, "indices": indices, "last_page_len": last_page_len},
            num_qo_heads,
            num_kv_heads,
            head_dim,
            page_size,
            (q_data_type, kv_data_type),
            sm_scale=sm_scale,
            causal=False,
            qo_indptr=np.arange(len(last_page_len) + 1),
        )


class BatchPrefillWithPagedKVCacheWrapper(Wrapper):
    """Windows of queries. Buffers of a graph are called ``..._buf`` here."""

    def __init__(
        self,
        *,
        float_workspace_buffer,
        kv_layout="NHD",
        use_cuda_graph=False,
        qo_indptr_buf=None,
        paged_kv_indptr_buf=None,
        paged_kv_indices_buf=None,
        paged_kv_last_page_len_buf=None,
        backend="auto",
    ):
        buffers = {
            "qo_indptr": qo_indptr_buf,
            "indptr": paged_kv_indptr_buf,
            "indices": paged_kv_indices_buf,
            "last_page_len": paged_kv_last_page_len_buf,
        }
        super().__init__(float_workspace_buffer, kv_layout, use_cuda_graph, backend, buffers)
        self.max_rows = None

    def plan(
        self,
        *,
        qo_indptr,
        paged_kv_indptr,
        paged_kv_indices,
        paged_kv_last_page_len,
        num_qo_heads,
        num_kv_heads,
        head_dim_qk,
        page_size,
        causal=False,
        sm_scale=None,
        q_data_type="float16",
        kv_data_type=None,
        max_token_per_sequence=None,
    ):
        queries = np.diff(qo_indptr.host)
        assert max_token_per_sequence == queries.max()
        total = int(qo_indptr.host[-1])
        if self.graph:
            self.max_rows = total if self.max_rows is None else self.max_rows
            if total > self.max_rows:
                raise ValueError("The number of rows cannot exceed that of the first plan")
        self._plan(
            {
                "qo_indptr": qo_indptr,
                "indptr": paged_kv_indptr,
                "indices": paged_kv_indices,
                "last_page_len": paged_kv_last_page_len,
            },
            num_qo_heads,
            num_kv_heads,
            head_dim_qk,
            page_size,
            (q_data_type, kv_data_type),
            sm_scale=sm_scale,
            causal=causal,
            qo_indptr=qo_indptr.host.copy(),
        )


def install(monkeypatch):
    """Put it in FlashInfer's place for one test, and return it."""
    State.calls, State.captured = [], []
    made = ModuleType("flashinfer")
    made.__spec__ = ModuleSpec("flashinfer", None)
    for wrapper in (BatchDecodeWithPagedKVCacheWrapper, BatchPrefillWithPagedKVCacheWrapper):
        setattr(made, wrapper.__name__, wrapper)
    monkeypatch.setitem(sys.modules, "flashinfer", made)
    return made
