"""Parameters counted from a config: published numbers, and a twin that lists every tensor."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as some

from kvpool.sizing import SHAPES, SizingError, read_model
from kvpool.sizing.parameters import count_parameters, elements_of_rank
from tests.helpers.model_configs import configs
from tests.oracles.checkpoint import num_elements, num_elements_of_rank

# As the safetensors files of the published models say.
PUBLISHED = {
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "smollm2-135m": 134_515_008,
    "mistral-7b-v0.1": 7_241_732_096,
    "mistral-7b": 7_248_023_552,
    "mixtral-8x7b": 46_702_792_704,
    "qwen2.5-7b": 7_615_616_512,
    "qwen3-8b": 8_190_735_360,
    "qwen3-30b-a3b": 30_532_122_624,
    "gemma-2-9b": 9_241_705_984,
    "gemma-3-1b": 999_885_952,
}


def llama(**changes):
    return SHAPES["llama-3-8b"] | changes


# Published models that are no built-in shape.
OTHERS = {
    "Llama-2-7B": (
        llama(vocab_size=32000, intermediate_size=11008, num_key_value_heads=32),
        6_738_415_616,
    ),
    "Phi-3-mini": (
        llama(
            model_type="phi3",
            hidden_size=3072,
            intermediate_size=8192,
            num_key_value_heads=32,
            vocab_size=32064,
        ),
        3_821_079_552,
    ),
    "gemma-7b": (
        llama(
            model_type="gemma",
            hidden_size=3072,
            intermediate_size=24576,
            num_hidden_layers=28,
            num_attention_heads=16,
            num_key_value_heads=16,
            head_dim=256,
            vocab_size=256000,
            tie_word_embeddings=True,
        ),
        8_537_680_896,
    ),
    "Qwen1.5-MoE-A2.7B": (
        llama(
            model_type="qwen2_moe",
            hidden_size=2048,
            intermediate_size=5632,
            num_hidden_layers=24,
            num_attention_heads=16,
            num_key_value_heads=16,
            vocab_size=151936,
            num_experts=60,
            moe_intermediate_size=1408,
            shared_expert_intermediate_size=5632,
        ),
        14_315_784_192,
    ),
}


def counted(config):
    parts = count_parameters(config, tied=bool(config.get("tie_word_embeddings")))
    return sum(part.elements for part in parts)


def test_every_built_in_shape_has_its_published_count():
    assert {name: read_model(name).num_parameters for name in SHAPES} == PUBLISHED


@pytest.mark.parametrize(("config", "expected"), OTHERS.values(), ids=OTHERS)
def test_count_of_other_published_models(config, expected):
    assert counted(config) == expected


def test_bytes_of_llama_3_8b_in_bfloat16():
    assert read_model("llama-3-8b").weight_bytes == 16_060_522_496
    assert read_model("llama-3-8b", dtype="float32").weight_bytes == 2 * 16_060_522_496


@given(config=configs())
def test_count_equals_the_sum_over_all_tensors(config):
    assert counted(config) == num_elements(config)


@given(some.sampled_from([2, 4, 8]).flatmap(lambda n: some.tuples(some.just(n), configs(n))))
def test_rank_holds_its_share_and_what_every_rank_holds(case):
    tp_size, config = case
    parts = count_parameters(config, tied=config["tie_word_embeddings"])
    share = elements_of_rank(parts, tp_size, config["num_key_value_heads"])
    assert share == num_elements_of_rank(config, tp_size)


def test_one_rank_holds_everything():
    for name, count in PUBLISHED.items():
        model = read_model(name)
        assert model.weights_of_rank(1) == model.weight_bytes == 2 * count


def test_ranks_share_what_they_do_not_replicate():
    model = read_model("llama-3-8b")
    # 32 layers with two norms of 4,096 each, and one at the end, are on every rank
    norms = 65 * 4096
    assert model.weights_of_rank(2) == 2 * ((8_030_261_248 - norms) // 2 + norms)


def test_replicated_kv_heads_are_held_by_each_rank():
    model = read_model("llama-3-8b")  # 8 KV heads
    kv = 2 * 32 * 4096 * 8 * 128
    norms = 65 * 4096
    others = 8_030_261_248 - kv - norms
    assert model.weights_of_rank(16) == 2 * (others // 16 + kv // 8 + norms)


def test_other_families_have_no_count_and_ask_for_bytes(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(llama(model_type="olmo")))
    with pytest.raises(SizingError, match=r"olmo.*llama.*bytes of the weights") as caught:
        read_model(path)
    assert caught.value.remedy == "weights"
    model = read_model(path, weight_bytes=1001)
    assert model.num_parameters is None
    assert model.weights_of_rank(2) == 501  # an even share, rounded up


@pytest.mark.parametrize("key", ["vocab_size", "intermediate_size", "hidden_size"])
def test_missing_keys_of_a_family_are_named(tmp_path, key):
    config = llama(head_dim=128)
    del config[key]
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    with pytest.raises(SizingError, match=rf"config\.json: config lacks {key}"):
        read_model(path)
