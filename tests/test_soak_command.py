"""The soak as a command: what it prints, how it ends, and what it refuses."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvpool.soak.command import main

ROOT = Path(__file__).resolve().parents[1]
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT)}


def planted(fault, folder):
    """An environment in which every Python has a fault."""
    code = f"from tests.helpers.soak_faults import plant\nplant({fault!r})\n"
    (folder / "sitecustomize.py").write_text(code)
    return ENVIRONMENT | {"PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)])}


def soak(folder, environment, *arguments):
    command = [sys.executable, "-m", "kvpool.soak", "--out", str(folder / "out"), *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)


@pytest.mark.slow
@pytest.mark.long
def test_command_prints_the_script_and_replays_the_trace(tmp_path):
    environment = planted("write_a_slot_too_far", tmp_path)
    arguments = ("--profile", "speculative", "--seconds", "30", "--shrink-seconds", "2")
    ran = soak(tmp_path, environment, *arguments)
    assert ran.returncode == 1, ran.stderr
    assert "FOUND in profile speculative: " in ran.stdout
    assert "run by itself, it fails too" in ran.stdout
    trace = tmp_path / "out" / "failure.jsonl"
    assert f"again: python -m kvpool.soak --replay {trace}" in ran.stdout
    assert (tmp_path / "out" / "failure.py").read_text().rstrip() in ran.stdout
    copy = tmp_path / "copy.jsonl"
    trace.rename(copy)
    again = soak(tmp_path, environment, "--replay", str(copy), "--json", "--shrink-seconds", "0")
    assert again.returncode == 1, again.stderr
    assert json.loads(again.stdout)["failure"]["kind"] in ran.stdout
    right = soak(tmp_path, ENVIRONMENT, "--replay", str(copy))
    assert right.returncode == 0, right.stdout


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize(
    ("fault", "limit_s", "words"), [("crash", "60", "a crash (SIGSEGV)"), ("hang", "3", "a hang")]
)
def test_crash_and_hang_leave_a_short_trace(fault, limit_s, words, tmp_path):
    environment = planted(fault, tmp_path)
    limits = ("--operation-seconds", limit_s, "--shrink-seconds", "15", "--seconds", "60")
    ran = soak(tmp_path, environment, "--profile", "agents", "--json", *limits)
    assert ran.returncode == 1, ran.stderr
    failure = json.loads(ran.stdout)["failure"]
    assert failure["kind"] == words
    assert "again when it was replayed" in failure["details"]
    assert "in happen" in failure["traceback"] or "soak_faults.py" in failure["traceback"]
    assert failure["shrunk_operations"] < failure["operations"]
    script = Path(failure["script"]).read_text()
    assert "checkpoint_request" in script.splitlines()[-1]


@pytest.mark.parametrize("profile", ["beam", "tiers"])
def test_interrupt_ends_with_130_and_the_table(profile, tmp_path):
    command = [sys.executable, "-m", "kvpool.soak", "--seconds", "60", "--profile", profile]
    child = subprocess.Popen(
        command,
        cwd=ROOT,
        env=ENVIRONMENT | {"TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    wait_for_operations(tmp_path)
    os.killpg(child.pid, signal.SIGINT)
    out, _ = child.communicate(timeout=30)
    assert child.returncode == 130
    assert out.decode().splitlines()[1].startswith(profile)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["int", "term"]
)
def test_end_before_the_first_operation_is_orderly_too(number, code, tmp_path):
    command = [sys.executable, "-m", "kvpool.soak", "--seconds", "60", "--json"]
    environment = ENVIRONMENT | {"TMPDIR": str(tmp_path)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    child = subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True, **pipes)
    wait_until(lambda: list(tmp_path.iterdir()))
    os.killpg(child.pid, number)
    out, said = child.communicate(timeout=30)
    assert child.returncode == code, said
    assert json.loads(out)["interrupted"] is True
    assert b"Traceback" not in said
    assert not list(tmp_path.iterdir())


def test_end_while_the_folder_is_made_leaves_none(tmp_path):
    code = """
import os, signal, sys, tempfile
from kvpool.soak import command
make = tempfile.mkdtemp
def made_and_interrupted(**options):
    folder = make(**options)
    os.kill(os.getpid(), signal.SIGINT)
    return folder
tempfile.mkdtemp = made_and_interrupted
sys.exit(command.main(["--seconds", "60", "--json"]))
"""
    environment = ENVIRONMENT | {"TMPDIR": str(tmp_path)}
    run = [sys.executable, "-c", code]
    ran = subprocess.run(run, env=environment, capture_output=True, timeout=30)
    assert ran.returncode == 130, ran.stderr
    assert json.loads(ran.stdout)["interrupted"] is True
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(sys.platform != "linux", reason="only there a process can ask for it")
def test_worker_ends_with_a_parent_that_was_killed(tmp_path):
    command = [sys.executable, "-m", "kvpool.soak", "--seconds", "60", "--profile", "chat"]
    child = subprocess.Popen(
        command, cwd=ROOT, env=ENVIRONMENT | {"TMPDIR": str(tmp_path)}, stderr=subprocess.PIPE
    )
    wait_for_operations(tmp_path)
    child.kill()
    # Nobody has the pipe any more: the worker had it too.
    child.communicate(timeout=10)


def wait_for_operations(folder):
    traces = "*/running.jsonl"
    wait_until(lambda: any(path.stat().st_size > 1000 for path in folder.glob(traces)))


def wait_until(happened):
    for _ in range(1500):
        if happened():
            return
        time.sleep(0.02)
    raise AssertionError("nothing happened within 30 s")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--device", "tpu"], "device must be"),
        (["--replay", "nowhere.jsonl"], "nowhere.jsonl"),
        (["--out", "/proc/self/nowhere"], "--out: "),
        (["--out", __file__], "--out: "),
    ],
)
def test_usage_is_2_and_says_what_is_wrong(arguments, words, capsys):
    assert main(arguments) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        ["--profile", "quiet"],
        ["--seconds", "-1"],
        ["--seconds", "nan"],
        ["--operation-seconds", "0.5"],
    ],
)
def test_arguments_that_argparse_refuses_are_2(arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert "error: argument" in capsys.readouterr().err
