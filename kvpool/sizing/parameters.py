"""Parameters of a model, counted from its config, and how many of them one rank holds.

The count is exact for the families in `FAMILIES`, tested against published checkpoints; for any
other there is none, and the bytes of its weights have to be given.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from kvpool.sizing.config import whole_number
from kvpool.sizing.errors import SizingError


class Spread(Enum):
    """How tensor parallelism lays weights out."""

    SPLIT = "split"  # each rank has its share
    KV_HEADS = "kv heads"  # by KV heads, replicated where there are fewer than ranks
    WHOLE = "whole"  # on every rank


@dataclass(frozen=True)
class Part:
    """Weights of one kind over all layers.

    Attributes
    ----------
    name : str
        What they are.
    elements : int
        Parameters.
    spread : Spread
        How ranks hold them.
    """

    name: str
    elements: int
    spread: Spread


@dataclass(frozen=True)
class Family:
    """What a model type adds to embeddings, attention and a gated MLP; False: by the config's key.

    Attributes
    ----------
    qkv_bias : bool
        Biases of q, k and v whatever the config says; else by ``attention_bias``, then of o too.
    qk_norm : bool
        A norm of ``head_dim`` each for q and k.
    norms : int
        Norms of ``hidden_size`` in a layer.
    experts : str
        ``""`` none, ``"every layer"`` (Mixtral) or ``"some layers"`` (Qwen).
    """

    qkv_bias: bool = False
    qk_norm: bool = False
    norms: int = 2
    experts: str = ""


FAMILIES: dict[str, Family] = {
    "llama": Family(),
    "mistral": Family(),
    "phi3": Family(),
    "qwen2": Family(qkv_bias=True),
    "qwen3": Family(qk_norm=True),
    "gemma": Family(),
    "gemma2": Family(norms=4),
    "gemma3_text": Family(norms=4, qk_norm=True),
    "mixtral": Family(experts="every layer"),
    "qwen2_moe": Family(qkv_bias=True, experts="some layers"),
    "qwen3_moe": Family(qk_norm=True, experts="some layers"),
}


def count_parameters(config: Mapping[str, Any], *, tied: bool) -> list[Part] | None:
    """Parameters of the language model of a config, by kind; None for a family that is not known.

    Parameters
    ----------
    config : mapping
        The text part of a config.json.
    tied : bool
        Whether the output uses the input's embeddings.

    Raises
    ------
    SizingError
        A key that the family needs is missing or no positive integer.
    """
    family = FAMILIES.get(str(config.get("model_type")))
    if family is None:
        return None
    hidden = whole_number(config, "hidden_size")
    layers = whole_number(config, "num_hidden_layers")
    embeddings = whole_number(config, "vocab_size") * hidden
    parts = [Part("embeddings", embeddings, Spread.SPLIT)]
    if not tied:
        parts.append(Part("output", embeddings, Spread.SPLIT))
    parts += _attention(config, family, hidden, layers)
    parts.append(Part("norms", (family.norms * layers + 1) * hidden, Spread.WHOLE))
    parts += _feed_forward(config, family, hidden, layers)
    return [part for part in parts if part.elements]


def elements_of_rank(parts: list[Part], tp_size: int, num_kv_heads: int) -> int:
    """Parameters that one of `tp_size` ranks holds.

    Parameters
    ----------
    parts : list of Part
        From `count_parameters`.
    tp_size : int
        Ranks. A share that does not divide (a vocabulary, say) is rounded up.
    num_kv_heads : int
        KV heads of the whole model.
    """
    heads_of_rank = max(1, num_kv_heads // tp_size)
    total = 0
    for part in parts:
        if part.spread is Spread.SPLIT:
            total += -(-part.elements // tp_size)
        elif part.spread is Spread.KV_HEADS:
            total += part.elements * heads_of_rank // num_kv_heads
        else:
            total += part.elements
    return total


def check_division(config: Mapping[str, Any], tp_size: int) -> None:
    """SizingError unless query heads and MLP widths divide among the ranks."""
    for key in (
        "num_attention_heads",
        "n_head",
        "intermediate_size",
        "moe_intermediate_size",
        "shared_expert_intermediate_size",
    ):
        value = config.get(key)
        if isinstance(value, int) and value % tp_size:
            raise SizingError(f"{key} {value} does not divide among tp {tp_size} ranks")


def _attention(
    config: Mapping[str, Any], family: Family, hidden: int, layers: int
) -> Iterator[Part]:
    heads = whole_number(config, "num_attention_heads")
    head_dim = config.get("head_dim") or hidden // heads
    query = heads * head_dim
    key_value = (config.get("num_key_value_heads") or heads) * head_dim
    by_config = bool(config.get("attention_bias"))
    bias = (family.qkv_bias and config.get("qkv_bias", True)) or by_config
    yield Part("q", layers * (hidden + bias) * query, Spread.SPLIT)
    yield Part("k and v", 2 * layers * (hidden + bias) * key_value, Spread.KV_HEADS)
    yield Part("o", layers * query * hidden, Spread.SPLIT)
    yield Part("bias of o", layers * hidden * by_config, Spread.WHOLE)
    yield Part("norms of q and k", 2 * layers * head_dim * family.qk_norm, Spread.WHOLE)


def _feed_forward(
    config: Mapping[str, Any], family: Family, hidden: int, layers: int
) -> Iterator[Part]:
    sparse = _sparse_layers(config, family, layers)
    if dense := layers - sparse:
        width = whole_number(config, "intermediate_size")
        bias = bool(config.get("mlp_bias"))
        yield Part("MLP", dense * (3 * hidden + 2 * bias) * width, Spread.SPLIT)
        yield Part("bias of MLP", dense * hidden * bias, Spread.WHOLE)
    if sparse:
        mixtral = family.experts == "every layer"
        experts = _num_experts(config, mixtral)
        width = whole_number(config, "intermediate_size" if mixtral else "moe_intermediate_size")
        yield Part("routers", sparse * hidden * experts, Spread.WHOLE)
        yield Part("experts", sparse * experts * 3 * hidden * width, Spread.SPLIT)
    if sparse and config.get("model_type") == "qwen2_moe":
        shared = whole_number(config, "shared_expert_intermediate_size")
        yield Part("shared experts", sparse * 3 * hidden * shared, Spread.SPLIT)
        yield Part("gates of shared experts", sparse * hidden, Spread.WHOLE)


def _sparse_layers(config: Mapping[str, Any], family: Family, layers: int) -> int:
    if family.experts != "some layers":
        return layers if family.experts else 0
    step = whole_number({"decoder_sparse_step": 1, **config}, "decoder_sparse_step")
    given = config.get("mlp_only_layers") or []
    dense = {layer for layer in given if type(layer) is int and 0 <= layer < layers}
    return layers // step - sum((layer + 1) % step == 0 for layer in dense)


def _num_experts(config: Mapping[str, Any], mixtral: bool) -> int:
    # Qwen's files have the first key, and the second where a recent transformers wrote them.
    if config.get("num_experts") and not mixtral:
        return whole_number(config, "num_experts")
    return whole_number(config, "num_local_experts")
