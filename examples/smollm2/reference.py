"""The same model in float64, whole sequences at once, without any cache.

Shares the weights with ``model.py`` and nothing else: its own rotary positions (real sines and
cosines), its own attention (a dense score matrix), its own order of the axes. Slow on purpose.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from examples.smollm2.weights import LlamaConfig, LlamaWeights


def dense_logits(weights: LlamaWeights, tokens: Sequence[int]) -> np.ndarray:
    """Return the logits of every position.

    Parameters
    ----------
    weights : LlamaWeights
        Host arrays.
    tokens : sequence of int
        One whole sequence.

    Returns
    -------
    float64 array [len(tokens), vocab_size]
    """
    config = weights.config
    h = weights.embedding[np.asarray(tokens)].astype(np.float64)
    for layer in weights.layers:
        h = h + _attention(config, _normed(h, layer.attn_norm, config), layer.qkv, layer.attn_out)
        gate, up = np.split(_linear(_normed(h, layer.ffn_norm, config), layer.gate_up), 2, axis=-1)
        h = h + _linear(gate / (1.0 + np.exp(-gate)) * up, layer.down)
    return _linear(_normed(h, weights.final_norm, config), weights.output)


def _linear(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    product: np.ndarray = x @ weight.astype(np.float64).T
    return product


def _normed(x: np.ndarray, weight: np.ndarray, config: LlamaConfig) -> np.ndarray:
    scale: np.ndarray = np.sqrt((x * x).mean(axis=-1, keepdims=True) + config.rms_eps)
    return x / scale * weight


def _rotated(x: np.ndarray, theta: float) -> np.ndarray:
    """Turn the pairs (2i, 2i + 1) of ``x`` ([num_heads, length, head_dim]) by their position."""
    _, length, head_dim = x.shape
    angle = np.outer(np.arange(length), theta ** (-np.arange(head_dim // 2) * 2.0 / head_dim))
    even, odd = x[..., 0::2], x[..., 1::2]
    turned = np.empty_like(x)
    turned[..., 0::2] = even * np.cos(angle) - odd * np.sin(angle)
    turned[..., 1::2] = even * np.sin(angle) + odd * np.cos(angle)
    return turned


def _attention(
    config: LlamaConfig, x: np.ndarray, qkv: np.ndarray, attn_out: np.ndarray
) -> np.ndarray:
    length = len(x)
    heads = _linear(x, qkv).reshape(length, -1, config.head_dim).transpose(1, 0, 2)
    q, k, v = np.split(heads, [config.num_heads, config.num_heads + config.num_kv_heads])
    shared_by = config.num_heads // config.num_kv_heads
    q = _rotated(q, config.rope_theta)
    k = np.repeat(_rotated(k, config.rope_theta), shared_by, axis=0)
    v = np.repeat(v, shared_by, axis=0)
    scores = q @ k.transpose(0, 2, 1) / np.sqrt(config.head_dim)
    scores[:, np.triu(np.ones((length, length), dtype=bool), 1)] = -np.inf
    probabilities = np.exp(scores - scores.max(axis=-1, keepdims=True))
    probabilities /= probabilities.sum(axis=-1, keepdims=True)
    return _linear((probabilities @ v).transpose(1, 0, 2).reshape(length, -1), attn_out)
