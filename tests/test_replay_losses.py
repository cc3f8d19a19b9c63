"""The requests that lost most: which they are, and what is asked about them, and when."""

import json
import re

import pytest

pytest.importorskip("typer", reason="the command line needs the extra cli")

from typer.testing import CliRunner

from kvpool.cli import app
from kvpool.replay import Cell, grid, replay
from tests.helpers.traces import random_lines, write_trace

BLOCK = 8


def without_times(text):
    return re.sub(r"[\d.]+ (ms|s|min|h) ago", "some time ago", text)


@pytest.mark.parametrize("window", [1, 6])
def test_the_worst_are_kept_with_what_the_pool_said_before_the_bind(tmp_path, window):
    path = write_trace(tmp_path, random_lines(11, 80, BLOCK, num_keys=2))
    options = {"window": window, "block_size": BLOCK, "keep_matches": True}
    report = replay(path, grid([90, None], [4]), explain=5, **options)
    bounded, unbounded = report.results
    lost = sorted(
        (
            (int(could) - int(did), i)
            for i, (did, could) in enumerate(
                zip(bounded.matched_lens, unbounded.matched_lens, strict=True)
            )
            if did >= 0
        ),
        reverse=True,
    )
    assert [loss.lost_tokens for loss in bounded.losses] == [tokens for tokens, _ in lost[:5]]
    assert bounded.losses[0].lost_tokens > 0
    for loss in bounded.losses:
        assert loss.line == loss.index + 1
        assert loss.matched_tokens == bounded.matched_lens[loss.index]
        assert loss.unbounded_tokens == unbounded.matched_lens[loss.index]
        assert loss.explanation.matched_len == loss.matched_tokens
        # The history reaches back to the first request.
        assert loss.as_dict()["reason"] == "evicted"
        assert loss.as_dict()["text"] == str(loss.explanation)
    # Without a pool that is larger, what was not found was not there.
    assert all(loss.unbounded_tokens is None for loss in unbounded.losses)
    missed = [loss.prompt_tokens - loss.matched_tokens for loss in unbounded.losses]
    assert [loss.lost_tokens for loss in unbounded.losses] == missed == sorted(missed)[::-1]


def test_asking_changes_nothing(tmp_path):
    path = write_trace(tmp_path, random_lines(12, 60, BLOCK))
    options = {"window": 3, "block_size": BLOCK, "keep_matches": True}
    asked, not_asked = (replay(path, [Cell(90, 4)], explain=n, **options) for n in (100, 0))
    assert len(asked.results[0].losses) == asked.results[0].num_requests
    assert not_asked.results[0].losses == []
    for one, other in zip(asked.results, not_asked.results, strict=True):
        assert one.matched_lens.tolist() == other.matched_lens.tolist()
        assert one.evicted_pages == other.evicted_pages


def test_requests_are_named_as_the_pool_names_them(tmp_path):
    path = write_trace(
        tmp_path,
        ['{"tokens": [1], "output_length": 90}'] + ['{"tokens": [1, 2], "output_length": 0}'] * 2,
    )
    result = replay(path, [Cell(8, 1)], explain=3, bound=False).results[0]
    # The first is too large and never gets an id.
    assert sorted((loss.line, loss.request_id) for loss in result.losses) == [(2, 1), (3, 2)]


def test_the_command_shows_them(tmp_path):
    path = write_trace(tmp_path, random_lines(13, 60, BLOCK))
    arguments = ["replay", str(path), "--capacity", "90", "--page-size", "4", "--explain", "2"]
    arguments += ["--block-size", str(BLOCK), "--window", "1"]
    text = CliRunner().invoke(app, arguments)
    assert text.exit_code == 0, text.stderr
    losses = json.loads(CliRunner().invoke(app, [*arguments, "--json"]).stdout)["results"][0][
        "losses"
    ]
    assert len(losses) == 2
    assert "Lost most at 90 tokens, page size 4, lru:" in text.stdout
    for loss in losses:
        assert f"line {loss['line']}, request {loss['request_id']}: found" in text.stdout
        # Two runs, and each tells how long ago by its own clock.
        assert without_times(loss["text"]) in without_times(text.stdout)
