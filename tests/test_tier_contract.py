"""What every tier promises, asked of each that there is, with the real servers behind them."""

import threading
from contextlib import ExitStack
from hashlib import sha256

import numpy as np
import pytest

from kvpool import KVCacheStateError, tiers
from kvpool.snapshot.fingerprint import Fingerprint
from kvpool.tiers.contract import Tier
from kvpool.tiers.file import FileTier
from kvpool.tiers.host import HostTier
from kvpool.tiers.records import PageRecords
from tests.helpers.mooncake import Lender, Master, why_no_mooncake
from tests.helpers.valkey import Server, why_no_valkey

RECORD_BYTES = 4096
ROOM = 1 << 20  # of 256 records: no test needs as many
KINDS = ("host", "file", "mooncake", "valkey")


class Places:
    """Where tiers of one kind keep their records."""

    def __init__(self, kind, folder, stack):
        self.kind = kind
        self._folder = folder
        self._stack = stack
        if kind == "mooncake":
            self._master = stack.enter_context(Master(folder))
            stack.enter_context(Lender(self._master, 32 << 20))
        elif kind == "valkey":
            self._server = stack.enter_context(Server(folder))

    def open(self):
        """Another tier; with the same records, but for the host's."""
        if self.kind == "host":
            tier = HostTier(ROOM)
        elif self.kind == "file":
            tier = FileTier(self._folder / "tier", ROOM)
        elif self.kind == "mooncake":
            from kvpool.tiers.mooncake import MooncakeTier

            tier = MooncakeTier(self._master.metadata, self._master.address)
        else:
            from kvpool.tiers.valkey import ValkeyTier

            tier = ValkeyTier(self._server.url)
        self._stack.callback(tier.close)
        return tier


@pytest.fixture(scope="module", params=KINDS)
def places(request, tmp_path_factory):
    reason = {"mooncake": why_no_mooncake, "valkey": why_no_valkey}.get(request.param)
    if reason is not None and (why := reason()):
        pytest.skip(why)
    with ExitStack() as stack:
        yield Places(request.param, tmp_path_factory.mktemp(request.param), stack)


@pytest.fixture(scope="module")
def tier(places):
    """One for all tests of a kind: each has keys of its own."""
    return places.open()


@pytest.fixture
def keys(request):
    return [sha256(f"{request.node.name} {i}".encode()).digest() for i in range(40)]


def records(count, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (count, RECORD_BYTES), np.uint8)


def test_a_tier_is_one(tier, places):
    assert isinstance(tier, Tier)
    assert tier.name == places.kind
    assert all(type(number) is int for number in tier.stats().values())


def test_records_come_back(tier, keys):
    rows = records(40)
    assert tier.write(keys, rows) == [True] * 40
    assert tier.exists(keys) == [True] * 40
    found = np.zeros_like(rows)
    assert tier.read(keys[::-1], found) == [True] * 40
    assert (found == rows[::-1]).all()


def test_missing_records_are_answers_between_others(tier, keys):
    rows = records(3)
    tier.write([keys[1], keys[3], keys[4]], rows)
    expected = [False, True, False, True, True, False]
    assert tier.exists(keys[:6]) == expected
    found = np.zeros((6, RECORD_BYTES), np.uint8)
    assert tier.read(keys[:6], found) == expected
    assert (found[[1, 3, 4]] == rows).all()


def test_nothing_is_asked_for_nothing(tier):
    none = np.zeros((0, RECORD_BYTES), np.uint8)
    assert tier.exists([]) == tier.read([], none) == tier.write([], none) == tier.remove([]) == []


def test_a_key_twice_in_a_call(tier, keys):
    rows = records(2)
    assert tier.write([keys[0], keys[0]], rows) == [True, True]
    assert tier.exists([keys[0], keys[0]]) == [True, True]
    found = np.zeros_like(rows)
    assert tier.read([keys[0], keys[0]], found) == [True, True]
    assert (found[0] == found[1]).all()
    assert any((found[0] == row).all() for row in rows)


def test_a_record_that_is_there_stays_or_is_replaced_whole(tier, keys):
    old, new = records(8), records(8, seed=1)
    tier.write(keys[:8], old)
    tier.write(keys[:8], new)
    found = np.zeros_like(old)
    assert tier.read(keys[:8], found) == [True] * 8
    assert ((found == old).all(1) | (found == new).all(1)).all()


def test_rows_are_the_callers_again(tier, keys):
    rows = records(4)
    kept = rows.copy()
    tier.write(keys[:4], rows)
    rows[...] = 0
    found = np.empty_like(rows)
    assert tier.read(keys[:4], found) == [True] * 4
    assert (found == kept).all()


def test_rows_of_a_registered_buffer(tier, keys):
    buffer = np.zeros((16, RECORD_BYTES), np.uint8)
    tier.register(buffer)
    tier.register(buffer)
    tier.unregister(buffer)
    try:
        buffer[:8] = records(8)
        assert tier.write(keys[:8], buffer[:8]) == [True] * 8
        assert tier.read(keys[:8], buffer[8:]) == [True] * 8
        assert (buffer[8:] == buffer[:8]).all()
    finally:
        tier.unregister(buffer)
    assert tier.read(keys[:8], buffer[8:]) == [True] * 8


def test_removed_records_are_gone_and_can_be_written_again(tier, keys):
    rows = records(2)
    tier.write(keys[:2], rows)
    assert tier.remove([keys[0], keys[2]]) == [True, False]
    assert tier.exists(keys[:2]) == [False, True]
    assert tier.write(keys[:1], rows[1:]) == [True]
    found = np.zeros((1, RECORD_BYTES), np.uint8)
    assert tier.read(keys[:1], found) == [True]
    assert (found == rows[1]).all()


@pytest.mark.parametrize(
    ("rows", "error"),
    [
        (np.zeros((2, RECORD_BYTES), np.int8), TypeError),
        (np.zeros(RECORD_BYTES, np.uint8), TypeError),
        (np.zeros((2, 2 * RECORD_BYTES), np.uint8)[:, ::2], TypeError),
        (np.zeros((3, RECORD_BYTES), np.uint8), ValueError),
    ],
    ids=["dtype", "shape", "strides", "number"],
)
def test_other_rows_are_refused_before_anything_happens(tier, keys, rows, error):
    for call in (tier.read, tier.write):
        with pytest.raises(error, match="rows"):
            call(keys[:2], rows)
    assert tier.exists(keys[:2]) == [False, False]


def test_threads_see_whole_records(tier, keys):
    """Every row is of one value all through, so a mixture of two writes would show."""
    some, problems = keys[:4], []

    def write(value):
        for _ in range(30):
            rows = np.full((4, RECORD_BYTES), value, np.uint8)
            if tier.write(some, rows) != [True] * 4:
                problems.append("refused")

    def read():
        rows = np.zeros((4, RECORD_BYTES), np.uint8)
        for _ in range(60):
            for row, is_there in zip(rows, tier.read(some, rows), strict=True):
                if is_there and (row != row[0]).any():
                    problems.append("mixture")

    threads = [threading.Thread(target=write, args=(value,)) for value in (1, 2)]
    threads += [threading.Thread(target=read) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not problems


def test_bytes_of_another_page_under_a_right_key_do_not_verify(tier, keys):
    layout = PageRecords(Fingerprint("llama", 2, 3, 8, 4, "float16", "float16", 1.0, 1.0))
    tokens = np.arange(12, dtype=np.int32).reshape(3, 4)
    rows = np.zeros((3, RECORD_BYTES), np.uint8)
    own = rows[:, : layout.record_bytes]
    layout.kv(own)[...] = 1
    layout.seal(own, keys[:3], tokens)
    # The first is in order, the second another's, the third was altered on its way.
    rows[1] = rows[0]
    rows[2, layout.record_bytes - 1] ^= 1
    assert tier.write(keys[:3], rows) == [True] * 3
    found = np.zeros_like(rows)
    assert tier.read(keys[:3], found) == [True] * 3
    verified = layout.verify(found[:, : layout.record_bytes], keys[:3], tokens)
    assert verified == [True, False, False]


def test_closed_tiers_say_so(places, keys):
    tier = places.open()
    rows = records(1)
    tier.write(keys[:1], rows)
    tier.close()
    tier.close()
    for call in (
        lambda: tier.exists(keys[:1]),
        lambda: tier.read(keys[:1], rows),
        lambda: tier.write(keys[:1], rows),
        lambda: tier.remove(keys[:1]),
    ):
        with pytest.raises(KVCacheStateError, match="closed"):
            call()
    assert all(type(number) is int for number in tier.stats().values())


def test_records_outlive_the_tier_but_on_the_host(places, keys):
    rows = records(4)
    writer = places.open()
    writer.write(keys[:4], rows)
    writer.close()
    reader = places.open()
    assert reader.exists(keys[:4]) == [places.kind != "host"] * 4


def test_one_length_is_not_another(tier, places, keys):
    """Pools of different layouts have different keys: this is somebody's error, or damage."""
    tier.write(keys[:1], records(1))
    longer = np.zeros((1, 2 * RECORD_BYTES), np.uint8)
    if places.kind == "host":
        with pytest.raises(ValueError, match=r"4096 bytes, got 8192"):
            tier.read(keys[:1], longer)
    else:
        assert tier.read(keys[:1], longer) == [False]


def test_tiers_are_had_from_the_package():
    for name in tiers.__all__:
        assert getattr(tiers, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'TapeTier'"):
        tiers.TapeTier  # noqa: B018
