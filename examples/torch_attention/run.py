"""Requests served with a cache, against the same tokens computed without one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from examples.torch_attention.caches import PagedCache, no_cache, on_torch_stream
from examples.torch_attention.model import Attend, Decoder, ModelConfig
from kvpool import KVCachePool

# How far logits may be off, where their spread is about 1. float32 differs in the order of sums
# only; bfloat16 keeps 8 bits of each activation; e4m3 keeps 4 bits of each K and V.
TOLERANCES = {"float32": 1e-4, "bfloat16": 0.08, "float8_e4m3fn": 0.5}

CacheType = Callable[[KVCachePool, list[int], list[int], list[int]], Attend]


@dataclass
class Request:
    """A bound request: its tokens, and the logits of those that were computed."""

    request_id: int
    tokens: list[int]
    matched_len: int
    logits: list[Tensor] = field(default_factory=list)


class Comparison(NamedTuple):
    """What came out of one run."""

    pool_dtype: str
    cache: str
    reused: int  # prompt tokens found in the cache
    computed: int  # tokens whose logits were compared
    max_error: float
    tolerance: float


class Server:
    """A model, a pool, and steps of one or more requests."""

    def __init__(self, model: Decoder, pool: KVCachePool, cache_type: CacheType) -> None:
        self._model, self._pool, self._cache_type = model, pool, cache_type
        self._device = next(model.parameters()).device

    def bind(self, prompt: Sequence[int], num_new_tokens: int) -> Request:
        """Bind a prompt; what is cached of it will not be computed."""
        request_id = self._pool.bind_request(prompt, len(prompt) + num_new_tokens)
        return Request(request_id, [*prompt], self._pool.matched_prefix_len(request_id))

    def step(self, requests: Sequence[Request]) -> None:
        """Compute what is not there yet of each request, together, and give each a token."""
        request_ids = [request.request_id for request in requests]
        starts = [self._pool.valid_len(request_id) for request_id in request_ids]
        new_tokens = [
            request.tokens[start:] for request, start in zip(requests, starts, strict=True)
        ]
        seqlens = [len(tokens) for tokens in new_tokens]
        attend = self._cache_type(self._pool, request_ids, starts, seqlens)
        positions = [range(s, s + n) for s, n in zip(starts, seqlens, strict=True)]
        logits = self._model(self._flat(new_tokens), self._flat(positions), attend)
        for request, rows in zip(requests, logits.split(seqlens), strict=True):
            request.logits.append(rows)
            request.tokens.append(int(rows[-1].argmax()))

    def finish(self, requests: Sequence[Request]) -> None:
        """Unbind; whole pages of what was written stay cached."""
        for request in requests:
            self._pool.finish_request(request.request_id, request.tokens)

    def max_error(self, request: Request) -> float:
        """The largest difference of a request's logits from those of a computation without cache.

        The last token was sampled and never computed.
        """
        tokens = self._flat([request.tokens[:-1]])
        expected = self._model(tokens, torch.arange(len(tokens), device=self._device), no_cache)
        found = torch.cat(request.logits)
        return float((found - expected[request.matched_len :]).abs().max())

    def _flat(self, rows: Sequence[Sequence[int]]) -> Tensor:
        return torch.tensor([x for row in rows for x in row], device=self._device)


@torch.no_grad()
def compare(
    pool_dtype: str,
    cache_type: CacheType = PagedCache,
    device: str = "cpu",
    page_size: int = 16,
    num_new_tokens: int = 20,
) -> Comparison:
    """Serve one request, then two more over its cached prefix, and compare all their logits.

    Parameters
    ----------
    pool_dtype : str
        Of the pool, a key of `TOLERANCES`; the model of an FP8 pool computes in bfloat16.
    cache_type : CacheType
        `PagedCache` or `GatheredCache`.
    device : str
        Of model and pool.
    page_size : int
        Of the pool.
    num_new_tokens : int
        Tokens that each request gets; more than a page, so that decoding enters new pages.
    """
    config, is_fp8 = ModelConfig(), pool_dtype.startswith("float8")
    dtype = torch.bfloat16 if is_fp8 else getattr(torch, pool_dtype)
    model = Decoder(config).to(device, dtype)
    # K and V of this model stay below 7, which is 448 times this scale: e4m3's largest number.
    scale = 2.0**-6 if is_fp8 else 1.0
    generator = torch.Generator().manual_seed(1)
    prompt = torch.randint(config.vocab_size, (80,), generator=generator).tolist()
    with (
        on_torch_stream(torch.device(device)),
        KVCachePool(
            config.num_layers,
            256 * page_size,
            config.num_kv_heads,
            config.head_dim,
            page_size=page_size,
            device=device,
            dtype=pool_dtype,
            k_scale=scale,
            v_scale=scale,
        ) as pool,
    ):
        server = Server(model, pool, cache_type)
        first = server.bind(prompt, num_new_tokens)
        for _ in range(num_new_tokens):
            server.step([first])
        server.finish([first])
        # A follow-up turn, and another question after the same beginning: prefills of different
        # lengths in one step, then decodes.
        later = [
            server.bind([*first.tokens, 1, 2, 3], num_new_tokens),
            server.bind([*first.tokens[:40], 4, 5], num_new_tokens),
        ]
        for _ in range(num_new_tokens):
            server.step(later)
        server.finish(later)
        requests = [first, *later]
        return Comparison(
            pool_dtype,
            getattr(cache_type, "__name__", str(cache_type)),
            sum(request.matched_len for request in requests),
            sum(len(rows) for request in requests for rows in request.logits),
            max(server.max_error(request) for request in requests),
            TOLERANCES[pool_dtype],
        )
