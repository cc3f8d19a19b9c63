"""``kvpool doctor``: tables and JSON, exit codes, and a real one among broken packages."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvpool.cli import app
from kvpool.cli import doctor as command
from kvpool.doctor import Finding, Report, Section
from tests.helpers import packages
from tests.helpers.packages import PackageFolder

ROOT = Path(__file__).resolve().parents[1]
KERNEL = {"name": "kvpool_zero_x", "kernel": "zero", "bytes": 6176, "registers": 18, "stack": 0}
KERNEL |= {"spills": 0, "error": "", "seconds": 0.26}
HEALTHY = Report(
    (
        Section("Packages", (Finding("NumPy", "ok", "2.4.6"), Finding("CuPy", "absent", "none"))),
        Section("Fit", (Finding("torch", "note", "warns [loudly]", "look at it"),)),
    ),
    {"ptx": "8.8", "kernels": [KERNEL, {**KERNEL, "registers": 1024}]},
    (Finding("CPU pool", "ok", "fine"), Finding("demo", "absent", "no gguf", "make demo")),
)
SICK = Report(
    (
        Section(
            "Packages", (Finding("numba", "broken", "it does not", "pip install " + "x" * 90),)
        ),
    ),
    {},
    (Finding("CPU pool", "unfit", "no"),),
)


@pytest.fixture
def doctor(monkeypatch):
    """A function that runs the command on a report, and keeps what it was asked for."""

    def run(report, *args, columns=80):
        asked = []

        def examine(*given):
            asked.append(given[:2])
            given[2]("looking")
            return report

        monkeypatch.setattr(command, "examine", examine)
        monkeypatch.setenv("COLUMNS", str(columns))
        result = CliRunner().invoke(app, ["doctor", *args])
        result.asked = asked
        return result

    return run


def test_a_healthy_machine_exits_with_0(doctor):
    result = doctor(HEALTHY)
    assert (result.exit_code, result.stderr) == (0, "")
    lines = [line.rstrip() for line in result.stdout.splitlines()]
    assert "  NumPy  ok      2.4.6" in lines
    assert "  CuPy   absent  none" in lines
    assert "  torch  note  warns [loudly]" in lines
    assert "  CPU pool  yes  fine" in lines
    assert "  demo      no   no gguf" in lines
    assert lines[-7:-1] == [
        "What to do",
        "  torch:",
        "    look at it",
        "  demo:",
        "    make demo",
        "",
    ]
    assert lines[-1] == "All that is installed works."


def test_kernels_are_a_row_each(doctor):
    cells = doctor(HEALTHY).stdout.replace("│", "|").splitlines()
    (row,) = (line for line in cells if "zero" in line)
    # 2 variants, the most registers, no spills, 2 * 6176 bytes, 2 * 0.26 seconds
    assert [cell.strip() for cell in row.strip("|").split("|")] == [
        *("zero", "2", "1,024", "0", "12,352", "0.5")
    ]


def test_a_sick_machine_exits_with_3_and_commands_are_whole_lines(doctor):
    result = doctor(SICK, columns=40)
    assert result.exit_code == 3
    assert "    pip install " + "x" * 90 in result.stdout.splitlines()
    assert result.stdout.splitlines()[-1] == "Not everything works: numba, CPU pool."


def test_a_narrow_terminal_gets_two_lines_a_finding(doctor):
    lines = [line.rstrip() for line in doctor(HEALTHY, columns=40).stdout.splitlines()]
    assert lines[lines.index("  CuPy: absent") + 1] == "    none"
    assert max(map(len, lines)) <= 40


def test_json_has_the_same_facts(doctor):
    for report, code in ((HEALTHY, 0), (SICK, 3)):
        result = doctor(report, "--json")
        assert result.exit_code == code
        assert json.loads(result.stdout) == json.loads(json.dumps(report.as_dict()))


@pytest.mark.parametrize(
    ("args", "asked"),
    [
        ([], (None, True)),
        (["--no-compile"], (None, False)),
        (["--capability", "8.0"], ((8, 0), True)),
        (["--capability", "sm_120"], ((12, 0), True)),
        (["--capability", "103"], ((10, 3), True)),
    ],
)
def test_options_are_passed_on(args, asked, doctor):
    assert doctor(HEALTHY, *args).asked == [asked]


@pytest.mark.parametrize(
    ("text", "said"),
    [("7.5", "8.0 and later"), ("nine", "such as 9.0"), ("", "such as 9.0"), ("9.0.1", "such as")],
)
def test_a_capability_that_is_none_is_refused(text, said, doctor):
    result = doctor(HEALTHY, "--capability", text)
    assert (result.exit_code, result.asked) == (1, [])
    assert result.stderr.startswith("error: --capability: ")
    assert said in result.stderr


def test_help_has_examples():
    result = CliRunner().invoke(app, ["doctor", "--help"])
    assert result.exit_code == 0
    assert "kvpool doctor --capability 8.0" in result.stdout


def test_among_broken_packages_a_real_one_tells_and_does_not_crash(tmp_path):
    folder = PackageFolder(tmp_path)
    folder.module("torch", packages.CRASH)
    folder.metadata("torch", "2.9.0+cu128")
    folder.module("cupy", "raise ImportError('libcublas.so.12: cannot open shared object file')")
    folder.metadata("cupy-cuda12x", "14.0.0")
    folder.metadata("cupy-cuda13x", "14.0.0")
    folder.module("flashinfer", packages.EXIT)
    folder.metadata("flashinfer-python", None)
    path = os.pathsep.join([str(tmp_path), str(ROOT), os.environ.get("PYTHONPATH", "")])
    run = subprocess.run(
        [sys.executable, "-m", "kvpool", "doctor", "--no-compile", "--json"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert (run.returncode, "Traceback" in run.stderr) == (3, False), run.stderr
    found = {}
    report = json.loads(run.stdout)
    for finding in report["findings"]:
        found.setdefault(finding["name"], []).append(finding)
    torch, cupy, flashinfer = found["torch"][0], found["CuPy"], found["FlashInfer"][0]
    assert torch["state"] == cupy[0]["state"] == flashinfer["state"] == "broken"
    assert torch["value"] == "2.9.0+cu128 does not work: its process died of SIGSEGV"
    assert "libcublas.so.12" in cupy[0]["value"]
    assert "SystemExit: goodbye" in flashinfer["value"]
    assert cupy[1]["value"] == (
        "cupy-cuda13x and cupy-cuda12x are installed and overwrite each other"
    )
    works = {finding["name"]: finding["state"] for finding in report["works"]}
    assert (works["CPU pool"], works["torch border"]) == ("ok", "broken")
    assert report["healthy"] is False
