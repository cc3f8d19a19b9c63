"""Small random models of transformers, pools for them, and the tokens that they compute."""

from contextlib import contextmanager

from kvpool import KVCacheLayout

VOCABULARY = 97
PAGE = 4  # tokens, of a pool for tests
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,  # so that the logits of random weights are far from ties
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
# name -> (kind of config, what it says beside the sizes). The windows are shorter than prompts.
FAMILIES = {
    "llama": ("Llama", {}),
    "mistral": ("Mistral", {"sliding_window": 9}),
    "qwen2": ("Qwen2", {}),
    "qwen2-windows": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 2},
    ),
    "qwen3": ("Qwen3", {}),
    "gemma": ("Gemma", {}),
    "gemma2": ("Gemma2", {"sliding_window": 8, "query_pre_attn_scalar": 16}),
    "gemma3": (
        "Gemma3Text",
        {
            "sliding_window": 8,
            "query_pre_attn_scalar": 16,
            "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
        },
    ),
}


def random_model(family="llama", dtype="float32", **options):
    """A model of a family with seeded weights, in evaluation mode."""
    import torch
    import transformers

    kind, own = FAMILIES[family]
    config = getattr(transformers, f"{kind}Config")(**{**SIZES, **own, **options})
    torch.manual_seed(11)
    model = transformers.AutoModelForCausalLM.from_config(config)
    return model.to(getattr(torch, dtype)).eval()


def pool_for(make_pool, model, num_slots=1024, page_size=4, **options):
    """A pool of the model's layers and heads, and dtype if no other is given."""
    layout = KVCacheLayout.from_config(model.config)
    options.setdefault("dtype", model.dtype)
    return make_pool(
        layout.num_layers,
        num_slots,
        layout.num_kv_heads,
        layout.head_dim,
        page_size=page_size,
        **options,
    )


def random_ids(batch_size, length, seed=0):
    """Token ids ``[batch_size, length]``, none of them padding."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, VOCABULARY, (batch_size, length), generator=generator)


class Computed(list):
    """Tokens that a model computed, one number for each forward."""

    @property
    def tokens(self):
        return sum(self)


@contextmanager
def computed_tokens(model):
    """Count what reaches the embedding of `model`: the tokens that are really computed."""
    found = Computed()
    embedding = model.get_input_embeddings()
    hook = embedding.register_forward_hook(lambda _, args, output: found.append(args[0].numel()))
    try:
        yield found
    finally:
        hook.remove()


@contextmanager
def one_thread():
    """For models this small threads of torch only wait for each other."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def forward(model, ids, cache, mask=None):
    """Logits of the new tokens `ids` after what is in `cache`."""
    from kvpool.interop.transformers.generation import cache_argument

    past = cache.get_seq_length()
    options = {}
    if mask is not None:
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        options = {"attention_mask": mask, "position_ids": positions[:, past:]}
    return model(ids, **{cache_argument(model): cache}, **options).logits


def generated(model, cache, ids, **options):
    """What `generate` makes of `ids` with a cache."""
    import torch

    from kvpool.interop.transformers.generation import cache_argument

    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 8} | options
    return model.generate(ids, **{cache_argument(model): cache}, **options)
