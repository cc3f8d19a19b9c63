"""Models whose cache is not K and V of equal heads in every layer: refused, with the reason.

A wrong number would look like any other. What is counted as an upper bound is said in a note.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from typing import Any

from kvpool.numbers import INT32_MAX, shown
from kvpool.sizing.config import Config

_ATTENTION = {"attention", "full_attention", "sliding_attention", "chunked_attention"}
_WINDOWED = {"sliding_attention", "chunked_attention"}

# Settings of layers that keep a state instead of K and V: Mamba, Jamba, Bamba, Zamba, Nemotron-H,
# Falcon-H1, Qwen3-Next, Kimi-Linear, MiniMax-Text, RecurrentGemma, LFM2, RWKV.
_STATE_KEYS = (
    "attn_layer_indices",
    "attn_layer_period",
    "attn_type_list",
    "block_types",
    "conv_L_cache",
    "hybrid_override_pattern",
    "linear_attn_config",
    "linear_num_key_heads",
    "lru_width",
    "mamba_d_state",
    "mamba_num_heads",
    "rwkv",
    "ssm_cfg",
    "ssm_state_size",
    "state_size",
)
_STATE_MODELS = ("mamba", "rwkv", "jamba", "xlstm", "retnet", "recurrent_gemma")

# Keys that make K and V differ between layers, or between each other; all refused where set.
_UNEQUAL = {
    "block_configs": "each layer has an attention of its own",
    "cross_attention_layers": "some layers attend to an image, whose K and V are not its tokens'",
    "num_kv_shared_layers": "some layers use the K and V of others",
    "num_global_key_value_heads": "layers differ in their KV heads",
    "swa_num_key_value_heads": "layers differ in their KV heads",
    "is_encoder_decoder": "a decoder also keeps K and V of the encoder's output",
}
# Keys that give a second head_dim.
_SECOND_HEAD_DIM = ("global_head_dim", "swa_head_dim", "v_head_dim")
# KV heads by names that `KVCacheLayout.from_config` does not read: it would count as many as query
# heads.
_OTHER_KV_HEADS = ("multi_query", "n_head_kv", "num_kv_heads", "kv_n_heads")
_INTEGERS = (
    "head_dim",
    "hidden_size",
    "max_position_embeddings",
    "multi_query_group_num",
    "n_embd",
    "n_head",
    "n_layer",
    "num_attention_heads",
    "num_hidden_layers",
    "num_key_value_heads",
    "num_layers",
)


def why_not_sizable(config: Config) -> str | None:
    """The reason why this cache cannot be sized as K and V of equal heads; None where it can.

    MLA (``kv_lora_rank``), sizes that do not divide and missing keys are
    `KVCacheLayout.from_config`'s to refuse.
    """
    text = config.text
    return (
        _keeps_a_state(text)
        or _has_unequal_heads(text, config.whole)
        or _has_other_kv_heads(text)
        or _is_no_integer(text)
    )


def windowed_layers(config: Config) -> str | None:
    """A note on layers that attend within a window, whose K and V are counted in full."""
    text = config.text
    kinds = _layer_kinds(text)
    windowed = sum(kind in _WINDOWED for kind in kinds)
    given = text.get("sliding_window") or text.get("attention_chunk_size")
    window = given if isinstance(given, int) else 0
    if kinds:
        which = f"{windowed} of {len(kinds)} layers attend" if windowed else None
    elif window and text.get("use_sliding_window", True):
        which = "layers attend"
    else:
        which = None
    longest = text.get("max_position_embeddings")
    if which is None or (window and longest and longest <= window):
        return None
    size = f"{window:,}" if window else "some"
    return (
        f"{which} within a window of {size} tokens: counted in full, as kvpool keeps them; an "
        "engine that drops what left the window needs less"
    )


def _layer_kinds(text: Mapping[str, Any]) -> list[str]:
    for key in ("layer_types", "layers_block_type"):
        kinds = text.get(key)
        if isinstance(kinds, list):
            return [str(kind) for kind in kinds]
    return []


def _keeps_a_state(text: Mapping[str, Any]) -> str | None:
    kinds = _layer_kinds(text)
    strange = sorted(set(kinds) - _ATTENTION)
    if strange:
        count = sum(kind not in _ATTENTION for kind in kinds)
        return (
            f"{count} of {len(kinds)} layers are {', '.join(strange)}: they keep a state of their "
            "own, not K and V of every token"
        )
    if kinds:
        return None  # all of them attend, whatever other settings the config carries
    model_type = str(text.get("model_type", ""))
    found = [key for key in _STATE_KEYS if text.get(key)]
    if found or model_type.startswith(_STATE_MODELS):
        sign = found[0] if found else f"model_type {model_type}"
        return (
            f"{sign} tells of layers that keep a state (Mamba, linear attention), not K and V of "
            "every token"
        )
    return None


def _has_unequal_heads(text: Mapping[str, Any], whole: Mapping[str, Any]) -> str | None:
    for key, reason in _UNEQUAL.items():
        if text.get(key) or whole.get(key):
            return f"{key}: {reason}"
    head_dim = text.get("head_dim")
    for key in _SECOND_HEAD_DIM:
        second = text.get(key)
        # With kv_lora_rank, v_head_dim is a part of MLA, which is refused by that name.
        if second and second != head_dim and not text.get("kv_lora_rank"):
            return f"{key} {second} beside head_dim {head_dim}: heads differ in their size"
    return None


def _has_other_kv_heads(text: Mapping[str, Any]) -> str | None:
    if text.get("num_key_value_heads") or text.get("multi_query_group_num"):
        return None
    for key in _OTHER_KV_HEADS:
        if text.get(key):
            return (
                f"{key} gives the KV heads, which are read from num_key_value_heads: add that key "
                "to the config"
            )
    return None


def _is_no_integer(text: Mapping[str, Any]) -> str | None:
    for key in _INTEGERS:
        value = text.get(key)
        if isinstance(value, list):
            return f"{key} is a list: layers differ in it"
        if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
            return f"{key} is {reprlib.repr(value)}, expected an integer"
        if value is not None and value < 1:
            return f"{key} is {shown(value)}, expected at least 1"
        if value is not None and value > INT32_MAX:
            return f"{key} is {shown(value)}, expected at most {INT32_MAX}"
    return None
