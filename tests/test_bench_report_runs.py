"""The report measures what is missing, and keeps what was measured."""

import json

import pytest

from bench.report import command, measure, plan
from bench.report.results import Results, rounded, text_of
from bench.report.sources import files, source_hash
from tests.bench_results import CURVES, PROGRAMS, cell, contender, made_up_results, piece, stamp


@pytest.fixture
def results(tmp_path):
    return made_up_results(tmp_path / "bench" / "results")


# ---- results


def test_results_are_kept_piece_by_piece(results):
    again = Results(results.folder)
    assert list(again.cells) == ["conversation:10M:p16:w1", "synthetic:1M:p1:w32"]
    assert "machine" not in again.cells["synthetic:1M:p1:w32"]
    of = piece("growth", "match")
    again.keep(of, {"curves": CURVES["match"][:1]}, stamp(of, "def"))
    assert [c["subject"] for c in Results(results.folder).curves].count("match") == 1
    assert len(again.curves) == 1 + len(CURVES["step"])
    assert again.made("growth")["step"]["source"] == "abc"


def test_a_piece_is_kept_while_sources_and_command_are_the_same(results):
    assert results.is_kept(piece("step"), "abc")
    assert not results.is_kept(piece("step"), "other sources")
    assert not results.is_kept(piece("step", "all", "-m", "bench.step", "--quick"), "abc")
    assert not results.is_kept(piece("growth", "miss"), "abc")


def test_a_made_up_trace_is_shown_only_where_it_is_alone(results, tmp_path):
    made_up = cell("made-up", 10_000_000, 16, 1, contender("kvpool", 1.0, 0.1))
    of = piece("replay", "made-up:10M:p16:w1")
    results.keep(of, {"cells": {of.name: made_up}}, stamp(of))
    assert of.name not in results.cells
    alone = Results(tmp_path / "other")
    alone.keep(of, {"cells": {of.name: made_up}}, stamp(of))
    assert list(alone.cells) == [of.name]


def test_a_file_of_another_hand_is_no_result(tmp_path):
    (tmp_path / "step.json").write_text(json.dumps(PROGRAMS["step"]))
    assert Results(tmp_path).rows("step") == []


def test_numbers_are_rounded_and_lines_are_short():
    value = {"a": [1 / 3, 123_456, {"b": 98_765.4}], "c": ["x" * 300] * 9}
    assert rounded(value)["a"] == [0.3333, 123_456, {"b": 98_770.0}]
    text = text_of(value)
    assert json.loads(text) == value
    assert max(map(len, text.splitlines())) <= 1_000 < len(text)


# ---- measuring


def test_only_what_is_missing_is_measured(results, monkeypatch):
    said, asked = [], []
    wanted = [piece("step"), piece("limits"), piece("growth", "miss")]

    def run(of, logs, say):
        asked.append(str(of))
        return None if of.part == "growth" else PROGRAMS[of.part]

    monkeypatch.setattr(measure, "run", run)
    monkeypatch.setattr(measure, "source_hash", lambda: "def")
    results.keep(wanted[0], PROGRAMS["step"], stamp(wanted[0], "def"))
    failed = measure.measure(wanted, results, None, say=said.append)
    assert asked == ["limits", "growth miss"]
    assert failed == wanted[2:]
    assert results.is_kept(wanted[1], "def")
    made = results.made("limits")["all"]
    assert made["machine"]["kernel"]
    assert made["versions"]["kvpool"]
    assert any("1 are kept" in line for line in said)
    assert sum(line.startswith("[") for line in said) == 2


def test_a_program_writes_what_is_read(tmp_path):
    of = piece("limits", "all", "-c", "import sys; open(sys.argv[2], 'w').write('{\"rows\": []}')")
    assert measure.run(of, tmp_path, print) == {"rows": []}


def test_a_program_that_fails_is_quoted(tmp_path):
    said = []
    of = piece("limits", "all", "-c", "raise SystemExit('in vain')")
    assert measure.run(of, tmp_path, said.append) is None
    assert "in vain" in said[-1]


def test_plan_has_every_cell_and_subject(monkeypatch):
    monkeypatch.delenv("KVPOOL_TRACES", raising=False)
    said = []
    found = plan.pieces(plan.PARTS, say=said.append)
    assert next(of.name for of in found if of.part == "replay") == "made-up:10M:p16:w1"
    assert sum(of.part == "replay" for of in found) == 12
    assert any("Mooncake" in line for line in said)
    assert {of.part for of in found} == set(plan.PARTS)
    assert all(of.minutes > 0 for of in found)
    assert plan.pieces(["step"], quick=True)[0].text == "python -m bench.step --quick --rounds 1"


def test_plan_for_some_contenders_keeps_subjects_that_have_their_own():
    found = {of.name: of.text for of in plan.pieces(["growth"], contenders="kvpool,sglang-rust")}
    assert found["match"].endswith("--contenders kvpool,sglang-rust")
    assert "random pages" in found["collisions"]


def test_quick_results_stay_out_of_the_repository():
    with pytest.raises(SystemExit, match="--into"):
        command.main(["--quick"])
    with pytest.raises(SystemExit, match="no part"):
        command.main(["--parts", "nothing", "--list"])


def test_sources_are_those_that_can_change_a_figure(tmp_path):
    names = files()
    assert {"setup.py", "kvpool_ext/tree.pyx", "bench/replay/worker.py", "bench/step.py"} <= set(
        names
    )
    assert not any(name.startswith(("bench/report", "bench/gpu", "tests")) for name in names)
    (tmp_path / "setup.py").write_text("1")
    before = source_hash(tmp_path)
    assert before == source_hash(tmp_path) != source_hash()
    (tmp_path / "kvpool").mkdir()
    (tmp_path / "kvpool" / "new.py").touch()
    assert source_hash(tmp_path) != before
