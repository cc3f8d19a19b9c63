"""`bench.data_path` runs at tiny sizes, with torch and without, and writes what it found."""

import json
import os

import pytest

from bench import data_path
from bench.data import attend, moves, pools, race

pytestmark = pytest.mark.slow  # they work on larger trees than checks after every verb bear

CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1


@pytest.fixture
def without_torch(monkeypatch):
    for module in (data_path, attend, moves, pools, race):
        monkeypatch.setattr(module, "torch", None)


def run(tmp_path, *options):
    path = tmp_path / "made" / "found.json"
    data_path.main(["--quick", "--budget", "0", "--json", str(path), *options])
    return json.loads(path.read_text())


def check(found, contenders):
    assert found["machine"]["cores"] == CORES
    assert {"kvpool", "numpy", "numba"} <= set(found["versions"])
    assert {row["threads"] for row in found["rows"]} == {1, CORES}
    for row in found["rows"]:
        assert contenders <= set(row["seconds"]), row["what"]
        for seconds in row["seconds"].values():
            assert 0 < seconds["best"] <= seconds["median"]
            assert seconds["rounds"] >= 3


def test_quick_run_without_torch_leaves_its_columns_out(tmp_path, without_torch, capsys):
    found = run(tmp_path, "--dtypes", "float32")
    check(found, {"kvpool", "NumPy"})
    assert not any("torch" in row["seconds"] for row in found["rows"])
    verbs = {row["what"].split()[0].strip(",") for row in found["rows"]}
    assert verbs == {"put", "get", "zero", "decode", "prefill"}
    out, err = capsys.readouterr()
    assert "torch is not installed" in err
    assert "decode, batch 2, 640 tokens" in out


def test_quick_run_of_fp8_compares_what_was_read(tmp_path):
    found = run(tmp_path, "--dtypes", "float8_e4m3fn", "--parts", "moves")
    check(found, {"kvpool", "NumPy"} | ({"torch"} if race.torch is not None else set()))
    assert {row["dtype"] for row in found["rows"]} == {"float8_e4m3fn"}


def test_race_too_large_for_the_memory_is_left_out(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(data_path, "free_gigabytes", lambda: 0.0)
    assert run(tmp_path, "--dtypes", "float32", "--parts", "attention")["rows"] == []
    assert "left out: float32" in capsys.readouterr().err


def test_threads_are_given_back(without_torch):
    before = os.sched_getaffinity(0)
    with race.on_threads(1):
        assert len(os.sched_getaffinity(0)) == 1
    assert os.sched_getaffinity(0) == before
