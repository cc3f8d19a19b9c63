"""Injected failures: nothing shows of a call that raised, and its retry finds all as it was.

Here is a part of what ``python -m tests.faults`` does; the whole of it is marked slow.
"""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from kvpool.storage import KVStorage
from kvpool_ext import faults
from tests.faults import KINDS, main, sweep_kind, why_not
from tests.helpers.fault_points import Transfers
from tests.helpers.fault_prints import fingerprint
from tests.helpers.fault_scenes import scene
from tests.helpers.faults import sweep
from tests.helpers.pools import R, cache_prompt, read, unchanged, values, window, write

ROOT = Path(__file__).resolve().parent.parent

needs_c_hook = pytest.mark.skipif(not faults.AVAILABLE, reason="not the debug build")
needs_python_hook = pytest.mark.skipif(
    faults.AVAILABLE or find_spec("_testcapi") is None,
    reason="the debug build, or no _testcapi",
)


def run_apart(*arguments):
    """The command in a process of its own, which an interpreter without memory may take down."""
    # The extension that is under test here, also where it is not the one beside the sources.
    path = os.pathsep.join((str(Path(faults.__file__).parent.parent), str(ROOT)))
    environment = os.environ | {"PYTHONSAFEPATH": "1", "PYTHONPATH": path}
    command = [sys.executable, "-m", "tests.faults", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=900)


# ---- the hook of the extension


@pytest.mark.skipif(faults.AVAILABLE, reason="the debug build")
def test_release_build_refuses_no_memory_and_says_which_does():
    with pytest.raises(RuntimeError, match="KVPOOL_DEBUG=1"):
        faults.fail_after(0)
    assert faults.count() == 0


@needs_c_hook
def test_hook_refuses_the_nth_request_of_all_modules_together():
    at = scene("lru", drained=True)
    faults.clear()
    at.pool.radix.survey()  # two tables in `survey`, none elsewhere
    assert faults.count() == 2
    for point in range(2):
        faults.fail_after(point)
        with pytest.raises(MemoryError):
            at.pool.radix.survey()
        assert at.pool.radix.survey().handles.size == at.pool.radix.num_nodes
    faults.fail_after(0, None)
    for _ in range(2):
        with pytest.raises(MemoryError):
            at.pool.radix.survey()
    faults.clear()
    with pytest.raises(ValueError, match="at least 0"):
        faults.fail_after(-1)


# ---- sweeps

LEDGER_CALLS = {
    "bind_that_splits_and_evicts",
    "bind_with_prefix",
    "bind_requests",
    "fork_in_a_lineage",
    "extend",
    "checkpoint_of_a_lineage",
    "checkpoint_of_duplicates",
    "finish",
    "finish_of_a_matched_lineage",
    "insert_in_a_new_namespace",
    "match_that_splits",
}

DEVICE_CALLS = {
    "put_on_fresh_pages",
    "get",
    "fork_that_copies_a_page",
    "truncate_in_place",
    "seal_that_drops_pages",
    "invalidate_range",
    "verify_prepare",
}


@needs_c_hook
def test_calls_without_c_memory_leave_no_trace():
    found = sweep_kind("c-memory", policies=["lru"], calls=LEDGER_CALLS, quick=True)
    assert found.violations == []
    assert found.raised > 20


@needs_python_hook
def test_calls_without_python_memory_leave_no_trace():
    done = run_apart("python-memory", "--policy", "lru", "--every", "17")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "violations 0" in done.stdout


@pytest.mark.parametrize("kind", ["kernels", "copies"])
def test_calls_whose_kernels_and_copies_fail_leave_no_trace(kind):
    found = sweep_kind(kind, policies=["lru"], calls=DEVICE_CALLS, quick=True)
    assert found.violations == []
    assert found.raised == found.runs > 5


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_every_point_of_every_call_leaves_no_trace(kind):
    if why_not(kind):
        pytest.skip(why_not(kind))
    done = run_apart(kind)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "violations 0" in done.stdout


def test_sweep_notices_a_call_that_changes_something_first(make_pool):
    """The harness is of use only if it finds what it looks for."""

    def half_done(at):
        at.pool.bind_request(R(1, 4), 8)
        at.pool.activate_step(at.other).slot_indices(4)

    injector = Transfers()
    found = sweep("half done", half_done, scene, injector)
    assert found.runs == 0  # the scene's device is not the injector's: nothing to fail
    found = sweep("half done", half_done, lambda: scene(device=injector.device), injector)
    assert found.raised == found.runs > 0
    assert len(found.violations) >= found.raised


def test_fingerprint_of_two_equal_scenes_is_equal():
    assert fingerprint(scene().pool) == fingerprint(scene().pool)


def test_command_refuses_an_unknown_kind(capsys):
    with pytest.raises(SystemExit):
        main(["dynamite"])
    assert "no kind 'dynamite'" in capsys.readouterr().err


@needs_c_hook
def test_pool_that_gets_no_memory_for_its_parts_is_not_made():
    found = sweep_kind("c-memory", policies=[])
    assert found.violations == []
    assert found.runs == found.raised > 5


# ---- what injection found, each once more on its own


@pytest.fixture
def pool(make_pool):
    return make_pool(2, 64, 2, 8, page_size=4)


def test_put_that_fails_in_the_scatter_has_entered_no_page(pool, monkeypatch):
    request = pool.bind_request(R(1, 4), 16)

    def fail(*_):
        raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr(KVStorage, "write", fail)
        with pytest.raises(MemoryError):
            pool.step.put(0, 0, *window(pool, 0, 12, 100))
    pool.shrink_request(request, 1)  # pages that were entered would have to stay
    assert pool.request(request).capacity == 4
    write(pool, request, 0, 4)
    assert read(pool, request, 4) == values(100, 0, 4)


def test_truncate_that_fails_to_zero_takes_nothing_back(pool, monkeypatch):
    request = pool.bind_request(R(1, 8), 8)
    step = write(pool, request, 0, 8)
    table = step.page_table(8)

    def fail(*_):
        raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr(KVStorage, "zero", fail)
        with pytest.raises(MemoryError):
            step.truncate_to(6, 8)
    assert pool.valid_len(request) == 8
    assert step.current_page_table is table
    assert (table.lengths_host.tolist(), table.last_page_len.tolist()) == ([8], [4])
    assert read(pool, request, 8) == values(100, 0, 8)


def test_fork_that_fails_to_copy_gives_its_pages_back(pool, monkeypatch):
    request = pool.bind_request(R(1, 6), 8)
    write(pool, request, 0, 6)

    def fail(*_):
        raise MemoryError

    with monkeypatch.context() as patched, unchanged(pool, request):
        patched.setattr(KVStorage, "copy", fail)
        with pytest.raises(MemoryError):
            pool.fork_request(request, 12)
    write(pool, request, 2, 4)  # on a page that is nobody else's
    assert pool.fork_request(request, 12) == request + 1


class Spoiler:
    """A watcher that raises at a bind."""

    def on_bind(self, request):
        raise LookupError(request.tag)

    def on_publish(self, request):
        raise LookupError(request.tag)


def test_watcher_that_raises_undoes_the_bind_but_not_the_access(pool):
    cache_prompt(pool, R(1, 8))
    stop = pool.watch(Spoiler())
    before = pool.stats()
    with pytest.raises(LookupError):
        pool.bind_request([*R(1, 4), 9], 8)
    assert pool.stats() == before
    assert pool.radix.num_nodes == 2  # the match was an access, and split the node
    with pytest.raises(LookupError):
        pool.bind_with_prefix([*R(1, 8), 9], 12)
    assert pool.stats() == before
    stop()
    assert pool.bind_request([*R(1, 4), 9], 8) == 4  # the watcher has seen 2 and 3


def test_watcher_that_raises_at_a_finish_changes_nothing(pool):
    request = pool.bind_request(R(1, 6), 8)
    write(pool, request, 0, 6)
    pool.watch(Spoiler())
    with unchanged(pool, request), pytest.raises(LookupError):
        pool.finish_request(request, R(1, 6))


def test_exclusive_bind_asks_for_its_namespace_once(pool):
    asked = []

    class Key:
        def __index__(self):
            asked.append(1)
            return 5

    pool.bind_request(R(1, 4), 4)
    pool.bind_with_prefix(R(1, 4), 8, extra_key=Key())
    assert asked == [1]


def test_namespace_of_a_str_that_compares_oddly_is_a_plain_str(pool):
    class Odd(str):
        def __hash__(self):
            raise AssertionError("a hash of the caller's ran")

        def __eq__(self, other):
            raise AssertionError("a comparison of the caller's ran")

    request = pool.bind_request(R(1, 4), 4, extra_key=Odd("a"))
    assert type(pool.request(request).extra_key) is str
    write(pool, request, 0, 4)
    pool.finish_request(request, R(1, 4))
    assert pool.radix.namespaces == [None, "a"]
    assert pool.matched_prefix_len(pool.bind_request(R(1, 5), 8, extra_key="a")) == 4


def test_exclusive_bind_that_cannot_fit_releases_nothing(pool):
    request = pool.bind_request(R(1, 4), 4)
    pool.alloc(8)
    with unchanged(pool, request), pytest.raises(ValueError, match="cannot fit"):
        pool.bind_with_prefix(R(1, 60), 64)
