"""Configs as people have them: files, folders, nested parts, weights beside them; and refusals."""

import json
import struct

import pytest

from kvpool.sizing import SHAPES, SizingError, read_model
from tests.helpers import model_configs

LLAMA = model_configs.LLAMA | {"torch_dtype": "float16"}


@pytest.fixture
def write(tmp_path):
    """A function that writes a config.json and returns its path."""

    def write_config(config, name="config.json"):
        path = tmp_path / name
        path.write_text(config if isinstance(config, str) else json.dumps(config))
        return path

    return write_config


def shape(model, tp_size=1):
    layout = model.layout(tp_size)
    return layout.num_layers, layout.num_kv_heads, layout.head_dim


def without(*keys, **changes):
    return {key: value for key, value in LLAMA.items() if key not in keys} | changes


def test_file_folder_and_text_path_read_alike(write):
    path = write(LLAMA)
    for source in (path, str(path), path.parent, str(path.parent)):
        model = read_model(source)
        assert shape(model) == (4, 2, 8)  # head_dim = 64 / 8
        assert model.weight_source == "parameters in float16"
        assert model.weight_bytes == 2 * model.num_parameters


def test_name_of_a_shape_ignores_case():
    assert read_model("Llama-3-8B").name == "llama-3-8b"


def test_folder_named_as_a_shape_is_the_folder(write, tmp_path, monkeypatch):
    folder = tmp_path / "llama-3-8b"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA))
    monkeypatch.chdir(tmp_path)
    assert shape(read_model("llama-3-8b")) == (4, 2, 8)


def test_head_dim_is_given_or_derived(write):
    assert shape(read_model(write(LLAMA | {"head_dim": 24}))) == (4, 2, 24)
    assert shape(read_model(write(LLAMA | {"head_dim": None}))) == (4, 2, 8)


def test_config_without_kv_heads_has_one_for_each_query_head(write):
    assert shape(read_model(write(without("num_key_value_heads")))) == (4, 8, 8)


@pytest.mark.parametrize("key", ["text_config", "llm_config"])
def test_nested_config_is_the_language_model(write, key):
    model = read_model(write({"model_type": "outer", "torch_dtype": "float32", key: LLAMA}))
    assert shape(model) == (4, 2, 8)
    assert model.weight_source == "parameters in float16"
    assert any("language model only" in note for note in model.notes)
    assert not read_model(write(LLAMA)).notes


def test_dtype_and_ties_of_a_nested_config_may_be_the_whole_ones(write):
    text = without("torch_dtype")
    whole = {"dtype": "float32", "tie_word_embeddings": True, "text_config": text}
    model = read_model(write(whole))
    untied = read_model(write(text | {"tie_word_embeddings": False}))
    assert model.weight_source == "parameters in float32"
    assert model.num_parameters == untied.num_parameters - 100 * 64


def test_gemma_3_leaves_its_class_defaults_out(write):
    # google/gemma-3-4b-it: text_config holds the difference to the class
    text = {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "sliding_window": 1024,
    }
    model = read_model(write({"model_type": "gemma3", "text_config": text, "vision_config": {}}))
    assert shape(model) == (34, 4, 256)
    # the published total, less the vision tower and what projects its output
    assert model.num_parameters == 4_300_079_472 - 416_866_032 - 2_950_272


@pytest.mark.parametrize(
    ("tp_size", "kv_heads"), [(1, 8), (2, 4), (8, 1), (16, 1), (32, 1)], ids=str
)
def test_kv_heads_are_divided_or_replicated(tp_size, kv_heads):
    assert read_model("llama-3-8b").layout(tp_size).num_kv_heads == kv_heads


@pytest.mark.parametrize(
    ("tp_size", "message"),
    [(3, "8 KV heads"), (64, "num_attention_heads 32"), (0, "tp_size"), (-2, "tp_size")],
)
def test_ranks_that_do_not_divide_raise(tp_size, message):
    with pytest.raises(SizingError, match=message):
        read_model("llama-3-8b").layout(tp_size)


def test_mlp_that_does_not_divide_raises(write):
    model = read_model(write(LLAMA | {"intermediate_size": 129}))
    with pytest.raises(SizingError, match="intermediate_size 129 does not divide among tp 2"):
        model.layout(2)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "not JSON"),
        ("", "not JSON"),
        ("[1, 2]", "list"),
        ("null", "NoneType"),
        ('{"text_config": "no"}', "str"),
        ("{}", "lacks num_hidden_layers"),
        (without("num_hidden_layers"), "lacks num_hidden_layers"),
        (without("num_attention_heads"), "lacks num_attention_heads"),
        (without("hidden_size"), "lacks hidden_size"),
        (LLAMA | {"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        (LLAMA | {"num_attention_heads": "8"}, "num_attention_heads is '8'"),
        (LLAMA | {"num_key_value_heads": True}, "num_key_value_heads is True"),
        (LLAMA | {"num_key_value_heads": [2, 2, 1, 1]}, "num_key_value_heads is a list"),
        (LLAMA | {"hidden_size": 65}, "65"),
        (LLAMA | {"vocab_size": -1}, "vocab_size = -1"),
        (LLAMA | {"torch_dtype": "int8"}, "int8"),
    ],
    ids=str,
)
def test_broken_config_raises(write, content, message):
    path = write(content)
    with pytest.raises(SizingError, match=message) as caught:
        read_model(path)
    assert "config.json" in str(caught.value) or "int8" in message


def test_bytes_that_are_no_text_raise(tmp_path):
    path = tmp_path / "config.json"
    path.write_bytes(b"\xff\xfe{")
    with pytest.raises(SizingError, match="not JSON"):
        read_model(path)


def test_file_that_cannot_be_read_raises(write):
    with pytest.raises(SizingError, match="cannot be read"):
        read_model(write(LLAMA) / "config.json")  # a folder that is a file


def test_missing_file_names_the_shapes(tmp_path):
    with pytest.raises(SizingError, match="no file and no built-in shape") as caught:
        read_model(tmp_path / "nothing.json")
    assert all(name in str(caught.value) for name in SHAPES)
    with pytest.raises(SizingError, match=r"Did you mean llama-3-8b"):
        read_model("llama3-8b")
    with pytest.raises(SizingError, match=r"has no config\.json"):
        read_model(tmp_path)


MLA = {"kv_lora_rank": 512, "v_head_dim": 128}
REFUSED = {
    "DeepSeek": (MLA, "MLA"),
    "Jamba": ({"attn_layer_period": 8, "mamba_d_state": 16}, "attn_layer_period.*state"),
    "Mamba": ({"model_type": "mamba2"}, "mamba2.*state"),
    "Qwen3-Next": (
        {"layer_types": ["linear_attention"] * 3 + ["full_attention"]},
        "3 of 4 layers are linear_attention",
    ),
    "Zamba": ({"layers_block_type": ["mamba", "hybrid"]}, "2 of 2 layers are hybrid, mamba"),
    "Nemotron-H": ({"hybrid_override_pattern": "M-M*"}, "hybrid_override_pattern"),
    "MiniMax": ({"attn_type_list": [0, 0, 1]}, "attn_type_list"),
    "Llama-3.2-Vision": ({"cross_attention_layers": [3, 8]}, "cross_attention_layers"),
    "Gemma-3n": ({"num_kv_shared_layers": 15}, "num_kv_shared_layers"),
    "Gemma-4": ({"head_dim": 256, "global_head_dim": 512}, "global_head_dim 512"),
    "MiMo": ({"head_dim": 192, "v_head_dim": 128}, "v_head_dim 128 beside head_dim 192"),
    "Nemotron-NAS": ({"block_configs": [{}]}, "block_configs"),
    "T5": ({"is_encoder_decoder": True}, "is_encoder_decoder"),
}


@pytest.mark.parametrize(("changes", "message"), REFUSED.values(), ids=REFUSED)
def test_cache_that_is_not_k_and_v_of_equal_heads_is_refused(write, changes, message):
    with pytest.raises(SizingError, match=message):
        read_model(write(LLAMA | changes), weight_bytes=1)


@pytest.mark.parametrize("key", ["multi_query", "num_kv_heads", "n_head_kv"])
def test_kv_heads_under_another_name_are_refused(write, key):
    # Falcon and StarCoder: one KV head, which would be counted as one for each query head
    path = write(without("num_key_value_heads") | {key: 1})
    with pytest.raises(SizingError, match=f"{key}.*num_key_value_heads"):
        read_model(path, weight_bytes=1)


def test_layers_that_all_attend_are_sized_whatever_else_is_set(write):
    attend = {"layer_types": ["attention"] * 4, "mamba_d_state": 16}
    assert shape(read_model(write(LLAMA | attend))) == (4, 2, 8)


@pytest.mark.parametrize(
    ("changes", "note"),
    [
        ({"sliding_window": 512}, "layers attend within a window of 512"),
        (
            {"sliding_window": 512, "layer_types": ["sliding_attention"] * 3 + ["full_attention"]},
            "3 of 4 layers attend within a window of 512",
        ),
        ({"sliding_window": 512, "layer_types": ["full_attention"] * 4}, None),
        ({"sliding_window": 512, "use_sliding_window": False}, None),
        ({"sliding_window": 4096}, None),  # longer than the model's positions
        ({"sliding_window": None}, None),
    ],
)
def test_windowed_layers_are_counted_in_full_and_noted(write, changes, note):
    model = read_model(write(LLAMA | changes))
    assert shape(model) == (4, 2, 8)
    assert [note in text for text in model.notes] == ([True] if note else [])


def test_index_beside_the_config_says_the_weights(write, tmp_path):
    path = write(LLAMA)
    write({"metadata": {"total_size": 12345.0}, "weight_map": {}}, "model.safetensors.index.json")
    model = read_model(path)
    assert model.weight_bytes == 12345
    assert model.weight_source == "model.safetensors.index.json"
    assert read_model(path, dtype="float32").weight_source == "parameters in float32"
    assert read_model(path, weight_bytes=7).weight_bytes == 7


def test_single_safetensors_file_says_the_weights(write, tmp_path):
    path = write(LLAMA)
    header = b'{"a": {"dtype": "F16", "shape": [50], "data_offsets": [0, 100]}}'
    tensors = struct.pack("<Q", len(header)) + header + bytes(100)
    (tmp_path / "model.safetensors").write_bytes(tensors)
    model = read_model(path)
    assert (model.weight_bytes, model.weight_source) == (100, "model.safetensors")


@pytest.mark.parametrize("content", [b"", b"short", bytes(7) + b"\xff" + bytes(20)])
def test_broken_safetensors_file_raises(write, tmp_path, content):
    path = write(LLAMA)
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(SizingError, match="no safetensors file"):
        read_model(path)


@pytest.mark.parametrize(
    "content", ["{", "{}", '{"metadata": {}}', '{"metadata": {"total_size": 0}}']
)
def test_broken_index_raises(write, content):
    path = write(LLAMA)
    write(content, "model.safetensors.index.json")
    with pytest.raises(SizingError, match="total_size"):
        read_model(path)


def test_quantised_model_asks_for_the_bytes(write):
    path = write(LLAMA | {"quantization_config": {"quant_method": "fp8"}})
    with pytest.raises(SizingError, match="quantised") as caught:
        read_model(path)
    assert caught.value.remedy == "weights"
    assert read_model(path, weight_bytes=5).weight_bytes == 5
    assert read_model(path, dtype="bfloat16").weight_source == "parameters in bfloat16"


def test_weights_and_dtype_exclude_each_other():
    with pytest.raises(SizingError, match="not both"):
        read_model("llama-3-8b", dtype="float16", weight_bytes=1)
    with pytest.raises(SizingError, match="-1"):
        read_model("llama-3-8b", weight_bytes=-1)
