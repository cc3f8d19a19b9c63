"""The soak finds faults that are planted, makes them short, and writes scripts that show them."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, Phase, given, settings

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
    "keep_stale_bits": (6, "stale bits of K"),
    "write_a_slot_too_far": (4, " of K"),  # a wrong row, or bits where nobody wrote
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
    [
        pytest.param(fault, marks=[pytest.mark.slow, pytest.mark.long] if i > 1 else [])
        for i, fault in enumerate(SHORT)
    ],
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


# Fault -> words of the finding; the timing says how many operations it takes.
OF_TIERS = {
    "believe_every_record": "",  # a wrong row, or more than was published
    "fetch_for_new_weights": "is_halted is wrong",
    "flush_nothing": "what came back from tiers",
    "copy_pages_that_are_gone": "",
    "write_on_after_the_end": "",
}


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(fault, marks=[pytest.mark.slow, pytest.mark.long] if i else [])
        for i, fault in enumerate(OF_TIERS)
    ],
)
def test_planted_fault_of_tiers_is_found(fault, monkeypatch):
    monkeypatch.setenv("KVPOOL_POISON", "1")
    with monkeypatch.context() as patch:
        plant(fault, patch.setattr)
        trace, finding = find("tiers", 400)
        assert OF_TIERS[fault] in str(finding)
        script, _ = script_of(trace)
    assert "class WildTier" in script
    assert "kvpool.soak" not in script.partition('"""\n')[2]
    compile(script, "script", "exec")


def test_script_of_a_fault_of_tiers_shows_it(monkeypatch, tmp_path):
    trace = Trace(
        PoolShape(),
        [
            ["attach_tiers", 0, 0, 0],
            ["bind", 1, [[1, 9]], 0, 0, 0, 9],
            ["write", [1], [9], 0],
            ["finish", 1, 0],
            ["round_trip", [[1, 9]], 0],
        ],
    )
    with monkeypatch.context() as patch:
        plant("flush_nothing", patch.setattr)
        script, found = script_of(trace)
    assert found.kind == "what came back from tiers"
    path = tmp_path / "script.py"
    path.write_text(script)
    assert "AssertionError" in run_script(path, "flush_nothing").stderr, script
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


def entered_page_of_two_layers(**options):
    """A request that wrote 1 token of 4 on the first layer, over a page that held another's."""
    player = Player(PoolShape(num_layers=2, num_pages=1, **options))
    player.perform(["bind", 1, [[1, 3]], 0, 0, 0, 9])
    player.perform(["write", [1], [3], 0])
    player.perform(["abort", 1])
    player.perform(["bind", 2, [[2, 1]], 2, 0, 0, 9])
    return player, ["write_part", 2, 1, 1]


def test_stale_bits_are_seen_at_the_first_write_to_a_page(monkeypatch):
    player, write = entered_page_of_two_layers()
    plant("keep_stale_bits", monkeypatch.setattr)
    with pytest.raises(Finding, match="stale bits of K") as found:
        player.perform(write)
    assert "request 2 (#2), position 1, layer 0, page 0" in str(found.value)
    assert "which is K of #1 (ended), position 1, layer 0" in str(found.value)


def test_poison_behind_what_was_written_is_stale_bits(monkeypatch):
    monkeypatch.setenv("KVPOOL_POISON", "1")
    player, write = entered_page_of_two_layers()
    plant("keep_stale_bits", monkeypatch.setattr)
    with pytest.raises(Finding, match=r"stale bits of K.*position 1.*NaN: poison"):
        player.perform(write)


@pytest.mark.parametrize("layer", [0, 1])
def test_stale_bits_are_seen_by_a_get_of_more_than_was_written(layer):
    player, write = entered_page_of_two_layers()
    player.perform(write)
    player.pool.value_layer(layer)[2] = 7
    with pytest.raises(Finding, match=f"stale bits of V.*position 2, layer {layer}"):
        player.perform(["read", [2], 0])


@pytest.mark.parametrize("how", [0, 2])
def test_rejected_rows_that_stay_are_stale_bits_unless_the_pool_may_leave_them(how, monkeypatch):
    monkeypatch.setattr("kvpool.step.rollback.StepRollback._zero", lambda self, window: None)
    player = Player(PoolShape(zero_rejected_kv=False))
    truncate = ["truncate", 1, 2, 0, 9]
    for operation in (["bind", 1, [[1, 3]], 0, 0, 0, 9], ["write", [1], [3], 0], truncate):
        player.perform(operation)
    player.perform(["read", [1], 0])
    player = Player(PoolShape())
    truncate[3] = how
    for operation in (["bind", 1, [[1, 3]], 0, 0, 0, 9], ["write", [1], [3], 0], truncate):
        player.perform(operation)
    with pytest.raises(Finding, match=r"stale bits of K.*position 1"):
        player.perform(["read", [1], 0])


@pytest.mark.slow
@pytest.mark.long
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
