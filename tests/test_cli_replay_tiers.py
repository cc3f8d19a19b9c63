"""``kvpool replay`` with tiers and several instances, as a person and a script meet it."""

import json

import pytest

pytest.importorskip("typer", reason="the command line needs the extra cli")

from typer.testing import CliRunner

from kvpool.cli import app
from tests.helpers.traces import hashed, random_lines, write_trace

POOL = ("--capacity", "60", "--page-size", "4", "--block-size", "4")


def run(*arguments, **environment):
    return CliRunner().invoke(
        app, ["replay", *map(str, arguments)], env={"COLUMNS": "100"} | environment
    )


@pytest.fixture
def trace(tmp_path):
    return write_trace(tmp_path, random_lines(1, 40, 4))


def test_values_make_a_grid_in_which_nothing_stands_twice(trace):
    result = run(
        *(trace, *POOL, "--json", "--instances", "1,3", "--route", "round-robin,prefix"),
        *("--host-tier", "none,40", "--remote-tier", "0,unbounded", "--write", "insert,evict"),
    )
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout)["results"]
    # One instance has one route, and what has no tier one write: 7 tiers with writes times 3.
    assert len(found) == 7 * 3
    names = ("instances", "route", "host_tier", "remote_tier", "write")
    assert len({tuple(each.get("fleet", {}).get(n) for n in names) for each in found}) == 21


def test_json_has_the_fleet_beside_all_that_was_there(trace):
    result = run(trace, *POOL, "--instances", 2, "--remote-tier", "unbounded", "--json")
    figures = json.loads(result.stdout)["results"][0]
    assert set(figures["fleet"]) == {
        *("instances", "route", "host_tier", "remote_tier", "write"),
        *(
            f"{p}_{what}"
            for p in ("local", "host", "remote")
            for what in ("hit_rate", "hit_tokens")
        ),
        *(f"{p}_{what}" for p in ("host", "remote") for what in ("peak_pages", "evicted_pages")),
        *(f"{p}_peak_bytes" for p in ("local", "host", "remote")),
        *("instance_requests", "instance_prompt_tokens", "request_shares", "prompt_token_shares"),
    }
    assert figures["fleet"]["remote_tier"] is None
    assert figures["hit_tokens"] == json.loads(result.stdout)["bounds"][0]["hit_tokens"]


@pytest.mark.parametrize("width", ["40", "80"])
def test_every_figure_is_shown_at_any_width(trace, width):
    arguments = (trace, *POOL, "--instances", "1,2", "--route", "round-robin,prefix")
    arguments += ("--remote-tier", "none,unbounded")
    document = json.loads(run(*arguments, "--json").stdout)
    shown = run(*arguments, COLUMNS=width).stdout
    assert "capacity 60" in shown
    for figures in document["results"]:
        assert f"{figures['hit_rate']:.4f}" in shown
    for fleet in (figures["fleet"] for figures in document["results"] if "fleet" in figures):
        assert f"{fleet['remote_hit_rate']:.4f}" in shown


def test_bytes_are_said_where_a_token_has_a_price(trace):
    result = run(trace, *POOL, "--host-tier", "unbounded", "--bytes-per-token", "1KiB")
    assert result.exit_code == 0, result.stderr
    assert "host tier unbounded, write on insert: at most local " in result.stdout
    assert "KiB of K and V" in result.stdout


def test_one_of_a_kind_is_said_in_the_singular(tmp_path):
    path = write_trace(tmp_path, [hashed(4, [1]), hashed(16, [1, 2, 3, 4])])
    result = run(path, "--capacity", 8, "--page-size", 4, "--block-size", 4, "--instances", 2)
    assert "1 request larger than the pool (16 prompt tokens) left out" in result.stdout
    assert "\n1 request in " in result.stdout
    bad = run(path, "--capacity", 1)
    assert "a capacity of 1 token holds no page of 16" in bad.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--instances", "four"], "--instances: expected a number of instances such as 4"),
        (["--instances", "0"], "instances must be at least 1, got 0"),
        (["--instances", "9" * 30], "instances must be in 1 .. 1024, got 99"),
        (["--instances", "9" * 5000], "--instances: "),
        (["--route", "prefix"], "one instance serves all: say --instances too"),
        (["--instances", "2", "--route", "random"], "route must be one of round-robin, prefix"),
        (["--host-tier", "-1"], "--host-tier: expected tokens such as 64k"),
        (["--host-tier", "1e9"], "--host-tier: expected"),
        (["--remote-tier", "9EiB"], "--remote-tier: expected"),
        (["--remote-tier", "8"], "a remote tier of 8 tokens holds no page of 16"),
        (["--write", "evict"], "nothing is written without a tier"),
        (["--host-tier", "1k", "--write", "later"], "write must be one of insert, evict"),
        (["--host-tier", "1k", "--bytes-per-token", "0"], "bytes_per_token must be at least 1"),
        (["--host-tier", "1k", "--explain", "3"], "explain asks one pool"),
        (["--instances", "2", "--explain", "3"], "explain asks one pool"),
    ],
)
def test_bad_options_are_said_before_anything_is_read(arguments, message):
    result = run("never-read.jsonl", "--capacity", "1k", *arguments)
    assert result.exit_code == 1
    assert message in " ".join(result.stderr.split())
    assert "Traceback" not in result.stderr
    assert len(result.stderr) < 400
    assert result.stdout == ""


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["--capacity", "60,90,200", "--instances", "1,2", "--route", "round-robin,prefix"],
            ["capacity of each instance in tokens", "1 instance", "2 instances, prefix"],
        ),
        (
            ["--capacity", "60,90", "--instances", "1,2", "--remote-tier", "none,20,unbounded"],
            ["2 instances, round-robin, shared store unbounded", "unbounded: "],
        ),
        (
            ["--capacity", "60", "--instances", "2", "--remote-tier", "20,40,80"],
            ["store of all instances in tokens", "page size 4", "unbounded: "],
        ),
        (
            ["--capacity", "60", "--host-tier", "20,40", "--write", "insert,evict"],
            ["host tier of each instance in tokens", "1 instance, written on evict"],
        ),
    ],
)
def test_the_plot_is_against_what_varies(trace, tmp_path, arguments, words):
    pytest.importorskip("matplotlib")
    path = tmp_path / "rates.svg"
    common = ["--page-size", "4", "--block-size", "4", "--plot", path]
    result = run(trace, *arguments, *common)
    assert result.exit_code == 0, result.stderr
    for word in words:
        assert f"<!-- {word}" in path.read_text()
