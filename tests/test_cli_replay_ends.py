"""How ``kvpool replay`` ends: interrupted, in a closed pipe, with a picture."""

import json
import os
import pty
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("typer", reason="the command line needs the extra cli")

from typer.testing import CliRunner

from kvpool.cli import app
from kvpool.replay import Replay
from tests.helpers.traces import random_lines, write_trace

ROOT = Path(__file__).resolve().parent.parent


def run(*arguments):
    return CliRunner().invoke(app, ["replay", *map(str, arguments)])


@pytest.fixture
def trace(tmp_path):
    return write_trace(tmp_path, random_lines(1, 40, 8))


def test_an_interrupt_prints_what_there_is(trace, monkeypatch):
    replay_of_cell, done = Replay._replay, []

    def interrupt(self, cell, num_pages):
        if len(done) == 2:
            raise KeyboardInterrupt
        done.append(cell)
        replay_of_cell(self, cell, num_pages)

    monkeypatch.setattr(Replay, "_replay", interrupt)
    arguments = (trace, "--capacity", "90,200,400", "--page-size", 4, "--block-size", 8)
    result = run(*arguments, "--json")
    assert result.exit_code == 130
    document = json.loads(result.stdout)
    assert document["complete"] is False
    assert [figures["capacity"] for figures in document["results"]] == [90]
    assert "interrupted" in result.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="reads a pseudo-terminal")
def test_the_bar_moves_and_ctrl_c_ends_it(tmp_path):
    path = write_trace(tmp_path, random_lines(2, 2000, 8))
    capacities = ",".join(str(1000 + i) for i in range(200))
    command = [sys.executable, "-m", "kvpool", "replay", str(path), "--capacity", capacities]
    main, side = pty.openpty()
    process = subprocess.Popen(
        [*command, "--block-size", "8", "--json"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=side,
        env=os.environ | {"TERM": "xterm", "COLUMNS": "120"},
    )
    os.close(side)
    shown = ""
    while process.poll() is None and len(set(re.findall(r"(\d+)%.*?hit rate", shown))) < 3:
        shown += os.read(main, 4096).decode()
    process.send_signal(signal.SIGINT)
    while True:
        try:
            shown += os.read(main, 4096).decode()
        except OSError:  # the other side is closed
            break
    output = process.stdout.read()
    process.stdout.close()
    os.close(main)
    assert process.wait() == 130
    assert re.search(r"[\d,]+ requests/s, hit rate 0\.\d+", shown)
    assert "interrupted" in shown
    assert "Traceback" not in shown
    document = json.loads(output)
    assert not document["complete"]
    assert 0 < len(document["results"]) < 200


def test_a_pipe_that_closes_early_ends_it_quietly(trace):
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    process = subprocess.Popen(
        [sys.executable, "-m", "kvpool", "replay", str(trace), "--block-size", "8"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
    )
    process.stdout.close()
    errors = process.stderr.read()
    process.stderr.close()
    assert process.wait() == 141
    assert errors == b""


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_the_plot_is_a_picture(trace, tmp_path, suffix):
    pytest.importorskip("matplotlib")
    path = tmp_path / f"rates.{suffix}"
    arguments = (trace, "--capacity", "90,200,1k", "--page-size", "1,4", "--block-size", 8)
    result = run(*arguments, "--plot", path)
    assert result.exit_code == 0, result.stderr
    data = path.read_bytes()
    if suffix == "png":
        assert data.startswith(b"\x89PNG\r\n\x1a\n")
        width, height = (int.from_bytes(data[at : at + 4], "big") for at in (16, 20))
        assert (width, height) == (900, 460)
        assert 5_000 < len(data) < 80_000
    else:
        assert "unbounded" in data.decode()
