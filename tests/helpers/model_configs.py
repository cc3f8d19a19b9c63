"""Small model configs of every family whose parameters are counted."""

from hypothesis import strategies as some

from kvpool.sizing.parameters import FAMILIES

LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "vocab_size": 100,
    "max_position_embeddings": 2048,
}


@some.composite
def configs(draw, tp_size=1, kind=None):
    """Small models of one family, or of any, with sizes that divide among `tp_size` ranks."""
    kv_heads = draw(some.sampled_from([1, 2, 4]))
    heads = kv_heads * tp_size * draw(some.integers(1, 3))
    head_dim = draw(some.sampled_from([8, 24]))
    layers = draw(some.integers(1, 5))
    width = some.integers(1, 4).map(lambda n: 8 * tp_size * n)
    kind = kind or draw(some.sampled_from(sorted(FAMILIES)))
    config = {
        "model_type": kind,
        "hidden_size": heads * draw(some.sampled_from([head_dim, 40])),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "vocab_size": tp_size * draw(some.integers(1, 100)),
        "intermediate_size": draw(width),
        "tie_word_embeddings": draw(some.booleans()),
        "moe_intermediate_size": draw(width),
        "shared_expert_intermediate_size": draw(width),
        "decoder_sparse_step": draw(some.integers(1, 3)),
        "mlp_only_layers": draw(some.lists(some.integers(0, layers - 1), max_size=2)),
    }
    config["num_local_experts" if kind == "mixtral" else "num_experts"] = draw(some.integers(1, 4))
    # Where the family's code reads these keys.
    if kind in ("llama", "qwen3", "qwen3_moe", "gemma", "gemma2", "gemma3_text"):
        config["attention_bias"] = draw(some.booleans())
    if kind == "llama":
        config["mlp_bias"] = draw(some.booleans())
    return config
