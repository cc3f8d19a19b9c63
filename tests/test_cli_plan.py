"""``kvpool plan``: both questions, in tables and in JSON, and what goes wrong."""

import json
import re

import pytest
from typer.testing import CliRunner

from kvpool.cli import app
from kvpool.cli.numbers import parse_bytes
from kvpool.sizing import DEFAULT_CONTEXT_BYTES, GPUS, KV_DTYPES, SHAPES
from tests.helpers.model_configs import LLAMA
from tests.helpers.shell import shell


@pytest.fixture(autouse=True)
def wide(monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")


def plan(*args):
    return CliRunner().invoke(app, ["plan", *map(str, args)])


def plan_json(*args):
    result = plan(*args, "--json")
    assert (result.exit_code, result.stderr) == (0, ""), result.output
    return json.loads(result.stdout)


def refused(*args):
    """The error of a plan that must fail cleanly."""
    result = plan(*args)
    assert (result.exit_code, result.stdout) == (1, ""), result.output
    assert result.stderr.startswith("error: ")
    assert "Traceback" not in result.stderr
    return result.stderr.removeprefix("error: ").strip()


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA))
    return path


def test_llama_3_8b_on_80_gib_exactly():
    answer = plan_json("llama-3-8b", "--memory", "80GiB", "--mem-fraction", "0.9")
    kv = {row["dtype"]: row for row in answer["kv"]}
    assert answer["model"]["num_parameters"] == 8_030_261_248
    assert answer["model"]["weight_bytes"] == 16_060_522_496
    assert answer["rank"]["context_bytes"] == 2**29
    assert answer["rank"]["static_bytes"] == 77_309_411_328
    assert kv["bfloat16"]["bytes_per_token"] == 131_072
    assert (kv["bfloat16"]["num_slots"], kv["bfloat16"]["num_pages"]) == (463_184, 28_949)
    assert kv["float8_e4m3fn"]["num_slots"] == 926_384
    assert kv["float8_e5m2"]["num_slots"] == 926_384
    given = plan_json(
        "llama-3-8b",
        *("--memory", 80 * 2**30, "--mem-fraction", "0.9"),
        *("--weights", "16,060,522,496", "--context", "0.5GiB", "--page-size", 16),
    )
    assert given["kv"] == answer["kv"]


def test_table_shows_every_dtype_and_what_binds():
    result = plan("llama-3-8b", "--memory", "80GiB", "--mem-fraction", "0.9")
    assert (result.exit_code, result.stderr) == (0, "")
    assert re.search(r"bfloat16\W+131,072\W+463,184\W+28,949\W+452\W+113\W+56\b", result.stdout)
    assert re.search(r"float8_e5m2\W+65,536\W+926,384", result.stdout)
    assert all(dtype in result.stdout for dtype in KV_DTYPES)
    assert "16,060,522,496 bytes" in result.stdout
    assert "memory binds" in result.stdout
    assert "--mem-fraction 0.95" in result.stdout
    assert "note:" not in result.stdout  # memory was given, nothing is nominal


def test_nominal_memory_says_so():
    result = plan("llama-3-8b", "--gpu", "H100")
    assert "h100, nominal" in result.stdout
    assert "note: nominal memory" in result.stdout
    answer = plan_json("llama-3-8b", "--gpu", "h100")
    assert answer["gpu"] == {"name": "h100", "memory_bytes": 80 * 2**30, "nominal": True}
    answer = plan_json("llama-3-8b", "--gpu", "h100", "--memory", "79.1GiB")
    assert answer["gpu"] == {"name": "h100", "memory_bytes": 84_932_978_278, "nominal": False}


def test_ranks_share_weights_and_heads():
    answer = plan_json("llama-3-70b", "--gpu", "h100", "--tp", 4)
    assert (answer["tp_size"], answer["rank"]["num_kv_heads"]) == (4, 2)
    assert answer["rank"]["weight_bytes"] < answer["model"]["weight_bytes"] / 3.9
    assert answer["kv"][1]["bytes_per_token"] == 2 * 80 * 2 * 128 * 2
    assert "on each of 4 ranks" in plan("llama-3-70b", "--gpu", "h100", "--tp", 4).stdout


def test_lengths_and_dtypes_may_be_chosen():
    answer = plan_json(
        "llama-3-8b", "--gpu", "h100", "--lengths", "1k,4Ki,32k", "--kv-dtype", "fp8,bf16,FP8"
    )
    assert [row["dtype"] for row in answer["kv"]] == ["float8_e4m3fn", "bfloat16"]
    lengths = [each["length"] for each in answer["kv"][0]["requests"]]
    assert lengths == [1000, 4096, 32000]
    assert any("beyond the 8,192 positions" in note for note in answer["notes"])


def test_cap_binds_and_says_what_to_raise():
    result = plan("llama-3-8b", "--gpu", "h100", "--max-batch-size", 4, "--max-seq-len", "2k")
    assert "max_batch_size x max_seq_len binds" in result.stdout
    assert "--max-batch-size 8" in result.stdout
    assert re.search(r"float16, bfloat16: max_batch_size", result.stdout)


def test_no_knob_no_table_of_knobs():
    result = plan("smollm2-135m", "--memory", "8GiB", "--mem-fraction", "0.95")
    assert "memory binds" in result.stdout
    assert "after a change" not in result.stdout


def test_context_binds_and_says_so():
    result = plan("llama-3-8b", "--memory", "24GiB", "--context", "5GiB")
    assert "the context reserve binds: its 5.00 GiB leave" in result.stdout
    assert "--context 2.50GiB" in result.stdout


def test_config_file_and_folder(config):
    answer = plan_json(config, "--memory", "1GiB", "--context", 0)
    assert answer == plan_json(config, "--memory", "1GiB", "--context", "0B")
    assert answer["model"]["weight_source"] == "parameters in bfloat16"
    index = config.parent / "model.safetensors.index.json"
    index.write_text('{"metadata": {"total_size": 1000}}')
    answer = plan_json(config.parent, "--memory", "1GiB")
    assert answer["model"]["weight_bytes"] == 1000


def test_reverse_names_memory_and_gpus():
    answer = plan_json("qwen3-8b", "--requests", 64, "--length", "8k")
    kv = {row["dtype"]: row for row in answer["kv"]}
    assert kv["bfloat16"]["num_slots"] == 64 * 8000
    assert [each["tp_size"] for each in kv["bfloat16"]["by_tp"]] == [1, 2, 4, 8]
    # 2 * 36 layers * 8 heads * 128 * 2 bytes
    assert kv["bfloat16"]["by_tp"][0]["kv_bytes"] == 64 * 8000 * 147_456
    fewest = {gpu["name"]: gpu["fewest_ranks"]["bfloat16"] for gpu in answer["gpus"]}
    assert (fewest["h200"], fewest["h100"], fewest["l4"]) == (1, 2, 8)
    result = plan("qwen3-8b", "--requests", 64, "--length", "8k")
    assert all(gpu in result.stdout for gpu in GPUS)
    assert "64 requests of 8,000 tokens: 512,000 tokens in 32,000 pages of 16" in result.stdout


def test_reverse_agrees_with_forward():
    back = plan_json("llama-3-8b", "--requests", 10, "--length", 4096, "--kv-dtype", "bf16")
    least = back["kv"][0]["by_tp"][0]["memory_bytes"]
    arguments = ("--lengths", 4096, "--kv-dtype", "bf16")
    enough = plan_json("llama-3-8b", "--memory", least, *arguments)
    assert enough["kv"][0]["requests"] == [{"length": 4096, "at_once": 10}]
    short = plan_json("llama-3-8b", "--memory", least - 1, *arguments)
    assert short["kv"][0]["requests"] == [{"length": 4096, "at_once": 9}]


def test_reverse_of_one_gpu_and_one_number_of_ranks():
    answer = plan_json("llama-3-8b", "--requests", 9, "--length", 100, "--gpu", "l4", "--tp", 2)
    assert [gpu["name"] for gpu in answer["gpus"]] == ["l4"]
    assert [each["tp_size"] for each in answer["kv"][0]["by_tp"]] == [2]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["nothing.json", "--gpu", "h100"], r"nothing\.json is no file and no built-in shape"),
        (["llama3-8b", "--gpu", "h100"], "Did you mean llama-3-8b"),
        (["llama-3-8b"], "how much memory?.*--gpu.*--memory.*--requests"),
        (["llama-3-8b", "--gpu", "h1000"], r"no GPU 'h1000'.*a100-80.*\(--memory\)"),
        (["llama-3-8b", "--memory", "80G"], "--memory: '80G' does not say which unit"),
        (["llama-3-8b", "--memory", "-1"], "--memory: expected bytes"),
        (["llama-3-8b", "--memory", "0"], "memory must be at least 1"),
        (["llama-3-8b", "--gpu", "h100", "--context", "much"], "--context: expected bytes"),
        (["llama-3-8b", "--gpu", "h100", "--weights", "x"], "--weights: expected bytes"),
        (["llama-3-8b", "--gpu", "h100", "--dtype", "int8"], r"'int8'.*\(--weights\)"),
        (["llama-3-8b", "--gpu", "h100", "--kv-dtype", "int8"], "--kv-dtype: expected some of"),
        (["llama-3-8b", "--gpu", "h100", "--mem-fraction", "1.5"], "mem_fraction.*1.5"),
        (["llama-3-8b", "--gpu", "h100", "--mem-fraction", "nan"], "mem_fraction.*nan"),
        (["llama-3-8b", "--gpu", "h100", "--page-size", "0"], "page_size must be at least 1"),
        (["llama-3-8b", "--gpu", "h100", "--tp", "3"], "8 KV heads do not divide"),
        (["llama-3-8b", "--gpu", "h100", "--tp", "0"], "tp must be at least 1"),
        (["llama-3-8b", "--gpu", "h100", "--lengths", "1k,,2k"], "--lengths: .*commas"),
        (["llama-3-8b", "--gpu", "h100", "--lengths", "unbounded"], "--lengths: .*unbounded"),
        (["llama-3-8b", "--gpu", "h100", "--max-seq-len", "4k"], "max_batch_size: give both"),
        (["llama-3-8b", "--requests", "4"], "--requests and --length belong together"),
        (["llama-3-8b", "--length", "4"], "--requests and --length belong together"),
        (["llama-3-8b", "--requests", "0", "--length", "4"], "requests must be at least 1"),
        (["llama-3-8b", "--requests", "1", "--length", "0"], "--length: .*one token"),
        (
            ["llama-3-8b", "--requests", "1", "--length", "9", "--lengths", "1k"],
            "have no use beside them",
        ),
        (
            ["llama-3-70b", "--gpu", "h100"],
            "not one page of 16 tokens fits: weights of 141,107,412,992.*tp 2",
        ),
    ],
    ids=lambda value: " ".join(value[1:]) if isinstance(value, list) else None,
)
def test_bad_input_is_explained(args, message):
    assert re.search(message, refused(*args), re.DOTALL)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", r"config\.json is not JSON"),
        ("[]", "holds a list"),
        ("{}", "lacks num_hidden_layers"),
        (json.dumps(LLAMA | {"kv_lora_rank": 512}), r"kv_lora_rank \(MLA\)"),
        (json.dumps(LLAMA | {"mamba_d_state": 16}), "cannot be sized: mamba_d_state"),
        (json.dumps(LLAMA | {"model_type": "new"}), r"'new'.*\(--weights\)"),
        (json.dumps(LLAMA | {"quantization_config": {}} | {"x": 1}), None),
        (json.dumps(LLAMA | {"quantization_config": {"bits": 4}}), r"quantised.*\(--weights\)"),
    ],
)
def test_config_that_cannot_be_sized_is_explained(config, content, message):
    config.write_text(content)
    if message is None:
        assert plan(config, "--gpu", "h100").exit_code == 0
    else:
        assert re.search(message, refused(config, "--gpu", "h100"), re.DOTALL)


def test_usage_errors_are_typer_s_own():
    assert plan().exit_code == 2
    assert plan("llama-3-8b", "--tp", "two").exit_code == 2
    assert plan("llama-3-8b", "--nothing").exit_code == 2


def test_help_has_examples_names_and_defaults():
    result = plan("--help")
    assert result.exit_code == 0
    assert "kvpool plan llama-3-8b --gpu h100" in result.stdout
    words = result.stdout.replace("│", " ").split()
    assert set(SHAPES) <= {word.strip(".,") for word in words}
    assert set(GPUS) <= {word.strip(".,") for word in words}
    assert "0.5GiB" in result.stdout
    assert parse_bytes("0.5GiB") == DEFAULT_CONTEXT_BYTES


@pytest.mark.parametrize("width", ["40", "60"])
def test_narrow_terminal_breaks_no_number(monkeypatch, width):
    monkeypatch.setenv("COLUMNS", width)
    for args in (
        ("llama-3-8b", "--memory", "80GiB", "--mem-fraction", "0.9"),
        ("llama-3-8b", "--requests", 64, "--length", "8k"),
    ):
        result = plan(*args)
        assert result.exit_code == 0
        assert max(map(len, result.stdout.splitlines())) <= int(width)
        assert "float8_e4m3fn" in result.stdout
    result = plan("llama-3-8b", "--memory", "80GiB")
    assert "16,060,522,496" in result.stdout
    assert "--mem-fraction" in result.stdout
    assert plan("--help").exit_code == 0


def test_process_in_a_pipe():
    code, out, err = shell("kvpool plan llama-3-8b --memory 80GiB --mem-fraction 0.9 | head -1")
    assert (code, err) == (0, "")
    assert out == "llama-3-8b: 8,030,261,248 parameters, 32 layers, 8 KV heads of 128\n"
    code, out, err = shell("kvpool plan missing.json --gpu h100 --json")
    assert (code, out) == (1, "")
    assert err.startswith("error: missing.json is no file")
