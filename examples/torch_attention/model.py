"""A small Llama in plain torch: RMSNorm, rotary positions, grouped attention, SwiGLU.

The tokens of a step are flat, ``[nnz, hidden_dim]``, whatever the rows are that they belong to.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""``attend(layer, q, k, v)``: q ``[nnz, num_heads, head_dim]``, k and v ``[nnz, num_kv_heads,
head_dim]`` of the new tokens; returns the shape of q."""


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of the model."""

    num_layers: int = 2
    num_heads: int = 8
    num_kv_heads: int = 2
    head_dim: int = 64
    hidden_dim: int = 128
    ffn_dim: int = 256
    vocab_size: int = 256


class DecoderLayer(nn.Module):
    """One layer."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.layer, self.head_dim = layer, config.head_dim
        self.num_heads, self.num_kv_heads = config.num_heads, config.num_kv_heads
        hidden, heads = config.hidden_dim, config.num_heads + 2 * config.num_kv_heads
        self.attn_norm, self.ffn_norm = nn.RMSNorm(hidden), nn.RMSNorm(hidden)
        self.qkv = nn.Linear(hidden, heads * config.head_dim, bias=False)
        self.attn_out = nn.Linear(config.num_heads * config.head_dim, hidden, bias=False)
        self.gate_up = nn.Linear(hidden, 2 * config.ffn_dim, bias=False)
        self.down = nn.Linear(config.ffn_dim, hidden, bias=False)

    def forward(self, h: Tensor, turns: Tensor, attend: Attend) -> Tensor:
        """``[nnz, hidden_dim]`` in and out."""
        heads = self.qkv(self.attn_norm(h)).unflatten(-1, (-1, self.head_dim))
        q, k, v = heads.split([self.num_heads, self.num_kv_heads, self.num_kv_heads], dim=1)
        attended = attend(self.layer, rotate(q, turns), rotate(k, turns), v)
        h = h + self.attn_out(attended.flatten(1))
        gate, up = self.gate_up(self.ffn_norm(h)).chunk(2, dim=-1)
        return h + self.down(F.silu(gate) * up)


class Decoder(nn.Module):
    """Token ids in, logits out; `seed` makes the weights, the same on every device."""

    def __init__(self, config: ModelConfig, seed: int = 0) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_dim)
        self.layers = nn.ModuleList(
            DecoderLayer(config, layer) for layer in range(config.num_layers)
        )
        self.norm = nn.RMSNorm(config.hidden_dim)
        generator = torch.Generator().manual_seed(seed)
        for weights in self.parameters():
            if weights.ndim == 2:  # so that every activation has a size of about 1
                nn.init.normal_(weights, std=weights.shape[1] ** -0.5, generator=generator)

    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Logits of every token.

        Parameters
        ----------
        tokens, positions : Tensor
            int64 ``[nnz]``, ids and their positions in their rows.
        attend : Attend
            Attention, with or without a cache.

        Returns
        -------
        Tensor
            float32 ``[nnz, vocab_size]``.
        """
        turns = rotary_turns(positions, self.config.head_dim)
        h = self.embedding(tokens)
        for layer in self.layers:
            h = layer(h, turns, attend)
        return (self.norm(h) @ self.embedding.weight.T).float()


def rotary_turns(positions: Tensor, head_dim: int, theta: float = 10000.0) -> Tensor:
    """Cosine and sine of each position's angles, float32 ``[2, nnz, 1, head_dim / 2]``."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=positions.device)
    angles = positions[:, None, None].float() * theta ** (-exponents / head_dim)
    return torch.stack([angles.cos(), angles.sin()])


def rotate(heads: Tensor, turns: Tensor) -> Tensor:
    """Turn the pairs (i, i + head_dim / 2) of every head by its position."""
    (cos, sin), (a, b) = turns, heads.float().chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1).to(heads.dtype)
