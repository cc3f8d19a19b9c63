"""The tensors of a checkpoint by name and shape, listed layer by layer as in its file."""

import math

# Which dimension of a tensor the ranks cut: rows of what spreads out, columns of what gathers.
CUT = {
    "embed_tokens.weight": 0,
    "lm_head.weight": 0,
    "q_proj.weight": 0,
    "q_proj.bias": 0,
    "o_proj.weight": 1,
    "gate_proj.weight": 0,
    "gate_proj.bias": 0,
    "up_proj.weight": 0,
    "up_proj.bias": 0,
    "down_proj.weight": 1,
}


def tensors(config):
    """Name -> shape of every tensor of a model whose config has all keys."""
    found = {"model.embed_tokens.weight": (config["vocab_size"], config["hidden_size"])}
    if not config.get("tie_word_embeddings"):
        found["lm_head.weight"] = (config["vocab_size"], config["hidden_size"])
    for layer in range(config["num_hidden_layers"]):
        for name, shape in layer_tensors(config, layer):
            found[f"model.layers.{layer}.{name}"] = shape
    found["model.norm.weight"] = (config["hidden_size"],)
    return found


def layer_tensors(config, layer):
    kind, hidden = config["model_type"], config["hidden_size"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim") or hidden // heads
    biases = {"q": False, "k": False, "v": False, "o": False}
    if config.get("attention_bias"):
        biases = dict.fromkeys(biases, True)
    if kind in ("qwen2", "qwen2_moe"):
        biases |= {"q": True, "k": True, "v": True}
    for name, rows in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
        yield f"self_attn.{name}_proj.weight", (rows * head_dim, hidden)
        if biases[name]:
            yield f"self_attn.{name}_proj.bias", (rows * head_dim,)
    yield "self_attn.o_proj.weight", (hidden, heads * head_dim)
    if biases["o"]:
        yield "self_attn.o_proj.bias", (hidden,)
    if kind in ("qwen3", "qwen3_moe", "gemma3_text"):
        yield "self_attn.q_norm.weight", (head_dim,)
        yield "self_attn.k_norm.weight", (head_dim,)
    norms = ["input_layernorm", "post_attention_layernorm"]
    if kind in ("gemma2", "gemma3_text"):
        norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
    for name in norms:
        yield f"{name}.weight", (hidden,)
    yield from mlp_tensors(config, layer)


def mlp_tensors(config, layer):
    kind, hidden = config["model_type"], config["hidden_size"]
    if kind == "mixtral":
        yield "block_sparse_moe.gate.weight", (config["num_local_experts"], hidden)
        for expert in range(config["num_local_experts"]):
            yield from gated(
                f"block_sparse_moe.experts.{expert}", hidden, config["intermediate_size"]
            )
        return
    is_sparse = kind in ("qwen2_moe", "qwen3_moe") and layer not in config["mlp_only_layers"]
    if not is_sparse or (layer + 1) % config["decoder_sparse_step"]:
        bias = config.get("mlp_bias", False)
        yield from gated("mlp", hidden, config["intermediate_size"], bias)
        return
    yield "mlp.gate.weight", (config["num_experts"], hidden)
    for expert in range(config["num_experts"]):
        yield from gated(f"mlp.experts.{expert}", hidden, config["moe_intermediate_size"])
    if kind == "qwen2_moe":
        width = config["shared_expert_intermediate_size"]
        yield from gated("mlp.shared_expert", hidden, width)
        yield "mlp.shared_expert_gate.weight", (1, hidden)


def gated(name, hidden, width, bias=False):
    yield f"{name}.gate_proj.weight", (width, hidden)
    yield f"{name}.up_proj.weight", (width, hidden)
    yield f"{name}.down_proj.weight", (hidden, width)
    if bias:
        yield f"{name}.gate_proj.bias", (width,)
        yield f"{name}.up_proj.bias", (width,)
        yield f"{name}.down_proj.bias", (hidden,)


def num_elements(config):
    return sum(map(math.prod, tensors(config).values()))


def num_elements_of_rank(config, tp_size):
    """What the first of `tp_size` ranks holds, tensor by tensor."""
    return sum(
        math.prod(of_rank(name, shape, config, tp_size)) for name, shape in tensors(config).items()
    )


def of_rank(name, shape, config, tp_size):
    projection = ".".join(name.split(".")[-2:])
    if projection.split("_")[0] in ("k", "v") and "_proj" in projection:
        kv_heads = config["num_key_value_heads"]
        # Which KV heads the query heads of the first rank attend to.
        group = config["num_attention_heads"] // kv_heads
        queries = range(config["num_attention_heads"] // tp_size)
        heads_of_rank = len({query // group for query in queries})
        return (shape[0] // kv_heads * heads_of_rank, *shape[1:])
    cut = CUT.get(projection)
    if cut is None:
        return shape
    return tuple(size // tp_size if at == cut else size for at, size in enumerate(shape))
