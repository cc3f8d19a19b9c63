"""MooncakeTier on a real master and real lenders: what it answers when one of them dies."""

import subprocess
import sys
import threading
import time
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest

from kvpool.tiers.mooncake import MooncakeTier
from tests.helpers.mooncake import Lender, Master, free_ports, skip_without_mooncake

skip_without_mooncake()

ROOT = Path(__file__).resolve().parents[1]
RECORD_BYTES = 64 << 10
SEGMENT_BYTES = 16 << 20
# Far more than any of it takes, and less than anybody would wait for.
PATIENCE_S = 60


def keys_of(*numbers):
    return [sha256(str(number).encode()).digest() for number in numbers]


def records(count, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (count, RECORD_BYTES), np.uint8)


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """A master with a lender, both of which outlive the tests that use them."""
    with Master(tmp_path_factory.mktemp("store")) as running, Lender(running, SEGMENT_BYTES):
        yield running


@pytest.fixture(scope="module")
def tier(store):
    """A tier of that store: it takes the engine a second to close one."""
    opened = MooncakeTier(store.metadata, store.address, timeout_s=1)
    yield opened
    opened.close()


@pytest.fixture
def master(tmp_path):
    """A master to be killed."""
    with Master(tmp_path) as running:
        yield running


@pytest.fixture
def make():
    """Makes tiers that wait no longer than a second, and closes them while their master lives."""
    made = []

    def open_tier(master, **options):
        made.append(MooncakeTier(master.metadata, master.address, timeout_s=1, **options))
        return made[-1]

    yield open_tier
    for tier in made:
        tier.close()


def answer_of(call):
    """What a call answered, or the error that it raised."""
    try:
        return call()
    except ConnectionError as error:
        return error


# ---- a master that is not there


def test_no_master_is_an_error_at_once():
    port, other = free_ports(2)
    with pytest.raises(ConnectionError, match=rf"no Mooncake master answers at 127.0.0.1:{port}"):
        MooncakeTier(f"http://127.0.0.1:{other}/metadata", f"127.0.0.1:{port}", timeout_s=1)
    with pytest.raises(ValueError, match="host:port"):
        MooncakeTier(f"http://127.0.0.1:{other}/metadata", "localhost")


def test_no_metadata_server_or_one_that_hangs_is_an_error_in_time(store):
    (port,) = free_ports(1)
    with pytest.raises(ConnectionError, match="no metadata server answers"):
        MooncakeTier(f"http://127.0.0.1:{port}/metadata", store.address, timeout_s=1)
    store.stop()
    try:
        with pytest.raises(ConnectionError, match=r"within 0\.2 s"):
            MooncakeTier(store.metadata, store.address, timeout_s=0.2)
    finally:
        store.go_on()


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "mooncake.store", None)
    with pytest.raises(ImportError, match=r"kvpool\[mooncake\]"):
        MooncakeTier("http://127.0.0.1:1/metadata", "127.0.0.1:1")


# ---- one that is there


def test_records_move_without_a_copy_where_the_buffer_is_registered(tier):
    buffer = np.zeros((16, RECORD_BYTES), np.uint8)
    buffer[:8] = records(8)
    keys = keys_of(*range(8))
    before = tier.stats()
    tier.register(buffer)
    assert tier.write(keys, buffer[:8]) == [True] * 8
    assert tier.read(keys, buffer[8:]) == [True] * 8
    assert (buffer[8:] == buffer[:8]).all()
    assert tier.stats()["copied_records"] == before["copied_records"]
    assert tier.stats()["registered_bytes"] == buffer.nbytes
    with pytest.raises(ValueError, match="overlaps"):
        tier.register(buffer[4:])
    tier.unregister(buffer)
    assert tier.read(keys, buffer[8:]) == [True] * 8
    assert tier.stats()["copied_records"] == before["copied_records"] + 8


def test_a_key_many_times_in_a_call_fills_every_row(tier):
    rows = records(2)
    first, second = keys_of(10, 11)
    asked = [first, second, first, first, *keys_of(12), second]
    tier.write([first, second], rows)
    found = np.zeros((6, RECORD_BYTES), np.uint8)
    assert tier.read(asked, found) == [True, True, True, True, False, True]
    assert (found[[0, 2, 3]] == rows[0]).all()
    assert (found[[1, 5]] == rows[1]).all()


def test_a_full_store_refuses_records_and_keeps_answering(tier):
    keys = keys_of(*range(1000, 1000 + 2 * SEGMENT_BYTES // RECORD_BYTES))
    rows = np.ones((len(keys), RECORD_BYTES), np.uint8)
    refused = tier.stats()["refused_records"]
    answers = tier.write(keys, rows)
    # The master evicts behind the writes, and more slowly.
    assert 0 < sum(answers) < len(keys)
    assert tier.stats()["refused_records"] == refused + answers.count(False)
    found = np.zeros_like(rows)
    for row, is_there in zip(found, tier.read(keys, found), strict=True):
        assert not is_there or (row == 1).all()
    tier.remove(keys)
    assert tier.write(keys[:8], rows[:8]) == [True] * 8


def test_clients_share_records(tier, make, store):
    rows = records(4)
    keys = keys_of(*range(20, 24))
    first, second = tier, make(store)
    assert first.write(keys, rows) == [True] * 4
    found = np.zeros_like(rows)
    assert second.read(keys, found) == [True] * 4
    assert (found == rows).all()
    assert second.remove(keys[:1]) == [True], "under the lease of the read"
    assert first.exists(keys) == [False, True, True, True]


# ---- deaths


@pytest.mark.slow
def test_a_lender_killed_in_the_middle_leaves_misses(make, master):
    """Beside it a second lender: what lies there is still read, whatever the first one does."""
    with Lender(master, SEGMENT_BYTES) as dying, Lender(master, SEGMENT_BYTES):
        tier = make(master)
        rows = records(64)
        keys = keys_of(*range(64))
        assert tier.write(keys, rows) == [True] * 64
        killer = threading.Timer(0.02, dying.kill)
        killer.start()
        deadline = time.monotonic() + PATIENCE_S
        found = np.zeros_like(rows)
        answers = [True] * 64
        while all(answers) and time.monotonic() < deadline:
            answers = tier.read(keys, found)
        killer.join()
        for row, expected, is_there in zip(found, rows, answers, strict=True):
            assert not is_there or (row == expected).all()
        assert not all(answers)
        tier.write(keys_of(*range(100, 104)), rows[:4])  # placed where it may
        assert any(tier.read(keys, found))


def test_a_master_killed_in_the_middle_is_an_error_and_comes_back(make, master):
    tier = make(master, segment_bytes=SEGMENT_BYTES)
    rows = records(32)
    killer = threading.Timer(0.02, master.kill)
    killer.start()
    number, answer = 0, [True]
    deadline = time.monotonic() + PATIENCE_S
    while isinstance(answer, list) and time.monotonic() < deadline:
        keys = keys_of(*range(number, number + 32))
        answer = answer_of(lambda keys=keys: tier.write(keys, rows) and tier.read(keys, rows))
        number += 32
    killer.join()
    assert "does not answer" in str(answer)
    assert isinstance(answer_of(lambda: tier.exists(keys)), ConnectionError)

    # It knows of nothing then, and hears of our segment in its own time.
    master.start()
    answer = [False]
    while answer != [True] and time.monotonic() < deadline:
        time.sleep(0.1)
        answer = answer_of(lambda: tier.write(keys_of(-1), rows[:1]))
    found = np.zeros_like(rows[:1])
    assert tier.read(keys_of(-1), found) == [True]
    assert (found == rows[:1]).all()


@pytest.mark.slow
def test_a_master_that_hangs_is_an_error_after_the_time_out(make, master):
    tier = make(master, segment_bytes=SEGMENT_BYTES)
    rows = records(4)
    tier.write(keys_of(*range(4)), rows)
    master.stop()
    for call in (
        lambda: tier.exists(keys_of(7)),
        lambda: tier.write(keys_of(8), rows[:1]),
        lambda: tier.read(keys_of(*range(4)), rows),
        lambda: tier.remove(keys_of(1)),
    ):
        start = time.monotonic()
        assert isinstance(answer_of(call), ConnectionError)
        assert time.monotonic() - start < 30, "what the engine waits by itself"
    # Dead it is quicker to close than hanging.
    master.kill()


@pytest.mark.slow
def test_a_lender_that_hangs_leaves_misses_after_the_time_out(make, master):
    with Lender(master, SEGMENT_BYTES) as lender:
        tier = make(master)
        rows = records(4)
        keys = keys_of(*range(4))
        tier.write(keys, rows)
        lender.stop()
        found = np.zeros_like(rows)
        start = time.monotonic()
        assert tier.read(keys, found) == [False] * 4
        assert time.monotonic() - start < 59, "what the engine waits by itself"


# ---- the end of a process

LEFT_OPEN = """
import sys, threading
import numpy as np
from kvpool.tiers.mooncake import MooncakeTier
tier = MooncakeTier(sys.argv[1], sys.argv[2], segment_bytes=16 << 20)
key = bytes(32)
row = np.ones((1, 1 << 16), np.uint8)
assert tier.write([key], row) == [True]
def work():
    while True:
        tier.read([key], row)
if sys.argv[3] == "busy":
    threading.excepthook = lambda arguments: None
    threading.Thread(target=work, daemon=True).start()
    threading.Event().wait(0.1)
if sys.argv[3] == "deleted":
    del tier
print("done")
"""


@pytest.mark.parametrize(
    "how", ["busy", *(pytest.param(how, marks=pytest.mark.slow) for how in ("open", "deleted"))]
)
def test_a_tier_left_open_does_not_change_how_a_process_ends(store, how):
    run = subprocess.run(
        [sys.executable, "-c", LEFT_OPEN, store.metadata, store.address, how],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert (run.returncode, run.stdout) == (0, "done\n"), run.stderr
    assert "Traceback" not in run.stderr
