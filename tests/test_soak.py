"""The soak finds nothing in a pool that is right: a few seconds of it, for every profile.

`KVPOOL_SOAK_SECONDS=60 pytest -m soak` runs a minute of each.
"""

import json
import os
import random
from dataclasses import replace

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, note, settings

from kvpool.dtypes import KVDType
from kvpool.soak.cached import Cached
from kvpool.soak.command import main
from kvpool.soak.drawing import RandomDraw
from kvpool.soak.finding import Finding
from kvpool.soak.lineage import Lineage, tokens_of
from kvpool.soak.player import Player
from kvpool.soak.prints import RowCode
from kvpool.soak.profiles import PROFILES
from kvpool.soak.script import script_of
from kvpool.soak.trace import PoolShape, Trace, TraceError, TraceFile
from tests.helpers.soak_draws import HypothesisDraw, episode, traffic

SECONDS = float(os.environ.get("KVPOOL_SOAK_SECONDS") or 0.5)
DTYPES = ("float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")


@pytest.mark.soak
@pytest.mark.slow
@pytest.mark.parametrize("profile", PROFILES)
def test_soak_of_a_right_pool_finds_nothing(profile, capsys):
    code = main(["--profile", profile, "--seconds", str(SECONDS), "--seed", "1", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert code == 0, found
    assert found["profiles"][profile]["operations"] > 0


@pytest.mark.parametrize("profile", PROFILES)
def test_traffic_of_fixed_seeds_reads_evicts_and_is_refused(profile):
    players = [episode(profile, seed, num_operations=80) for seed in range(4)]
    assert sum(player.rows_read for player in players) > 100
    assert sum(player.refusals for player in players) > 0
    assert sum(player.hits for player in players) > 0


def test_traffic_of_tiers_fetches_pages_and_brings_them_to_other_pools():
    players = [episode("tiers", seed, num_operations=200) for seed in range(4)]
    assert sum(player.fetched for player in players) > 0
    player = Player(PoolShape(num_pages=8))
    player.play(
        [
            ["attach_tiers", 0, 1, 0],
            ["bind", 1, [[1, 17]], 0, 2, 0, 9],
            ["write", [1], [17], 0],
            ["finish", 1, 0],
            ["flush_tiers"],
            ["reopen"],
            ["attach_tiers", 1, 2, 0],
            ["prefetch", 5, [[1, 13]], 2, 1],
            ["wait_for_fetch", 5],
            ["bind", 2, [[1, 13]], 0, 2, 0, 9],
        ]
    )
    assert (player.fetched, player.hits, player.matched_tokens) == (3, 1, 12)


def test_what_nobody_published_is_no_match():
    cached = Cached(4)
    code = RowCode("float32", "float32", 1, 1, 4)
    lineage = Lineage([[1, 13]], 9, 0, 50_000, code)
    other = Lineage([[1, 13]], 9, 0, 50_000, code, weights=1)
    cached.publish(lineage, 8)
    assert cached.most(lineage, 12) == 8
    assert cached.most(other, 12) == 0
    cached.write_all()
    cached.clear_tree()
    assert cached.most(lineage, 12) == 0
    cached.fetch(lineage, 0, 12)
    assert cached.most(lineage, 12) == 8


@pytest.mark.parametrize("profile", PROFILES)
@settings(max_examples=15)
@given(data=st.data())
def test_traffic_that_hypothesis_draws_finds_nothing(profile, data):
    draw = HypothesisDraw(data)
    player = Player(PROFILES[profile].draw_shape(draw))
    operations = []
    try:
        for operation in traffic(profile, player, draw, draw.integer(1, 25)):
            operations.append(operation)
            player.perform(operation)
        player.finish_up()
    except Finding:
        note(script_of(Trace(player.shape, operations))[0])
        raise


@pytest.mark.parametrize("profile", PROFILES)
def test_any_part_of_a_trace_can_be_played(profile):
    rng = random.Random(profile)
    trace = recorded(profile, 3)
    for _ in range(8):
        kept = [operation for operation in trace.operations if rng.random() < 0.6]
        Player(trace.shape).play(kept)
    Player(replace(trace.shape, page_size=1, dtype="float16", scale=1)).play(trace.operations)


# Which page a call of a script names must not depend on when another one arrived.
@pytest.mark.parametrize("profile", [name for name in PROFILES if name != "tiers"])
def test_script_of_a_trace_that_finds_nothing_runs(profile):
    """What is written down is what was called: the calls alone raise nothing."""
    for seed in range(3):
        script, finding = script_of(recorded(profile, seed, 60))
        assert finding is None
        exec(compile(script, "script", "exec"), {"__name__": "script"})


def test_same_seed_makes_the_same_traffic():
    assert recorded("adversarial", 5) == recorded("adversarial", 5)
    assert recorded("adversarial", 5) != recorded("adversarial", 6)


def recorded(profile, seed, num_operations=150):
    draw = RandomDraw(seed)
    player = Player(PROFILES[profile].draw_shape(draw))
    operations = []
    for operation in traffic(profile, player, draw, num_operations):
        operations.append(operation)
        player.perform(operation)
    return Trace(player.shape, operations)


# ---- traces


def test_trace_survives_its_file_and_a_line_that_a_crash_cut_short(tmp_path):
    trace = recorded("chat", 1, 20)
    path = tmp_path / "trace.jsonl"
    trace.write(path)
    assert Trace.read(path) == trace
    running = TraceFile(path)
    running.start(trace.shape)
    for operation in trace.operations:
        running.add(operation)
    running.close()
    assert Trace.read(path) == trace
    path.write_bytes(path.read_bytes()[:-3])
    assert Trace.read(path) == Trace(trace.shape, trace.operations[:-1])


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ([], "is empty"),
        (["[1]"], "not the header"),
        (["[" * 100_000], "not the header"),
        (['{"kvpool_soak": 1, "pool": {}}', "[" * 100_000], ":2: "),
        (['{"kvpool_soak": 1, "pool": {}}'], "has no operation to play"),
        (['{"kvpool_soak": 2, "pool": {}}'], "format 2"),
        (['{"kvpool_soak": 1, "pool": {"num_pages": 0}}'], "num_pages must be in 1"),
        (['{"kvpool_soak": 1, "pool": {"num_pages": true}}'], "num_pages must be int"),
        (['{"kvpool_soak": 1, "pool": {"num_pages": 4000000000}}'], "bytes"),
        (['{"kvpool_soak": 1, "pool": {"dtype": "int4"}}'], "dtype must be one of"),
        (['{"kvpool_soak": 1, "pool": {"eviction": "best"}}'], "eviction must be one of"),
        (['{"kvpool_soak": 1, "pool": {"colour": 1}}'], "colour"),
        (['{"kvpool_soak": 1, "pool": {}}', "nonsense"], ":2: "),
        (['{"kvpool_soak": 1, "pool": {}}', '["abort", 1e99]'], "expected integers"),
        (['{"kvpool_soak": 1, "pool": {}}', '["abort", 99999999999999]'], "expected integers"),
        (
            ['{"kvpool_soak": 1, "pool": {}}', '["bind", 1, [[1, 999999999]], 0, 0, 0, 0]'],
            "tokens",
        ),
        (['{"kvpool_soak": 1, "pool": {}}', '["explode", 1]'], "no verb 'explode'"),
        (['{"kvpool_soak": 1, "pool": {}}', '["perform", []]'], "no verb 'perform'"),
        (['{"kvpool_soak": 1, "pool": {}}', '["abort", [1]]'], "abort takes (handle: int)"),
        (['{"kvpool_soak": 1, "pool": {}}', '["read", [[1]], 0]'], "read takes"),
    ],
)
def test_replay_of_what_is_no_trace_says_why(lines, words, tmp_path, capfd):
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(line + "\n" for line in lines))
    assert main(["--replay", str(path)]) == 2
    said = capfd.readouterr().err
    assert words in said
    assert "Traceback" not in said


def test_replay_of_a_trace_that_ends_in_a_line_says_so(tmp_path, capfd):
    path = tmp_path / "trace.jsonl"
    Trace(PoolShape(), [["alloc", 1, 4], ["free", 1]]).write(path)
    written = path.read_text()
    cuts = {written[:10]: "first line", written[:-12]: "middle of line 2"}
    for cut, words in cuts.items():
        path.write_text(cut)
        assert main(["--replay", str(path)]) == 2
        assert words in capfd.readouterr().err
    path.write_text(written[:-3])
    assert main(["--replay", str(path), "--json"]) == 0
    found = capfd.readouterr()
    assert "middle of line 3, which is left out" in found.err
    assert json.loads(found.out)["profiles"]["replay"]["operations"] == 1
    assert json.loads(found.out)["interrupted"] is False


def test_absurd_shape_is_refused_before_anything_is_made():
    with pytest.raises(TraceError, match="bytes, at most"):
        PoolShape(num_pages=1 << 30, page_size=1 << 20)


# ---- fingerprints


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_are_exact_in_the_pools_dtype(dtype, make_pool):
    scale = 2 if dtype.startswith("float8") else 1
    shape = PoolShape(num_pages=64, dtype=dtype, scale=scale)
    pool = make_pool.keep(shape.make("cpu"))
    code = RowCode(dtype, pool.compute_dtype, 1, 1, 4, scale)
    assert code.computed.dtype == KVDType.of(dtype).compute_type
    codes = np.arange(code.computed.size)[-256:].repeat(4).reshape(1, -1, 1, 4)
    rows = code.computed[codes]
    length = rows.shape[1]
    request = pool.bind_request(list(range(length)), length)
    pool.step.put(0, 0, rows, rows)
    k, _ = pool.step.get(0, length)
    assert (k == rows).all()
    slots = pool.step.slot_indices(length)
    assert (pool.key_layer(0)[slots] == code.stored[codes[0]]).all()
    pool.unbind_request(request)


@given(
    parts=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 40)), max_size=4),
    asked=st.lists(st.integers(1, 200), min_size=1, max_size=5),
    vocabulary=st.sampled_from([2, 50_000, 1 << 32]),
)
def test_lineage_is_the_same_in_whatever_order_it_is_asked_for(parts, asked, vocabulary):
    code = RowCode("float32", "float32", 2, 1, 4)
    text = [list(part) for part in parts]
    at_once = Lineage(text, 9, 0, vocabulary, code)
    longest = max(asked)
    in_parts = Lineage(text, 9, 0, vocabulary, code)
    for length in asked:
        assert (in_parts.tokens(length) == at_once.tokens(longest)[:length]).all()
        assert (in_parts.prints(0, length) == at_once.prints(0, longest)[:length]).all()
        assert (in_parts.codes(1, 0, length) == at_once.codes(1, 0, longest)[:, :length]).all()
    whole = tokens_of(at_once.text_upto(longest), vocabulary)
    assert (whole == at_once.tokens(longest)).all()


def test_rows_differ_by_every_token_before_the_namespace_and_the_layer():
    code = RowCode("float8_e5m2", "bfloat16", 2, 1, 8)
    first = Lineage([[1, 40]], 9, 0, 50_000, code)
    other_key = Lineage([[1, 40]], 9, 1, 50_000, code)
    assert (first.codes(0, 0, 40) != other_key.codes(0, 0, 40)).any(axis=2).all()
    assert (first.codes(0, 0, 40) != first.codes(1, 0, 40)).any(axis=2).all()
    assert (first.codes(0, 0, 40)[0] != first.codes(0, 0, 40)[1]).any(axis=1).all()
    other_end = first.copy(20, 10)
    other_end.change_tail(20, 11)
    branch = Lineage(first.text_upto(20), 11, 0, 50_000, code)
    assert (first.prints(0, 20) == branch.prints(0, 20)).all()
    assert (first.prints(20, 40) != branch.prints(20, 40)).all()
