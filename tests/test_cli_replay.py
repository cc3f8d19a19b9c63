"""``kvpool replay`` as a person and a script meet it."""

import json

import pytest

pytest.importorskip("typer", reason="the command line needs the extra cli")

from typer.testing import CliRunner

from kvpool.cli import app
from tests.helpers.traces import hashed, random_lines, write_trace

GOOD = '{"tokens": [5, 17, 3], "output_length": 2}'


def run(*arguments, **environment):
    return CliRunner().invoke(
        app, ["replay", *map(str, arguments)], env={"COLUMNS": "100"} | environment
    )


@pytest.fixture
def trace(tmp_path):
    return write_trace(tmp_path, random_lines(1, 40, 8, num_keys=2))


# ---- what is printed


def test_help_has_examples():
    result = run("--help")
    assert result.exit_code == 0
    assert "kvpool replay trace.jsonl --capacity 500k,1M,3M" in result.stdout
    assert "hash_ids" in result.stdout


def test_table_has_a_row_a_cell(trace):
    result = run(trace, "--capacity", "50,1k,unbounded", "--page-size", "1,4", "--block-size", 8)
    assert result.exit_code == 0
    assert "trace.jsonl: 40 requests" in result.stdout
    assert "up to 32 in flight" in result.stdout
    rows = [line for line in result.stdout.splitlines() if line.startswith("│")]
    assert [row.split("│")[1].strip() for row in rows] == ["50", "1,000", "unbounded"] * 2
    assert [row.split("│")[2].strip() for row in rows] == ["1"] * 3 + ["4"] * 3
    assert "larger than the pool" in result.stdout
    assert "waited for room" in result.stdout
    assert result.stderr == ""


@pytest.mark.parametrize("width", ["40", "80"])
def test_every_figure_is_shown_at_any_width(trace, width):
    result = run(trace, "--capacity", "90", "--page-size", "1,4", "--block-size", 8, COLUMNS=width)
    assert result.exit_code == 0
    document = json.loads(
        run(trace, "--capacity", "90", "--page-size", "1,4", "--block-size", 8, "--json").stdout
    )
    for figures in document["results"]:
        assert f"{figures['hit_rate']:.4f}" in result.stdout


def test_json_is_one_document_of_all_figures(trace):
    result = run(
        *(trace, "--capacity", "90,unbounded", "--page-size", 4, "--block-size", 8, "--json"),
        *("--window", 3, "--prompts-only", "--no-checkpoint", "--limit", 30),
    )
    assert result.exit_code == 0
    document = json.loads(result.stdout)
    assert set(document) == {
        *("trace", "num_requests", "prompt_tokens", "output_tokens", "longest_request"),
        *("num_lines", "num_malformed", "malformed", "options", "complete", "results", "bounds"),
    }
    assert document["trace"] == "trace.jsonl"
    assert document["num_requests"] == document["num_lines"] == 30
    assert document["complete"] is True
    options = document["options"]
    assert (options["window"], options["prompts_only"], options["checkpoint"]) == (3, True, False)
    assert [figures["capacity"] for figures in document["results"]] == [90, None]
    assert document["bounds"] == [document["results"][1]]
    assert set(document["results"][0]) == {
        *("capacity", "page_size", "policy", "num_pages", "complete", "num_requests"),
        *("prompt_tokens", "output_tokens", "too_large", "too_large_tokens", "waited"),
        *("hit_tokens", "hit_rate", "mean_hit_rate"),
        *("cut_requests", "cut_tokens", "uncut_hit_rate", "uncut_mean_hit_rate"),
        *("evicted_pages", "evicted_tokens", "peak_pages", "peak_bound_pages"),
        *("bookkeeping_s", "bookkeeping_requests_per_s", "seconds", "requests_per_s", "losses"),
    }


def test_whole_pages_of_a_known_trace_give_known_rates(tmp_path):
    # Two blocks, the same two again, and one of them with another behind: 8 and 4 tokens of 24.
    lines = [hashed(8, [1, 2]), hashed(8, [1, 2]), hashed(8, [1, 3])]
    path = write_trace(tmp_path, lines)
    options = ("--page-size", 4, "--block-size", 4, "--prompts-only", "--json")
    figures = json.loads(run(path, *options).stdout)["results"][0]
    # The second prompt ends with its last page: a bind leaves that page to be computed.
    assert (figures["hit_tokens"], figures["cut_tokens"], figures["cut_requests"]) == (8, 4, 1)
    assert figures["hit_rate"] == 8 / 24
    assert figures["uncut_hit_rate"] == 12 / 24
    assert figures["mean_hit_rate"] == pytest.approx((0 + 1 / 2 + 1 / 2) / 3)
    assert figures["uncut_mean_hit_rate"] == pytest.approx((0 + 1 + 1 / 2) / 3)


def test_a_capacity_that_holds_no_request_is_said_and_the_others_go_on(trace):
    result = run(trace, "--capacity", "4,1k", "--page-size", 4, "--block-size", 8, "--json")
    assert result.exit_code == 0
    none, some = json.loads(result.stdout)["results"]
    assert (none["too_large"], none["num_requests"], none["hit_rate"]) == (40, 0, None)
    assert some["num_requests"] == 40
    assert some["hit_rate"] > 0
    text = run(trace, "--capacity", "4", "--page-size", 4, "--block-size", 8)
    assert "40 requests larger than the pool" in text.stdout
    assert text.exit_code == 1
    assert "no request fits: the largest pool has 4 tokens, and the longest" in text.stderr


# ---- capacities


def test_memory_is_turned_into_tokens(trace, tmp_path):
    config = tmp_path / "config.json"
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    config.write_text(json.dumps(sizes | {"head_dim": 8}))
    common = (trace, "--page-size", 4, "--block-size", 8, "--no-bound", "--json")

    def capacities(*arguments):
        result = run(*common, *arguments)
        assert result.exit_code == 0, result.stderr
        return [figures["capacity"] for figures in json.loads(result.stdout)["results"]]

    # 2 (K and V) x 2 layers x 2 heads x 8 x 2 bytes = 128 a token.
    assert capacities("--memory", "64KiB,1MiB", "--bytes-per-token", 128) == [512, 8192]
    assert capacities("--memory", "64KiB", "--config", config) == [512]
    assert capacities("--memory", "64KiB", "--config", config, "--dtype", "float8_e4m3fn") == [
        1024
    ]
    assert capacities("--memory", "64KiB", "--config", config, "--tp", 2) == [1024]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--capacity", "many"], "--capacity: expected tokens such as 64k"),
        (["--capacity", "1M,,2M"], "--capacity: expected values with single commas"),
        (["--capacity", "8", "--page-size", "16"], "8 tokens holds no page of 16"),
        (["--capacity", "8", "--memory", "1GiB"], "expected --capacity or --memory, got both"),
        (["--memory", "1GiB"], "--memory needs what a token costs"),
        (["--memory", "1GiB", "--bytes-per-token", "0"], "hold no token of 0 bytes"),
        (["--memory", "1KiB", "--bytes-per-token", "1MiB"], "hold no token of 1,048,576 bytes"),
        (["--memory", "1GiB", "--config", "missing.json"], "cannot read missing.json"),
        (["--bytes-per-token", "8"], "go with --memory"),
        (["--page-size", "16,x"], "--page-size: expected tokens per page such as 16, got 'x'"),
        (["--page-size", "0"], "page_size must be in 1"),
        (["--policy", "mru", "--capacity", "1k"], "policy must be one of lru"),
        (["--policy", "mru"], "policy must be one of lru"),
        (["--policy", "lru,lfu"], "say a --capacity too"),
        (["--window", "0"], "window must be at least 1"),
        (["--limit", "0"], "limit must be at least 1"),
        (["--block-size", "0"], "block_size must be in 1"),
        (["--plot", "x.png"], "--plot needs capacities"),
        (["--capacity", "1k", "--plot", "x.txt"], "--plot writes .png, .svg, .pdf, got x.txt"),
        (["--capacity", "1k", "--plot", "missing/x.png"], "no such directory"),
    ],
)
def test_bad_options_are_said_before_anything_is_read(arguments, message):
    result = run("never-read.jsonl", *arguments)
    assert result.exit_code == 1
    assert message in " ".join(result.stderr.split())
    assert "Traceback" not in result.stderr
    assert result.stdout == ""


# ---- bad traces


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "cannot read"),
        ("", "is empty, expected a line a request"),
        ('{"prompt": "hi"}\n', "neither hash_ids nor tokens among its keys: 'prompt'"),
    ],
)
def test_a_file_that_is_no_trace_fails_in_one_line(tmp_path, text, message):
    path = tmp_path / "trace.jsonl"
    if text is not None:
        path.write_text(text)
    result = run(path)
    assert result.exit_code == 1
    assert result.stderr.startswith("error: ")
    assert message in result.stderr
    assert result.stdout == ""


def test_malformed_lines_are_named_and_change_the_exit_code(tmp_path):
    path = write_trace(tmp_path, [GOOD, '{"tokens": [1, -1], "output_length": 0}', GOOD])
    result = run(path, "--json")
    assert result.exit_code == 3
    document = json.loads(result.stdout)
    assert document["num_requests"] == 2
    assert document["malformed"][0]["line"] == 2
    assert "line 2: tokens: token ids are at least 0, got -1" in result.stderr
    assert "skipped 1 malformed line\n" in result.stderr
    strict = run(path, "--json", "--strict")
    assert strict.exit_code == 1
    assert "line 2: tokens: token ids" in strict.stderr
    assert strict.stdout == ""
