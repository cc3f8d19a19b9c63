"""Saves that are killed and files that are damaged, in a process of their own.

`python -m tests.snapshots` is the entry point, and prints the figures.
"""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def run(seed, **counts):
    """What the command printed, by the kind of work."""
    options = [f"--{name}={number}" for name, number in counts.items()]
    result = subprocess.run(
        [sys.executable, "-m", "tests.snapshots", f"--seed={seed}", *options],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return dict(line.split(": ", 1) for line in result.stdout.splitlines())


def count(text, name):
    found = re.search(rf"\b{name} ([\d,]+)", text)
    return int(found.group(1).replace(",", "")) if found else 0


@pytest.fixture(scope="module")
def figures():
    """One short run of everything."""
    return run(1, kills=40, signals=10, rivals=20, corruptions=52)


def test_killed_saves_leave_the_old_snapshot_or_the_new_one(figures):
    assert figures["kills"].startswith("40, violations 0")
    assert count(figures["kills"], "old") == 39
    assert count(figures["kills"], "new") == 1, "the one after the rename"
    assert figures["signals"].startswith("10, violations 0")


def test_saves_of_two_processes_leave_one_of_them_whole(figures):
    assert figures["rivals"].startswith("20, violations 0")


def test_damaged_files_serve_nothing_that_does_not_verify(figures):
    text = figures["corruptions"]
    assert text.startswith("52, violations 0")
    assert count(text, "refused") >= 10
    assert count(text, "loaded in part") >= 5
    assert count(text, "pages served") > count(text, "pages dropped") > 0


@pytest.mark.slow
@pytest.mark.long
def test_five_hundred_of_each():
    found = run(0, kills=500, signals=100, rivals=100, corruptions=500)
    assert all("violations 0" in text for text in found.values())
    assert len(found) == 4
