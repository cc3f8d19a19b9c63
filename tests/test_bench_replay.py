"""The replay benchmark counts right: every hit of kvpool against brute force, on tiny traces."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from bench.replay.cell import Cell, Truth
from bench.replay.command import chosen, main, write
from bench.replay.contender import PLACES, contender_class, missing_packages
from bench.replay.oracle import replay_hits
from bench.replay.tables import cell_text, faults
from bench.replay.trace import (
    BIND,
    BLOCK,
    FINISH,
    MADE_UP,
    Trace,
    find_trace,
    made_up_requests,
    order_of_events,
    read_trace,
)
from bench.replay.worker import PHASES, Driver

pytestmark = pytest.mark.slow  # they work on larger trees than checks after every verb bear

ROOT = Path(__file__).resolve().parent.parent
OURS = [name for name in PLACES if name.startswith("kvpool")]
PEERS = [name for name in PLACES if not name.startswith(("kvpool", "floor"))]


def tiny_trace(num_requests=60, seed=0):
    """Chats of one to six blocks that often begin alike, and end in the middle of a page."""
    rng = np.random.default_rng(seed)
    requests = []
    for _ in range(num_requests):
        ids = [rng.integers(0, 2), *rng.integers(0, 3, rng.integers(0, 6))]
        requests.append((len(ids) * BLOCK - int(rng.integers(0, BLOCK)), rng.integers(0, 70), ids))
    return Trace("tiny", requests)


def drive(name, trace, events, capacity, page_size):
    contender = contender_class(name)(capacity, page_size)
    driver = Driver(contender, trace)
    driver.drive(events)
    return driver


def slow_hits(trace, events, page_size, num_pages, checkpoints):
    """The rule once more, as slow as can be: ticks, and a search for every victim."""
    cached, free, clock = {}, num_pages, 0  # prefix in bytes -> [tick, requests that hold it]
    hits, in_flight = np.zeros(len(trace), int), {}

    def publish(pages, held):
        nonlocal clock
        num_new = 0
        for page in reversed(pages[held:]):
            clock += 1
            num_new += page not in cached
            entry = cached.setdefault(page, [clock, 0])
            if entry[1] == 0:
                entry[0] = clock
        return num_new

    for kind, i in events:
        tokens = trace.tokens(i)
        pages = [tokens[:end].tobytes() for end in range(page_size, len(tokens) + 1, page_size)]
        total = -(-len(tokens) // page_size)
        if kind == BIND:
            num_prompt = trace.prompt_lens[i]
            held = 0
            while held < (num_prompt - 1) // page_size and pages[held] in cached:
                cached[pages[held]][1] += 1
                held += 1
            hits[i] = held * page_size
            own = total - held
            while free < own:
                victim = min(
                    (page for page, (_, holders) in cached.items() if not holders),
                    key=lambda page: cached[page][0],
                )
                del cached[victim]
                free += 1
            free -= own
            if checkpoints:
                end = num_prompt // page_size
                own -= publish(pages[:end], held)
                for page in pages[held:end]:
                    cached[page][1] += 1
                held = max(held, end)
            in_flight[i] = held, own
        else:
            held, own = in_flight.pop(i)
            free += own - publish(pages, held)
            for page in reversed(pages[:held]):
                clock += 1
                cached[page][1] -= 1
                if cached[page][1] == 0:
                    cached[page][0] = clock
    return hits


@pytest.mark.parametrize(("page_size", "window"), [(16, 1), (16, 5), (64, 3)])
@pytest.mark.parametrize("publishes", ["finish", "prefill"])
def test_oracle_agrees_with_its_slow_twin(page_size, window, publishes):
    trace, capacity = tiny_trace(), 24_000 // page_size * page_size
    events = order_of_events(trace.lengths, window=window, capacity=capacity, page_size=page_size)
    hits = replay_hits(trace, events, page_size, capacity=capacity, publishes=publishes)
    slow = slow_hits(trace, events, page_size, capacity // page_size, publishes == "prefill")
    assert (hits == slow).all()
    unlimited = replay_hits(trace, events, page_size, publishes=publishes)
    assert (hits <= unlimited).all()
    assert hits.sum() < unlimited.sum(), "nothing was evicted: the capacity is too large"


@pytest.mark.parametrize("name", OURS)
@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("window", [1, 4])
def test_every_hit_of_kvpool_is_the_oracles(name, page_size, window):
    trace, capacity = tiny_trace(seed=page_size + window), 16_000 // page_size * page_size
    events = order_of_events(trace.lengths, window=window, capacity=capacity, page_size=page_size)
    driver = drive(name, trace, events, capacity, page_size)
    expected = replay_hits(
        trace, events, page_size, capacity=capacity, publishes=contender_class(name).publishes
    )
    assert (driver.hits == expected).all()
    assert driver.hits.any()
    assert 0 < driver.contender.cached_tokens() <= capacity
    part = driver.contender.tree if name == "kvpool-parts" else driver.contender.pool
    part.check()


def test_a_checkpoint_lets_requests_in_flight_share():
    trace = tiny_trace()
    events = order_of_events(trace.lengths, window=8, capacity=100_000, page_size=16)
    with_it, without = (
        drive(name, trace, events, 100_000, 16).hits.sum()
        for name in ("kvpool-checkpoint", "kvpool")
    )
    assert with_it > without


@pytest.mark.parametrize("name", PEERS)
def test_hits_of_a_peer_are_bounded(name):
    if missing := missing_packages(name):
        pytest.skip(f"needs {', '.join(missing)}")
    # Peers stand empty modules into sys.modules: not in the process of the other tests.
    arguments = ["--trace", MADE_UP, "--limit", "60", "--runs", "1", "--cells", "*:1M:p16:*"]
    run = command(*arguments, "--contenders", name)
    assert run.returncode == 0, run.stderr
    assert "bounded" in run.stdout


def test_events_keep_to_window_and_capacity():
    lengths, capacity = tiny_trace().lengths, 12_000
    events = order_of_events(lengths, window=4, capacity=capacity, page_size=16)
    in_flight = []
    for kind, i in events:
        if kind == BIND:
            in_flight.append(i)
            assert len(in_flight) <= 4
            assert sum(lengths[j] + 32 for j in in_flight) <= capacity
        else:
            assert kind == FINISH
            assert in_flight.pop(0) == i, "the oldest ends first"
    assert not in_flight
    assert sorted(events[events[:, 0] == BIND, 1]) == list(range(len(lengths)))


def test_a_request_larger_than_the_cache_is_left_out():
    events = order_of_events(np.array([100, 900, 100]), window=1, capacity=500, page_size=16)
    assert events.tolist() == [[BIND, 0], [FINISH, 0], [BIND, 2], [FINISH, 2]]


def test_equal_hash_ids_are_equal_tokens(tmp_path):
    lines = [
        {"timestamp": 0, "input_length": 700, "output_length": 5, "hash_ids": [7, 9]},
        {"timestamp": 1, "input_length": 1_024, "output_length": 6, "hash_ids": [7, 9]},
        {"timestamp": 2, "input_length": 1_024, "output_length": 6, "hash_ids": [8, 9]},
    ]
    path = tmp_path / "mooncake_conversation.jsonl"
    path.write_text("\n".join(json.dumps(line) for line in lines))
    trace = read_trace(path)
    first, second, third = (trace.tokens(i) for i in range(3))
    assert trace.name == "conversation"
    assert [len(first), len(second)] == [705, 1_030]
    assert first.dtype == np.int32
    assert (first[:700] == second[:700]).all()
    assert (first[700:] != second[700:705]).any()
    assert (second[:512] != third[:512]).any()
    assert (second[512:1_024] == third[512:1_024]).all()
    assert len(read_trace(path, limit=2)) == 2


def test_a_trace_that_is_not_there_says_where_to_get_it(monkeypatch, tmp_path):
    monkeypatch.delenv("KVPOOL_TRACES", raising=False)
    with pytest.raises(FileNotFoundError, match="Mooncake"):
        find_trace("conversation")
    monkeypatch.setenv("KVPOOL_TRACES", str(tmp_path))
    with pytest.raises(FileNotFoundError, match="Mooncake"):
        find_trace("conversation")
    (tmp_path / "conversation_trace.jsonl").touch()
    assert find_trace("conversation").startswith(str(tmp_path))


def test_wrong_hits_are_found():
    trace, cell = tiny_trace(), Cell("tiny", 16_000, 16, 1)
    events = order_of_events(trace.lengths, window=1, capacity=16_000, page_size=16)
    truth = Truth(trace, events, cell)
    right = truth.hits("finish", 16_000)
    assert not any(truth.faults(right, "finish", True).values())
    assert 0 < len(truth.before_eviction) < len(trace)
    wrong = right.copy()
    wrong[truth.before_eviction[-1]] += 16
    found = truth.faults(wrong, "finish", True)
    assert found["wrong before any eviction"] == found["not exact LRU"] == 1


def test_made_up_requests_share_prefixes():
    trace = Trace(MADE_UP, made_up_requests(50))
    events = order_of_events(trace.lengths, window=1, capacity=10**9, page_size=16)
    hits = replay_hits(trace, events, 16)
    assert 0.3 < hits.sum() / trace.prompt_lens.sum() < 0.98


def test_cells_are_chosen_by_pattern():
    assert [str(cell) for cell in chosen("synthetic", ["*:1M:p64:*"])] == [
        "synthetic:1M:p64:w1",
        "synthetic:1M:p64:w32",
    ]
    assert len(chosen("conversation", ["*"])) == 12
    assert not chosen("conversation", ["synthetic:*"])


def test_an_unknown_contender_is_named():
    with pytest.raises(SystemExit, match="nobody"):
        main(["--contenders", "nobody"])


def command(*arguments):
    return subprocess.run(
        [sys.executable, "bench/replay_peers.py", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )


@pytest.mark.skipif(sys.platform != "linux", reason="forks, and reads /proc")
def test_the_command_prints_and_keeps_a_cell(tmp_path):
    target = tmp_path / "results" / "replay.json"
    arguments = ["--trace", MADE_UP, "--limit", "30", "--runs", "2", "--json", str(target)]
    names = "floor,kvpool,kvpool-checkpoint,kvpool-parts"
    run = command(*arguments, "--cells", "*:1M:p16:w32", "--contenders", names)
    assert run.returncode == 0, run.stderr
    assert "| kvpool-parts " in run.stdout
    assert "times the floor" in run.stdout
    assert "WRONG" not in run.stdout
    write(target, "another", json.loads(target.read_text())["cells"].popitem()[1])
    cells = json.loads(target.read_text())["cells"]
    assert list(cells) == ["made-up:1M:p16:w32:first30", "another"]
    for result in cells.values():
        assert [row["name"] for row in result["rows"]] == names.split(",")
        assert not faults(result)
        assert result["machine"]["python"]
        for row in result["rows"]:
            assert set(row["us"]) == {*PHASES, "total"}
            assert 0 < row["us"]["total"]["p50"] <= row["us"]["total"]["p99"]
        assert "exact" in cell_text(result)
