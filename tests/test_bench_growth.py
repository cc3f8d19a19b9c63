"""The growth benchmark measures what it says, on tiny sizes; nothing here is timed."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from bench.curves import messages, targets, text, turns
from bench.curves.colliders import VOCABULARY, hash_pages, searched_pages, written_pages
from bench.curves.command import chosen, main
from bench.curves.drivers import Driver, fresh_tokens
from bench.curves.evictions import fill
from bench.curves.footprint import OWN
from bench.curves.shapes import chain
from bench.curves.subject import ALL, FLOOR, PARTS, PEERS, POOL, Panel
from bench.curves.subjects import SUBJECTS
from kvpool import RadixCache
from kvpool_ext.arena import NodeArena

pytestmark = pytest.mark.slow  # they work on larger trees than checks after every verb bear

ROOT = Path(__file__).resolve().parent.parent
TINY = {  # subject -> sizes; those of the others are small enough
    "match": (64, 128),
    "miss": (64, 128),
    "insert": (512, 1_024),
    "reinsert": (512, 1_024),
    "match-nodes": (1, 4),
    "list": (1, 50),
    "evict-one": (40, 50),
    "evict-many": (1_024, 2_048),
    "take": (1, 8),
    "give": (1, 8),
    "deep-chain": (3, 9),
    "checkpoint": (3, 9),
    "wide-fan": (3, 9),
    "wide-fan-add": (3, 9),
    "collisions": (8, 16),
    "step": (1, 2),
}


def tiny(name):
    subject = SUBJECTS[name]
    return dataclasses.replace(subject, sizes=TINY[name], reach={})


@pytest.mark.parametrize("name", TINY)
def test_every_sampler_of_kvpool_answers_seconds(name):
    subject = tiny(name)
    for contender in subject.contenders:
        if turns.peer_of(contender):
            continue
        for panel in subject.panels:
            if panel.number > 1_000_000:
                continue
            samplers = subject.make(contender, panel, subject.sizes)
            assert tuple(samplers) == subject.sizes
            for sample in samplers.values():
                assert 0 < sample() < 60
                assert 0 < sample() < 60


@pytest.mark.parametrize("page_size", [8, 16, 64])
def test_written_pages_have_one_hash(page_size):
    pages = written_pages(100, page_size)
    assert pages.dtype == np.int32
    assert len(np.unique(pages, axis=0)) == 100
    assert len(np.unique(hash_pages(pages))) == 1
    below = written_pages(100, page_size, parent=7)
    assert len(np.unique(hash_pages(below, parent=7))) == 1
    assert len(np.unique(hash_pages(below, parent=8))) > 90


def test_searched_pages_share_a_bucket():
    pages = searched_pages(20, 16, 128)
    assert pages.min() >= 0
    assert pages.max() < VOCABULARY
    assert not (hash_pages(pages) & 127).any()
    assert len(np.unique(hash_pages(pages))) > 10


@pytest.mark.parametrize("page_size", [8, 16, 64])
def test_pages_made_to_collide_do_not_in_the_keyed_hash_of_a_tree(page_size):
    pages = np.concatenate([written_pages(1_000, page_size), searched_pages(50, page_size, 512)])
    arena = NodeArena(page_size)
    buckets = [arena.hash_of(0, page) & 4_095 for page in pages]
    assert np.bincount(buckets).max() <= 12  # of a mean of a quarter


def test_colliding_keys_cost_no_hit():
    tree = RadixCache(16)
    pages = np.concatenate([written_pages(200, 16), searched_pages(50, 16, 512)])
    for i, page in enumerate(pages):
        tree.insert(page, np.array([i], np.int32))
    tree.check()
    assert [tree.match_prefix(page).pages[0] for page in pages] == list(range(250))
    other = pages[0].copy()
    other[-1] += 1
    assert tree.match_prefix(other).length == 0


@pytest.mark.parametrize("name", [POOL, PARTS])
@pytest.mark.parametrize("page_size", [1, 16])
def test_a_driver_stores_finds_and_evicts(name, page_size):
    driver = Driver(name, 4_096, page_size)
    first, second = fresh_tokens(512), fresh_tokens(512)
    driver.store_in_steps(first, 128)
    driver.looker(first, 512)()
    driver.looker(second, 0)()
    assert driver.contender.cached_tokens() == 512
    driver.evictor()(128)
    assert driver.contender.cached_tokens() == 384
    driver.looker(first, 384)()


def test_shapes_are_what_they_are_called():
    driver = Driver(POOL, 4_096, 16)
    assert len(chain(driver, 40, 16)) == 640
    assert driver.contender.pool.radix.num_nodes == 40
    driver = Driver(PARTS, 4_096, 16)
    fill(driver, 100, 16)
    assert driver.contender.tree.num_nodes == 100


def curve(subject, panel, contender, points):
    points = [{"size": size, "median": value} for size, value in points.items()]
    return {
        "subject": subject,
        "panel": panel,
        "contender": contender,
        "unit": "us",
        "points": points,
    }


def test_targets_are_judged():
    curves = [
        curve("match", "page 16", FLOOR, {131_072: 10.0}),
        curve("match", "page 16", POOL, {131_072: 14.0}),
        curve("match", "page 16", PARTS, {131_072: 16.0}),
        curve("match", "page 16", PEERS[0], {131_072: 60.0}),
        curve("match", "page 16", PEERS[1], {131_072: 90.0}),
    ]
    rows = {row["what"]: row for row in targets.verdicts(curves)}
    by_floor = "128k match, 1 node, page 16, {}: times the floor"
    assert rows[by_floor.format("pool, bind + unbind")]["verdict"] == targets.MET
    assert rows[by_floor.format("RadixCache")]["verdict"] == targets.MISSED
    by_peer = "128k match, 1 node, page 16, {}: times faster than the best peer"
    assert rows[by_peer.format("pool, bind + unbind")]["measured"] == "4.3"
    assert rows[by_peer.format("RadixCache")]["verdict"] == targets.MISSED
    others = [row for what, row in rows.items() if "1 node, page 16" not in what]
    assert {row["verdict"] for row in others} == {targets.UNKNOWN}


@pytest.mark.parametrize("name", SUBJECTS)
def test_every_picture_has_a_title(name):
    subject = SUBJECTS[name]
    small, large = min(subject.sizes), max(subject.sizes)
    curves = [
        curve(name, str(panel), contender, {small: 2.0 + i, large: 4.0 + i})
        for panel in subject.panels
        for i, contender in enumerate(subject.contenders)
    ]
    title = messages.of(subject, curves)
    assert title.startswith(f"{subject.title}: ")
    assert "kvpool" in title or name in ("list", "checkpoint")
    assert not messages.of(subject, curves[:1]).endswith(": ")


def test_sizes_are_short():
    shown = {1: "1", 512: "512", 1_024: "1k", 131_072: "128k", 100_000: "100k", 1_000_000: "1M"}
    assert {size: messages.short(size) for size in shown} == shown


def test_subjects_are_chosen_by_pattern():
    assert [subject.name for subject in chosen("match*")] == ["match", "match-nodes"]
    assert len(chosen(None)) == len(SUBJECTS) > 10
    with pytest.raises(SystemExit, match="nothing"):
        chosen("nothing")
    assert set(SUBJECTS) - set(TINY) == {"memory"}


def test_a_failing_sampler_is_named():
    def make(contender, panel, sizes):
        raise ZeroDivisionError("in vain")

    subject = dataclasses.replace(SUBJECTS["match"], make=make)
    with pytest.raises(RuntimeError, match="in vain"):
        turns.measure(subject, Panel(16), [POOL], rounds=1)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_is_of_the_order_of_tokens_and_ids(monkeypatch):
    monkeypatch.setattr("bench.curves.footprint.CAPACITY", 200_000)
    subject = dataclasses.replace(SUBJECTS["memory"], sizes=(1_000,), reach={})
    found = turns.measure(subject, Panel(16), [OWN, POOL], rounds=1)
    assert 4.5 < found[OWN][1_000]["median"] < 12  # 4 a token, 2 x 4 and 5 a page; nodes
    assert 4.5 < found[POOL][1_000]["median"] < 60  # of so small a pool, Python's own pages


@pytest.mark.skipif(sys.platform != "linux", reason="forks")
def test_the_command_measures_and_writes(tmp_path, monkeypatch):
    target = tmp_path / "results" / "growth.json"
    arguments = ["--subjects", "take", "--quick", "--rounds", "1", "--json", str(target)]
    run = subprocess.run(
        [sys.executable, "bench/growth.py", *arguments, "--contenders", "floor,kvpool"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    assert "take 1, page 16, 1M tokens, in order: us" in run.stdout
    result = json.loads(target.read_text())
    assert [curve["contender"] for curve in result["curves"]] == [FLOOR, POOL]
    assert result["machine"]["python"]
    for found in result["curves"]:
        for point in found["points"]:
            assert 0 < point["low"] <= point["median"] <= point["high"]
    assert "| kvpool" in text.report(result, [], with_curves=True)


def test_a_picture_is_drawn_of_results(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    curves = [curve("match", "page 16", contender, {1_024: 2.0, 4_096: 5.0}) for contender in ALL]
    machine = {"processor": "a processor", "python": "3"}
    source = tmp_path / "growth.json"
    source.write_text(json.dumps({"machine": machine, "versions": {}, "curves": curves}))
    assert main(["--from-json", str(source), "--plot", str(tmp_path)]) == 0
    assert (tmp_path / "growth_match.png").stat().st_size > 10_000
    assert "not measured in this run" in capsys.readouterr().out
