"""A Llama, written once against an array namespace, over a kvpool step.

Activations lie features first, ``[features, num_tokens]``. For the few tokens of a decode step
``weights @ h`` then walks the weights the way they lie in memory, which a BLAS does a third faster
than ``h @ weights.T``; for a long prefill the two are equal.

The tokens of a step are flat: row ``i`` owns ``tokens[qo_indptr[i]:qo_indptr[i + 1]]``, so that
prefills of different lengths and decodes run together. ``nnz`` is the number of tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from examples.smollm2.weights import LayerWeights, LlamaWeights
from kvpool import KVCachePool
from kvpool.attention import paged_attention

Array = Any  # of the pool's array namespace


class Llama:
    """The forward pass.

    Parameters
    ----------
    weights : LlamaWeights
        Host arrays; they are moved to ``xp`` once.
    xp : module
        The array namespace of the pools that this model will run on
        (``pool.array_namespace``).
    """

    def __init__(self, weights: LlamaWeights, xp: Any = np) -> None:
        self.config = config = weights.config
        self._xp = xp
        self._embedding = xp.asarray(weights.embedding)
        tied = weights.output is weights.embedding
        self._output = self._embedding if tied else xp.asarray(weights.output)
        self._final_norm = xp.asarray(weights.final_norm)[:, None]
        self._layers = [
            LayerWeights(
                attn_norm=xp.asarray(layer.attn_norm)[:, None],
                qkv=xp.asarray(layer.qkv),
                attn_out=xp.asarray(layer.attn_out),
                ffn_norm=xp.asarray(layer.ffn_norm)[:, None],
                gate_up=xp.asarray(layer.gate_up),
                down=xp.asarray(layer.down),
            )
            for layer in weights.layers
        ]
        turns = rotary_turns(config.context_len, config.head_dim, config.rope_theta)
        self._turns = xp.asarray(turns)

    def forward(
        self,
        pool: KVCachePool,
        step: Any,
        tokens: Sequence[int] | np.ndarray,
        start_pos: Sequence[int] | np.ndarray,
        qo_indptr: Sequence[int] | np.ndarray,
        *,
        all_logits: bool = False,
        logits_of: Sequence[int] | np.ndarray | None = None,
    ) -> Array:
        """Run the new tokens of every row of a step; their K and V are in the pool afterwards.

        Parameters
        ----------
        pool : KVCachePool
            The pool of the step.
        step : Step
            The active step; K/V of ``[0, start_pos[i])`` of row ``i`` must be there.
        tokens : integers [nnz], host
            The new tokens of all rows.
        start_pos : integers [batch], host
            The position of each row's first new token.
        qo_indptr : integers [batch + 1], host
            Where each row's tokens begin and end.
        all_logits : bool
            Logits of every token instead of every row's last.
        logits_of : integers [n], host, optional
            Logits of these of ``tokens`` instead of every row's last.

        Returns
        -------
        array [batch, vocab_size]; [nnz, vocab_size] with ``all_logits``; [n, vocab_size]
            float32, on the pool's device.
        """
        xp, config = self._xp, self.config
        tokens, start_pos, qo_indptr = (np.asarray(a) for a in (tokens, start_pos, qo_indptr))
        seqlens = np.diff(qo_indptr)
        if len(start_pos) != len(seqlens) or qo_indptr[-1] != len(tokens):
            raise ValueError(
                f"expected qo_indptr over {len(start_pos)} rows and {len(tokens)} tokens, "
                f"got {len(seqlens)} rows and {qo_indptr[-1]} tokens"
            )
        lengths = start_pos + seqlens
        if lengths.max() > config.context_len:
            raise ValueError(
                f"expected at most {config.context_len} tokens a row, got {lengths.max()}"
            )

        # Once a step: where the rows lie, where the new tokens go, how far each is turned.
        table = step.page_table(lengths.tolist())
        slots = step.window_slot_indices(start_pos.tolist(), seqlens.tolist())
        positions = np.arange(len(tokens)) + np.repeat(start_pos - qo_indptr[:-1], seqlens)
        turns = self._turns[xp.asarray(positions)][:, None, :]

        h = xp.ascontiguousarray(self._embedding[xp.asarray(tokens)].T)
        for layer, weights in enumerate(self._layers):
            normed = rms_norm(xp, h, weights.attn_norm, config.rms_eps)
            q, k, v = self._heads(weights.qkv @ normed, turns)
            step.put(layer, start_pos, k, v, qo_indptr=qo_indptr, slots=slots)
            attended = paged_attention(q, pool, layer, table, qo_indptr=qo_indptr)
            h += weights.attn_out @ attended.reshape(len(tokens), -1).T
            h += feed_forward(xp, rms_norm(xp, h, weights.ffn_norm, config.rms_eps), weights)
        if not all_logits:
            lasts = qo_indptr[1:] - 1 if logits_of is None else np.asarray(logits_of)
            h = h[:, xp.asarray(lasts)]
        return (self._output @ rms_norm(xp, h, self._final_norm, config.rms_eps)).T

    def _heads(self, qkv: Array, turns: Array) -> tuple[Array, Array, Array]:
        """Return q ``[nnz, num_heads, head_dim]`` and k, v ``[nnz, num_kv_heads, head_dim]``."""
        config = self.config
        heads = self._xp.ascontiguousarray(qkv.T)
        heads = heads.reshape(len(heads), -1, config.head_dim)
        first_v = config.num_heads + config.num_kv_heads
        # Dimensions 2i and 2i + 1 are the pair that a position turns (GGUF's order, not Hugging
        # Face's halves), so they are one complex number, and turning it is one product.
        pairs = heads.view(np.complex64)[:, :first_v]
        pairs *= turns
        first_k = config.num_heads
        return heads[:, :first_k], heads[:, first_k:first_v], heads[:, first_v:]


def rotary_turns(num_positions: int, head_dim: int, theta: float) -> np.ndarray:
    """Return what turns each pair at each position, complex64 [num_positions, head_dim / 2]."""
    # float32 angles would be off by 1e-4 at position 2000.
    frequencies = theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    angles = np.arange(num_positions, dtype=np.float64)[:, None] * frequencies
    return (np.cos(angles) + 1j * np.sin(angles)).astype(np.complex64)


def rms_norm(xp: Any, h: Array, weight: Array, eps: float) -> Array:
    """Scale every column of ``h`` ([features, num_tokens]) to a mean square of 1."""
    scale = xp.sqrt(xp.mean(xp.square(h), axis=0) + eps)
    normed = h / scale
    normed *= weight
    return normed


def feed_forward(xp: Any, h: Array, weights: LayerWeights) -> Array:
    """SwiGLU: ``down @ (silu(gate @ h) * (up @ h))``, in place where NumPy would make copies."""
    gate_up = weights.gate_up @ h
    ffn_dim = len(gate_up) // 2
    gate, up = gate_up[:ffn_dim], gate_up[ffn_dim:]
    up *= gate
    # sigmoid(x) = (1 + tanh(x / 2)) / 2: unlike exp(-x) it cannot overflow.
    gate *= 0.5
    xp.tanh(gate, out=gate)
    gate += 1.0
    gate *= 0.5
    up *= gate
    return weights.down @ up
