"""Well-known models by name, so that a question needs no file.

Each entry holds the keys of the model's published config.json that matter here, and none besides.
tests/test_sizing_parameters.py compares the parameters that they give with the published counts.
"""

from __future__ import annotations

from typing import Any


def _shape(
    model_type: str,
    hidden_size: int,
    intermediate_size: int,
    num_hidden_layers: int,
    num_attention_heads: int,
    num_key_value_heads: int,
    vocab_size: int,
    max_position_embeddings: int,
    **others: Any,
) -> dict[str, Any]:
    return {
        "model_type": model_type,
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "num_hidden_layers": num_hidden_layers,
        "num_attention_heads": num_attention_heads,
        "num_key_value_heads": num_key_value_heads,
        "vocab_size": vocab_size,
        "max_position_embeddings": max_position_embeddings,
        "torch_dtype": "bfloat16",
        "tie_word_embeddings": False,
    } | others


SHAPES: dict[str, dict[str, Any]] = {
    # meta-llama/Meta-Llama-3-8B and -70B; Llama-3.1 differs in its positions only.
    "llama-3-8b": _shape("llama", 4096, 14336, 32, 32, 8, 128256, 8192),
    "llama-3-70b": _shape("llama", 8192, 28672, 80, 64, 8, 128256, 8192),
    "llama-3.1-8b": _shape("llama", 4096, 14336, 32, 32, 8, 128256, 131072),
    "llama-3.1-70b": _shape("llama", 8192, 28672, 80, 64, 8, 128256, 131072),
    # meta-llama/Llama-3.2-1B and -3B
    "llama-3.2-1b": _shape(
        "llama", 2048, 8192, 16, 32, 8, 128256, 131072, head_dim=64, tie_word_embeddings=True
    ),
    "llama-3.2-3b": _shape(
        "llama", 3072, 8192, 28, 24, 8, 128256, 131072, head_dim=128, tie_word_embeddings=True
    ),
    # HuggingFaceTB/SmolLM2-135M
    "smollm2-135m": _shape("llama", 576, 1536, 30, 9, 3, 49152, 8192, tie_word_embeddings=True),
    # mistralai/Mistral-7B-v0.1 and -v0.3
    "mistral-7b-v0.1": _shape(
        "mistral", 4096, 14336, 32, 32, 8, 32000, 32768, sliding_window=4096
    ),
    "mistral-7b": _shape("mistral", 4096, 14336, 32, 32, 8, 32768, 32768, sliding_window=None),
    # mistralai/Mixtral-8x7B-v0.1
    "mixtral-8x7b": _shape(
        "mixtral", 4096, 14336, 32, 32, 8, 32000, 32768, num_local_experts=8, sliding_window=None
    ),
    # Qwen/Qwen2.5-7B
    "qwen2.5-7b": _shape(
        "qwen2", 3584, 18944, 28, 28, 4, 152064, 131072, use_sliding_window=False
    ),
    # Qwen/Qwen3-8B and Qwen/Qwen3-30B-A3B
    "qwen3-8b": _shape(
        "qwen3", 4096, 12288, 36, 32, 8, 151936, 40960, head_dim=128, use_sliding_window=False
    ),
    "qwen3-30b-a3b": _shape(
        "qwen3_moe",
        2048,
        6144,
        48,
        32,
        4,
        151936,
        40960,
        head_dim=128,
        moe_intermediate_size=768,
        num_experts=128,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        use_sliding_window=False,
    ),
    # google/gemma-2-9b: its config leaves the tied embeddings to the default of its class
    "gemma-2-9b": _shape(
        "gemma2",
        3584,
        14336,
        42,
        16,
        8,
        256000,
        8192,
        head_dim=256,
        sliding_window=4096,
        tie_word_embeddings=True,
    ),
    # google/gemma-3-1b-it
    "gemma-3-1b": _shape(
        "gemma3_text",
        1152,
        6912,
        26,
        4,
        1,
        262144,
        32768,
        head_dim=256,
        sliding_window=512,
        tie_word_embeddings=True,
    ),
}
