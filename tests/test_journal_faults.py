"""The journal of a tree where memory is refused: no verb fails for it, and no change is missed."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from kvpool import EVICTION_POLICIES
from kvpool_ext import faults
from kvpool_ext.listing import follow_tree
from kvpool_ext.victims import next_victims
from tests.helpers.fault_calls import CALLS
from tests.helpers.fault_points import CMemory
from tests.helpers.fault_prints import as_plain, fingerprint
from tests.helpers.fault_scenes import scene
from tests.helpers.following import follower_of, keys_of
from tests.oracles.following import ToldTwin
from tests.test_collector import CLEAN_UPS, _little_to_collect, at_collection  # noqa: F401

ROOT = Path(__file__).resolve().parent.parent
needs_c_hook = pytest.mark.skipif(not faults.AVAILABLE, reason="not the debug build")

# Those after which the tree has other pages.
CHANGING = (
    "bind_that_splits_and_evicts",
    "extend",
    "checkpoint_of_a_lineage",
    "finish",
    "finish_of_a_matched_lineage",
    "insert_in_a_new_namespace",
)


def followed_scene():
    """A scene whose journal is empty, so that its first record needs memory."""
    at = scene()
    at.follower = follower_of(at.pool)
    at.told = ToldTwin(keys_of(at.pool))
    at.follower.subscribe(at.told)
    at.follower.drain()
    return at


@needs_c_hook
@pytest.mark.parametrize("name", CHANGING)
def test_verb_without_memory_for_the_journal_does_the_same(name):
    act, injector = CALLS[name], CMemory()
    at = followed_scene()
    result = as_plain(act(at))
    after = fingerprint(at.pool)
    losses = point = 0
    while True:
        at = followed_scene()
        error, got, reached = injector.run(act, at, point)
        if not reached:
            break
        lost = at.follower.stats()["losses"]
        losses += lost
        if error is not None:
            at.follower.drain()
            at.told.compare(at.pool, at.follower)
            got = act(at)
        assert as_plain(got) == result
        if lost:
            assert fingerprint(at.pool) == after
        at.follower.drain()
        at.told.compare(at.pool, at.follower)
        assert at.follower.stats()["resyncs"] == lost
        point += 1
    assert losses == 1


@needs_c_hook
def test_take_without_memory_takes_nothing():
    def act(at):
        at.follower.drain()

    points = 0
    while True:
        at = followed_scene()
        at.pool.radix.evict(8)
        late = ToldTwin(keys_of(at.pool))  # so that the tree is listed
        at.follower.subscribe(late)
        error, _, reached = CMemory().run(act, at, points)
        if not reached:
            break
        assert "MemoryError" in error
        at.follower.drain()
        for told in (at.told, late):
            told.compare(at.pool, at.follower)
        points += 1
    assert points == 2


@needs_c_hook
@pytest.mark.parametrize("eviction", EVICTION_POLICIES)
def test_next_victims_without_memory_raises_and_changes_nothing(eviction):
    at = scene(eviction)
    before, tables = fingerprint(at.pool), 3 if eviction == "fifo" else 0
    for point in range(tables):
        faults.fail_after(point)
        with pytest.raises(MemoryError, match="look ahead"):
            next_victims(at.pool.radix, 10)
    faults.fail_after(tables)
    assert len(next_victims(at.pool.radix, 10)) == 10
    faults.clear()
    assert fingerprint(at.pool) == before


@needs_c_hook
def test_journal_without_memory_is_not_made():
    at = scene()
    faults.fail_after(0)
    with pytest.raises(MemoryError, match="generations of 64 pages"):
        follow_tree(at.pool._requests.ledger, 1000)
    faults.clear()
    assert at.pool.radix.journal is None


PYTHON_MEMORY = """
from _testcapi import remove_mem_hooks, set_nomemory
from kvpool_ext.listing import follow_tree, take_changes
from tests.helpers.fault_calls import CALLS
from tests.helpers.fault_scenes import scene
from tests.oracles.following import RecordsTwin, told_of

def take(at):
    at.twin.read(*take_changes(at.pool.radix, True)[:2])

outcomes = {"raised": 0, "went on": 0}
for name in ("finish", "insert_in_a_new_namespace", "bind_that_splits_and_evicts", "take"):
    for point in range(-1, 120, STEP):
        at = scene()
        at.twin = RecordsTwin(4)
        journal = follow_tree(at.pool._requests.ledger, 1 << 20)
        take(at)
        if name == "take":
            CALLS["insert_in_a_new_namespace"](at)
        act = CALLS.get(name, lambda at: take_changes(at.pool.radix, True))
        taken = None
        if point >= 0:
            set_nomemory(point, point + 1)
        try:
            taken = act(at)
            remove_mem_hooks()
            outcomes["went on"] += 1
        except BaseException as error:
            remove_mem_hooks()
            outcomes["raised"] += 1
            del error
        if name == "take" and taken is not None:
            at.twin.read(*taken[:2])
        take(at)
        assert at.twin.pages == told_of(at.pool), (name, point)
        at.pool.check()
        at.pool.close()
print(outcomes)
"""


@pytest.mark.skipif(
    faults.AVAILABLE or find_spec("_testcapi") is None,
    reason="the debug build, or no _testcapi",
)
@pytest.mark.parametrize("step", [11, pytest.param(1, marks=pytest.mark.slow)])
def test_objects_of_python_that_are_refused_lose_no_page(step):
    # In a process of its own, which an interpreter without memory may take down.
    path = os.pathsep.join((str(Path(faults.__file__).parent.parent), str(ROOT)))
    done = subprocess.run(
        [sys.executable, "-c", PYTHON_MEMORY.replace("STEP", str(step))],
        capture_output=True,
        text=True,
        env=os.environ | {"KVPOOL_POISON": "0", "PYTHONSAFEPATH": "1", "PYTHONPATH": path},
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "'raised': 0" not in done.stdout
    assert "'went on': 0" not in done.stdout
