"""The report judges right, and writes pages that nobody edits by hand."""

import re

import pytest

from bench.curves.targets import MET, MISSED, UNKNOWN
from bench.report import command, pages, targets
from bench.report.markdown import NOT_MEASURED
from bench.report.results import Results
from bench.report.sections import SECTIONS
from bench.report.sources import ROOT
from tests.bench_results import made_up_results

COMMITTED = Results(ROOT / "bench" / "results")
LARGEST = {"*.json": 300 << 10, "*.png": 60 << 10}  # bytes of a file in the repository


@pytest.fixture
def results(tmp_path):
    return made_up_results(tmp_path / "bench" / "results")


def judged(results):
    return {row["line"]: row for row in targets.summary(targets.verdicts(results))}


# ---- the pages of the repository


@pytest.mark.parametrize("name", pages.PAGES)
def test_committed_page_says_what_the_committed_results_say(name):
    text = (ROOT / name).read_text(encoding="utf-8")
    assert pages.filled(text, COMMITTED) == text, "python -m bench.report --pages-only"


def test_every_section_is_on_a_page():
    text = "".join((ROOT / name).read_text(encoding="utf-8") for name in pages.PAGES)
    assert set(re.findall(r"<!-- results:([\w-]+) -->", text)) == set(SECTIONS)


def test_committed_files_are_small():
    for pattern, largest in LARGEST.items():
        for folder in (ROOT / "bench" / "results", ROOT / "docs" / "pictures"):
            large = [path.name for path in folder.glob(pattern) if path.stat().st_size > largest]
            assert not large


# ---- pages


def test_blocks_are_filled_and_filling_again_changes_nothing(results):
    end = "<!-- /results -->\n"
    frame = f"a\n<!-- results:limits -->\nold\n{end}b\n<!-- results:rows -->\n{end}"
    once = pages.filled(frame, results)
    assert "old" not in once
    assert "| copy 4 KB | 0.33 | 1.00 |" in once
    assert once.startswith("a\n<!-- results:limits -->\n\n| what |")
    assert once.endswith("|\n\n<!-- /results -->\n")
    assert pages.filled(once, results) == once


@pytest.mark.parametrize("name", SECTIONS)
def test_section_without_results_says_so(name, tmp_path):
    assert NOT_MEASURED in SECTIONS[name](Results(tmp_path)) or name == "targets"


@pytest.mark.parametrize(
    ("frame", "message"),
    [
        ("<!-- results:nothing -->\n<!-- /results -->\n", "no section 'nothing'"),
        ("<!-- results:limits -->\n", "no end"),
        ("<!-- results:rows -->\n<!-- results:limits -->\n<!-- /results -->\n", "no end"),
    ],
)
def test_markers_that_do_not_fit_are_refused(frame, message, results):
    with pytest.raises(pages.PageError, match=message):
        pages.filled(frame, results)


def test_pages_only_writes_both_pages_from_the_json(results, tmp_path, capsys):
    assert command.main(["--pages-only", "--into", str(tmp_path)]) == 0
    readme = (tmp_path / "README.md").read_text()
    page = (tmp_path / "docs" / "performance.md").read_text()
    assert "| mean 10.0 us, p99 50.0 us | 2.00 x the memory floor; SGLang's Rust" in readme
    assert "docs/pictures/replay_headline.png" in readme
    assert "(pictures/replay_headline.png)" in page
    assert "| kvpool | 10.0 | 5.00 | 50.0 |" in page
    assert "| synthetic | 1M | 1 | 32 | 10.0 / 30.0 |" in page
    assert "a processor, 2 cores" in page
    assert "- vllm-sha256: a note" in page
    assert command.main(["--pages-only", "--into", str(tmp_path)]) == 0
    assert capsys.readouterr().out.count("says so already") == 2


# ---- targets


def test_targets_are_judged_by_their_worst_row(results):
    rows = judged(results)

    def verdict(start):
        (row,) = (row for line, row in rows.items() if line.startswith(start))
        return row["measured"], row["verdict"]

    first = "conversation:10M:p16:w1: "
    assert verdict(f"{first}mean, times faster than SGLang's Rust") == ("16.0", MET)
    assert verdict(f"{first}mean, times the prefaulted floor") == ("2.00", MET)
    assert verdict(f"{first}p99") == ("8.0", f"{MISSED} in 1 of 1")
    assert verdict("every cell of page 1:") == ("4.5", MET)
    assert verdict("every cell of page 1, with checkpoints") == ("3.5", f"{MISSED} in 1 of 1")
    assert verdict("every cell of page 16 and 64:") == ("16.0", MET)
    assert verdict("every cell of page 1 and 16, free list") == (
        "1.60",
        f"{MISSED} in 1 of 1; 1 not measured",
    )
    assert verdict("match of 128k cached tokens, 1 node:") == ("1.40", f"{MET}; 5 not measured")
    assert verdict("match of 128k cached tokens, 256 nodes:")[1] == UNKNOWN
    assert verdict("decode step, batch 256, eager") == ("10.0", f"{MISSED} in 1 of 2")
    assert verdict("decode step, batch 256, graph") == ("25.0", MET)
    assert verdict("hit rate at window 1:") == ("+1.00", f"{MISSED} in 1 of 2")
    assert verdict("hit rate at window 32 with a checkpoint") == ("+0.00", MET)
    put, get = (f"{verb} of 4,096 rows of 2 KB on the CPU, float32" for verb in ("put", "get"))
    assert verdict(f"{put}, bfloat16: times faster") == ("0.90", f"{MISSED} in 1 of 2")
    assert verdict(f"{put}, bfloat16: times memcpy") == ("2.50", f"{MISSED} in 1 of 2")
    assert verdict(f"{get}, bfloat16: times memcpy to new memory") == ("1.11", MET)
    assert verdict("put of 4,096 rows of 2 KB on the CPU, FP8: times memcpy")[1] == UNKNOWN
    assert verdict("paged decode attention") == ("5.00", MET)


def test_missed_measurements_are_named(results):
    text = SECTIONS["missed"](results)
    assert "synthetic:1M:p1:w32: mean of sglang-py, times that of kvpool-checkpoint" in text
    assert "put, 4,096 rows, float32, 2 cores: times memcpy | <= 2.00 | 2.50 |" in text
    assert "page 16 and 64" not in text


# ---- pictures


@pytest.mark.slow  # a picture takes a second or two
def test_pictures_are_drawn_small(results, tmp_path):
    pytest.importorskip("matplotlib")
    from bench.report import pictures

    pictures.draw_all(results, tmp_path / "pictures")
    drawn = {path.name: path.stat().st_size for path in (tmp_path / "pictures").iterdir()}
    assert set(drawn) == {"replay_headline.png", "replay_cells.png", "growth.png"}
    assert max(drawn.values()) < LARGEST["*.png"]
