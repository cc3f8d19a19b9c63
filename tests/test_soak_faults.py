"""The soak finds faults that are planted, makes them short, and writes scripts that show them."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, Phase, given, settings

from kvpool.soak.command import main
from kvpool.soak.drawing import RandomDraw
from kvpool.soak.finding import Finding
from kvpool.soak.player import Player
from kvpool.soak.profiles import PROFILES
from kvpool.soak.script import script_of
from kvpool.soak.session import shrink
from kvpool.soak.shrink import Shrinker, simpler_operations
from kvpool.soak.trace import PoolShape, Trace
from tests.helpers.soak_draws import HypothesisDraw, traffic
from tests.helpers.soak_faults import plant

ROOT = Path(__file__).resolve().parents[1]
# Fault -> operations that are left at most, and words of the finding.
SHORT = {
    "write_a_slot_too_far": (4, "a wrong row of K"),
    "mix_layers_up": (4, "a wrong row of K"),
    "publish_a_page_too_many": (4, "tokens that a finish or checkpoint inserted"),
    "skip_a_lock": (8, ""),
    "forget_a_failure": (1, "bind_failures is wrong"),
}
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT)}


def find(profile, num_operations=150):
    """The first failing episode of a profile: its trace and what was found."""
    for seed in range(40):
        draw = RandomDraw(seed)
        player = Player(PROFILES[profile].draw_shape(draw))
        operations = []
        try:
            for operation in traffic(profile, player, draw, num_operations):
                operations.append(operation)
                player.perform(operation)
            player.finish_up()
        except Finding as finding:
            return Trace(player.shape, operations), finding
    raise AssertionError("40 episodes found nothing")


def run_script(path, fault):
    command = [sys.executable, "-m", "tests.helpers.soak_faults", fault, str(path)]
    return subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True)


@pytest.mark.parametrize(
    "fault",
    [pytest.param(fault, marks=[pytest.mark.slow] if i else []) for i, fault in enumerate(SHORT)],
)
def test_planted_fault_is_found_and_its_script_shows_it(fault, monkeypatch, tmp_path):
    with monkeypatch.context() as patch:
        plant(fault, patch.setattr)
        trace, finding = find("chat")
        most, words = SHORT[fault]
        assert words in str(finding)
        short = shrink(trace, finding.kind, 4)
        script, again = script_of(short)
    assert again.kind == finding.kind
    assert len(short.operations) <= most, short.operations
    path = tmp_path / "script.py"
    path.write_text(script)
    shown = run_script(path, fault)
    assert shown.returncode == 1, script
    assert "Error" in shown.stderr.splitlines()[-1], shown.stderr
    assert "kvpool.soak" not in script.partition('"""\n')[2]
    if fault != "skip_a_lock":  # a pool that holds its locks may refuse binds of this script
        right = run_script(path, "none")
        assert right.returncode == 0, right.stderr


def test_wrong_row_names_request_page_owner_and_whose_row_it_is(monkeypatch):
    plant("mix_layers_up", monkeypatch.setattr)
    player = Player(PoolShape(num_layers=2))
    player.perform(["bind", 5, [[1, 6]], 2, 0, 0, 9])
    player.perform(["write", [5], [6], 0])
    with pytest.raises(Finding) as found:
        player.perform(["read", [5], 0])
    words = str(found.value)
    assert "request 1 (#5), position 0, layer 1, page 0 (request 1, positions [0, 4))" in words
    assert "which is K of #5 (bound), position 0, layer 0" in words


@pytest.mark.slow
def test_hypothesis_shrinks_a_planted_fault_to_a_few_operations(monkeypatch):
    plant("write_a_slot_too_far", monkeypatch.setattr)
    failing = []

    @settings(
        max_examples=100,
        database=None,
        derandomize=True,
        deadline=None,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,
    )
    @given(data=st.data())
    def soak(data):
        draw = HypothesisDraw(data)
        player = Player(PROFILES["speculative"].draw_shape(draw))
        operations = []
        try:
            for operation in traffic("speculative", player, draw, 20):
                operations.append(operation)
                player.perform(operation)
        except Finding:
            failing[:] = operations
            raise

    with pytest.raises(Finding):
        soak()
    assert len(failing) <= 8, failing  # of up to 20


# ---- shrinking by itself


def test_shrinking_keeps_what_is_needed_and_nothing_else():
    operations = [["bind", i, [[i, 8], [i + 1, 9]], 5, 0, 0, i] for i in range(40)]
    needed = [operations[7], operations[23]]

    def fails(trace):
        handles = [operation[1] for operation in trace.operations]
        return {7, 23} <= set(handles)

    short = Shrinker(Trace(PoolShape(num_layers=3, num_pages=100), operations), fails, 30).run()
    assert len(short.operations) == len(needed)
    assert short.operations == [["bind", i, [], 0, 0, 0, 0] for i in (7, 23)]
    assert short.shape == PoolShape(num_pages=1, vocabulary=50_000)


def test_shrinking_stops_when_the_time_is_over():
    trace = Trace(PoolShape(), [["check_now"]] * 1000)
    start = time.monotonic()
    Shrinker(trace, lambda _: time.sleep(0.01) or False, 0.2).run()
    assert time.monotonic() - start < 2


def test_simpler_operations_are_smaller_and_leave_the_first_alone():
    operation = ["write", [3, 4], [5, 0], 2]
    before = json.dumps(operation)
    found = list(simpler_operations(operation))
    assert ["write", [4], [5, 0], 2] in found
    assert ["write", [3, 4], [2, 0], 2] in found
    assert ["write", [3, 4], [5, 0], 1] in found
    assert json.dumps(operation) == before


# ---- the command


def planted(fault, folder):
    """An environment in which every Python has a fault."""
    code = f"from tests.helpers.soak_faults import plant\nplant({fault!r})\n"
    (folder / "sitecustomize.py").write_text(code)
    return ENVIRONMENT | {"PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)])}


def soak(folder, environment, *arguments):
    command = [sys.executable, "-m", "kvpool.soak", "--out", str(folder / "out"), *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)


@pytest.mark.slow
def test_command_prints_the_script_and_replays_the_trace(tmp_path):
    environment = planted("write_a_slot_too_far", tmp_path)
    arguments = ("--profile", "speculative", "--seconds", "30", "--shrink-seconds", "2")
    ran = soak(tmp_path, environment, *arguments)
    assert ran.returncode == 1, ran.stderr
    assert "FOUND in profile speculative: a wrong row of K" in ran.stdout
    assert "run by itself, it fails too" in ran.stdout
    trace = tmp_path / "out" / "failure.jsonl"
    assert f"again: python -m kvpool.soak --replay {trace}" in ran.stdout
    assert (tmp_path / "out" / "failure.py").read_text().rstrip() in ran.stdout
    copy = tmp_path / "copy.jsonl"
    trace.rename(copy)
    again = soak(tmp_path, environment, "--replay", str(copy), "--json", "--shrink-seconds", "0")
    assert again.returncode == 1, again.stderr
    assert json.loads(again.stdout)["failure"]["kind"] == "a wrong row of K"
    right = soak(tmp_path, ENVIRONMENT, "--replay", str(copy))
    assert right.returncode == 0, right.stdout


@pytest.mark.slow
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


def test_interrupt_ends_with_130_and_the_table(tmp_path):
    command = [sys.executable, "-m", "kvpool.soak", "--seconds", "60", "--profile", "beam"]
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
    assert out.decode().splitlines()[1].startswith("beam")
    assert not list(tmp_path.iterdir())


def wait_for_operations(folder):
    for _ in range(600):
        if any(path.stat().st_size > 1000 for path in folder.glob("*/running.jsonl")):
            return
        time.sleep(0.05)
    raise AssertionError("no operation within 30 s")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--device", "tpu"], "device must be"),
        (["--replay", "nowhere.jsonl"], "nowhere.jsonl"),
    ],
)
def test_usage_is_2_and_says_what_is_wrong(arguments, words, capsys):
    assert main(arguments) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments", [["--profile", "quiet"], ["--seconds", "-1"], ["--seconds", "nan"]]
)
def test_arguments_that_argparse_refuses_are_2(arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert "error: argument" in capsys.readouterr().err
