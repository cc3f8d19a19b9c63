"""Which models a pool can serve, and the refusals of the others.

A page of the pool is found by the tokens up to its end, so K and V of a token may depend on these
tokens only, every layer must keep them, and all layers must have the same heads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvpool.dtypes import FLOAT_DTYPES, dtype_name
from kvpool.layout import KVCacheLayout

if TYPE_CHECKING:
    from kvpool.pool import KVCachePool

# Layers whose whole K and V a pool can keep. A sliding layer reads its window of them by the mask
# that transformers makes from `layer_types`.
KEPT_LAYERS = ("full_attention", "sliding_attention")
# Kinds of rotary positions that turn a key by the length of the sequence that it is computed in.
LENGTH_DEPENDENT_ROPES = ("dynamic", "longrope")


def check_model(model: Any, pool: KVCachePool) -> None:
    """ValueError where K and V of `model` are not what pages of `pool` can hold.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        A decoder.
    pool : KVCachePool
        On the device of the model.
    """
    config = model.config.get_text_config(decoder=True)
    _check_attention(config)
    if getattr(model, "training", False):
        _check_dropout(config)
    layout = KVCacheLayout.from_config(config)
    expected = (layout.num_layers, layout.num_kv_heads, layout.head_dim)
    got = (pool.num_layers, pool.num_kv_heads, pool.head_dim)
    if expected != got:
        raise ValueError(
            f"the model has (layers, KV heads, head_dim) {expected}, the pool {got}: make the "
            "pool by KVCacheLayout.from_config(model.config)"
        )
    if str(model.device) != str(pool.device):
        raise ValueError(f"the model is on {model.device}, the pool on {pool.device}")
    if dtype_name(model.dtype) not in FLOAT_DTYPES:
        raise ValueError(
            f"the model computes in {dtype_name(model.dtype)}, expected one of "
            f"{', '.join(FLOAT_DTYPES)}"
        )


def _check_attention(config: Any) -> None:
    name = type(config).__name__
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(f"{name}: an encoder-decoder has a cache of another kind; take a decoder")
    if not getattr(config, "is_causal", True) or getattr(
        config, "use_bidirectional_attention", None
    ):
        raise ValueError(
            f"{name}: with bidirectional attention K and V depend on tokens that come later, so "
            "a prefix cannot be reused"
        )
    if getattr(config, "kv_sharing_modes", None) or getattr(config, "num_kv_shared_layers", 0):
        raise ValueError(f"{name}: layers that share K and V have no layer of their own to keep")
    kinds = list(getattr(config, "layer_types", None) or ())
    if not kinds and getattr(config, "attention_chunk_size", None) is not None:
        kinds = ["chunked_attention"]
    others = sorted({kind for kind in kinds if kind not in KEPT_LAYERS})
    if others:
        raise ValueError(
            f"{name}: layers of {', '.join(others)} keep another state than K and V of each "
            f"token; expected layers of {' and '.join(KEPT_LAYERS)} only"
        )
    bad = sorted(_rope_kinds(config) & set(LENGTH_DEPENDENT_ROPES))
    if bad:
        raise ValueError(
            f"{name}: with {bad[0]!r} rotary positions K of a token depends on how long its "
            "sequence is, so a prefix cannot be reused"
        )


def _check_dropout(config: Any) -> None:
    rates = {
        name: value
        for name, value in config.to_dict().items()
        if "drop" in name and isinstance(value, float) and value > 0
    }
    if rates:
        raise ValueError(
            f"the model is in training mode, where {rates} makes K and V random: call model.eval()"
        )


def _rope_kinds(config: Any) -> set[str]:
    """Kinds of rotary positions that a config names, for all layers or by their type."""
    found = set()
    for name in ("rope_parameters", "rope_scaling"):
        given = getattr(config, name, None)
        if not isinstance(given, dict):
            continue
        for each in (given, *(value for value in given.values() if isinstance(value, dict))):
            kind = each.get("rope_type", each.get("type"))
            if isinstance(kind, str):
                found.add(kind)
    return found
