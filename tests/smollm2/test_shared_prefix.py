"""Two processes share prefixes: the example runs, over a directory and over Mooncake."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run(*arguments):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return subprocess.run(
        [sys.executable, "-m", "examples.shared_prefix", "--chats", "2", *arguments],
        cwd=ROOT,
        env={**environment, "COLUMNS": "160"},
        capture_output=True,
        text=True,
        timeout=300,
    )


def rows(printed):
    """Own cache, from store, computed, of each chat of each round."""
    found = re.findall(r"^│ [^│]*│ +\d+ │ +\d+ │ +(\d+) │ +(\d+) │ +(\d+) │", printed, re.M)
    return [tuple(map(int, each)) for each in found]


@pytest.mark.slow
def test_second_process_answers_with_the_pages_of_the_first():
    done = run("--directory", "-")
    assert done.returncode == 0, done.stdout + done.stderr
    (_, cold, _), _, (_, fetched, computed), _ = rows(done.stdout)
    assert (cold, computed) == (0, 1)
    assert fetched > 500
    assert "the same, token for token" in done.stdout


@pytest.mark.slow
def test_it_does_so_through_mooncake_and_answers_the_same_when_the_master_is_killed():
    from tests.helpers.mooncake import why_no_mooncake

    if reason := why_no_mooncake():
        pytest.skip(reason)
    done = run("--start-master")
    assert done.returncode == 0, done.stdout + done.stderr
    cold, _, warm, _, killed, _ = rows(done.stdout)
    assert warm[1] > 500
    assert killed == cold
    assert "the same, token for token" in done.stdout


def test_it_says_which_store_to_give():
    done = run()
    assert done.returncode == 2
    assert "give one of --start-master" in " ".join(re.sub(r"[│╭╮╰╯─]", " ", done.stderr).split())
