"""Models and batches that a `PoolCache` refuses, before anything has changed."""

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
import transformers

from kvpool import KVCacheStateError
from kvpool.interop.transformers import PoolCache, generate
from kvpool.interop.transformers.generation import cache_argument
from kvpool.interop.transformers.models import check_model
from tests.helpers.hf_models import SIZES, pool_for, random_ids, random_model

pytestmark = pytest.mark.peers


@pytest.fixture
def pool(make_pool, model):
    made = pool_for(make_pool, model)
    yield made
    assert made.bound_request_count == 0
    assert made.stats()["pages_tree"] == 0


# ---- models


class Model:
    """A model as far as it is looked at before it is called."""

    def __init__(self, config):
        self.config = config
        self.device, self.dtype = torch.device("cpu"), torch.float32


def config(kind="Llama", **options):
    return getattr(transformers, f"{kind}Config")(**SIZES | {"num_hidden_layers": 2} | options)


@pytest.mark.parametrize(
    ("refused", "message"),
    [
        (lambda: config("Gemma3Text", use_bidirectional_attention=True), "tokens that come later"),
        (lambda: config(is_causal=False), "tokens that come later"),
        (lambda: config(num_kv_shared_layers=1), "share K and V"),
        (lambda: config(attention_chunk_size=8), "layers of chunked_attention keep another"),
        (
            lambda: config("Qwen3Next", layer_types=["linear_attention", "full_attention"]),
            "layers of linear_attention keep another",
        ),
        (
            lambda: config(rope_parameters={"rope_type": "dynamic", "factor": 2.0}),
            "with 'dynamic' rotary positions",
        ),
        (lambda: transformers.T5Config(), "an encoder-decoder"),
        (lambda: config(num_key_value_heads=4), r"\(2, 4, 16\), the pool \(2, 2, 16\)"),
    ],
)
def test_model_is_refused(pool, refused, message):
    with pytest.raises(ValueError, match=message):
        check_model(Model(refused()), pool)


def test_model_elsewhere_or_of_another_dtype_is_refused(pool):
    model = Model(config())
    check_model(model, pool)
    model.device = torch.device("meta")
    with pytest.raises(ValueError, match="the model is on meta, the pool on cpu"):
        check_model(model, pool)
    model.device, model.dtype = torch.device("cpu"), torch.float64
    with pytest.raises(ValueError, match="the model computes in float64, expected one of float32"):
        check_model(model, pool)


# ---- prompts


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        ([[1, 1, 1, 0]] * 2, r"row 0 of attention_mask is \[1, 1, 1, 0\]: expected padding at"),
        ([[1, 1, 1, 1], [1, 0, 1, 1]], "row 1 of attention_mask"),
        ([[1, 1, 1, 1], [0, 0, 0, 0]], "row 1 of attention_mask"),
        ([[1, 1, 1]] * 2, r"expected \[2, 4\] as input_ids, got \[2, 3\]"),
    ],
)
def test_mask_is_refused(model, pool, mask, message):
    with pytest.raises(ValueError, match=message):
        PoolCache(model, pool, random_ids(2, 4), torch.tensor(mask))


@pytest.mark.parametrize("ids", [torch.zeros(4), torch.zeros(0, 4).long(), torch.zeros(1, 4)])
def test_ids_are_refused(model, pool, ids):
    with pytest.raises(ValueError, match=r"input_ids must be integers \[batch, length\], got"):
        PoolCache(model, pool, ids)


def test_padding_without_a_mask_is_refused(model, pool):
    ids = random_ids(2, 6)
    ids[0, :2] = 0
    with pytest.raises(ValueError, match=r"hold the padding token \(0\)"):
        generate(model, pool, ids, max_new_tokens=2)
    token = int(random_ids(2, 6)[0, 0])
    # What only this call takes for padding is seen when generate comes with its own mask.
    with pytest.raises(ValueError, match="give both the same one"):
        generate(model, pool, random_ids(2, 6), max_new_tokens=2, pad_token_id=token)


def test_another_cache_is_refused(model, pool):
    with pytest.raises(ValueError, match=r"makes the cache itself, got \['cache'\]"):
        generate(model, pool, random_ids(1, 4), cache=transformers.DynamicCache())


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"max_new_tokens": -1}, ValueError, "max_new_tokens must be at least 0, got -1"),
        ({"max_new_tokens": 2.0}, TypeError, "max_new_tokens must be an int"),
        ({"rows_per_prompt": 0}, ValueError, "rows_per_prompt must be at least 1, got 0"),
    ],
)
def test_numbers_are_refused(model, pool, options, error, message):
    with pytest.raises(error, match=message):
        PoolCache(model, pool, random_ids(1, 4), **options)


def test_closed_pool_is_refused(model, make_pool):
    closed = pool_for(make_pool, model)
    closed.close()
    with pytest.raises(KVCacheStateError, match="the pool is closed"):
        PoolCache(model, closed, random_ids(1, 4))


# ---- forwards


@pytest.fixture
def cache(model, pool):
    ids = random_ids(2, 6)
    mask = torch.ones_like(ids)
    mask[0, :2] = 0
    made = PoolCache(model, pool, ids, mask)
    made.ids, made.mask = ids, mask
    made.positions = (mask.cumsum(1) - 1).clamp(min=0)
    yield made
    made.close()


def forward(model, cache, **options):
    given = {
        "input_ids": cache.ids,
        "attention_mask": cache.mask,
        "position_ids": cache.positions,
        cache_argument(model): cache,
    }
    with torch.no_grad():
        return model(**given | options)


def test_what_the_prompts_say_is_taken(model, cache):
    forward(model, cache)
    assert cache.get_seq_length() == 6
    cache.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"input_ids": random_ids(2, 6, seed=9)}, "row 0: columns 0 to 6 of input_ids are not"),
        ({"attention_mask": None}, "row 0 has 2 columns of padding and the model was given no"),
        ({"attention_mask": torch.ones(2, 6)}, "is not the one that the cache was made with"),
        ({"attention_mask": torch.ones(2, 1, 6, 6)}, r"must be \[batch, columns\]"),
        ({"position_ids": None}, "given no position_ids"),
        ({"position_ids": torch.arange(6)[None]}, "do not count the tokens of each row from 0"),
        ({"input_ids": random_ids(3, 6)}, "the cache has 2 rows, the model was given 3"),
        (
            {"input_ids": None, "inputs_embeds": torch.zeros(2, 6, 48)},
            "the model was given inputs_embeds: a pool knows K and V by token ids",
        ),
    ],
)
def test_forward_is_refused(model, cache, options, message):
    with pytest.raises(ValueError, match=message):
        forward(model, cache, **options)
    assert cache.get_seq_length() == 0


def test_forward_of_another_model_is_refused(model, cache):
    with pytest.raises(KVCacheStateError, match="a forward that this cache was not told of"):
        forward(random_model(num_hidden_layers=2), cache)


def test_gradients_are_refused(model, cache):
    with pytest.raises(KVCacheStateError, match=r"call under torch\.no_grad\(\)"):
        model(
            cache.ids,
            attention_mask=cache.mask,
            position_ids=cache.positions,
            **{cache_argument(model): cache},
        )


def test_update_by_hand_is_refused(model, cache):
    k = torch.zeros(2, 2, 1, 16)
    with pytest.raises(KVCacheStateError, match="a forward that this cache was not told of"):
        cache.update(k, k, 0)
    forward(model, cache)
    with pytest.raises(KVCacheStateError, match="layer 0 was updated twice in one forward"):
        cache.update(k, k, 0)
    cache.close()


@pytest.mark.parametrize("bad", [torch.zeros(2, 2, 5, 16), torch.zeros(2, 2, 6, 16).double()])
def test_k_and_v_of_another_shape_or_dtype_are_refused(model, cache, bad):
    def replace(module, args, kwargs):
        with pytest.raises(
            ValueError, match=r"Invalid value_states of layer 0: expected \[2, 2, 6"
        ):
            cache.update(torch.zeros(2, 2, 6, 16), bad, 0)

    hook = model.get_decoder().layers[0].register_forward_pre_hook(replace, with_kwargs=True)
    forward(model, cache)
    hook.remove()
    cache.close()


def test_pool_that_closes_first_leaves_a_cache_that_says_so(model, make_pool):
    closed = pool_for(make_pool, model)
    ids = random_ids(1, 6)
    cache = PoolCache(model, closed, ids)
    closed.close()
    with pytest.raises(KVCacheStateError, match="the pool is closed"):
        cache.finish()
    cache.close()
    assert not model.get_decoder()._forward_pre_hooks


def test_what_a_tokenizer_returns_is_taken_apart_by_the_caller(model, pool):
    for given in ([[1, 2]], None, {"input_ids": random_ids(1, 4)}):
        with pytest.raises(TypeError, match=r"input_ids must be a torch\.Tensor \[batch"):
            generate(model, pool, given, max_new_tokens=2)


def test_generation_without_a_cache_is_refused(model, pool):
    settings = transformers.GenerationConfig(use_cache=False)
    for options in ({"use_cache": False}, {"generation_config": settings}):
        with pytest.raises(ValueError, match="with a cache, got use_cache=False"):
            generate(model, pool, random_ids(1, 4), max_new_tokens=2, **options)


def test_dropout_in_training_is_refused(make_pool, model):
    dropping = random_model(num_hidden_layers=2, attention_dropout=0.5)
    pool = pool_for(make_pool, dropping)
    ids = random_ids(1, 4)
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 2}
    with pytest.raises(ValueError, match=r"training mode, where \{'attention_dropout': 0.5\}"):
        generate(dropping.train(), pool, ids, **options)
    generate(dropping.eval(), pool, ids, **options)
    still = random_model(num_hidden_layers=2).train()  # without dropout nothing is random
    generate(still, pool_for(make_pool, still), ids, **options)
