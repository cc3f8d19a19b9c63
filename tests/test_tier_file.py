"""FileTier: order and bound over processes, whatever the clock says; what is not its own."""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from kvpool.tiers import page_files
from kvpool.tiers.directory import TierDirectory
from kvpool.tiers.file import FileTier
from tests.helpers.page_files import RECORD_BYTES, key, pages, path_of, rows_of, there

ROOT = Path(__file__).resolve().parents[1]


# ---- order and bound


def test_the_least_recently_used_goes_first(make_file_tier):
    tier = make_file_tier(4)
    tier.write([*map(key, range(4))], rows_of(0, 1, 2, 3))
    tier.read([key(0), key(2)], rows_of(0, 0))
    tier.write([key(4), key(5)], rows_of(4, 5))
    assert there(tier, *range(6)) == [0, 2, 4, 5]
    tier.exists([key(0)])  # no use
    tier.write([key(6)], rows_of(6))
    assert there(tier, *range(7)) == [2, 4, 5, 6]
    assert tier.stats()["evicted_records"] == 3


def test_processes_evict_by_each_others_uses(make_file_tier):
    first, second = make_file_tier(4), make_file_tier(4)
    first.write([*map(key, range(4))], rows_of(0, 1, 2, 3))
    second.read([key(0)], rows_of(0))
    first.write([key(4)], rows_of(4))
    second.read([key(2)], rows_of(0))
    first.write([key(5)], rows_of(5))
    assert there(first, *range(6)) == [0, 2, 4, 5]
    assert first.stats()["bytes"] == second.stats()["bytes"] == 4 * RECORD_BYTES


def test_an_overwrite_counts_once_and_evicts_nothing(make_file_tier, folder):
    tier = make_file_tier(2)
    tier.write([key(0), key(1)], rows_of(0, 1))
    assert tier.write([key(1)], rows_of(7)) == [True]
    found = rows_of(0, 0)
    assert tier.read([key(0), key(1)], found) == [True, True]
    assert (found == rows_of(0, 7)).all()
    assert tier.stats()["records"] == 2
    assert tier.stats()["bytes"] == sum(path.stat().st_size for path in pages(folder))


def test_more_than_fits_leaves_the_last_ones_and_too_large_none(make_file_tier):
    tier = make_file_tier(3)
    assert tier.write([*map(key, range(7))], rows_of(*range(7))) == [True] * 7
    assert there(tier, *range(7)) == [4, 5, 6]
    assert tier.write([key(9)], np.zeros((1, 4 * RECORD_BYTES), np.uint8)) == [False]
    assert there(tier, *range(7)) == [4, 5, 6]


def test_a_smaller_tier_evicts_down_to_its_own_bound(make_file_tier):
    make_file_tier(8).write([*map(key, range(8))], rows_of(*range(8)))
    small = make_file_tier(3)
    small.write([key(8)], rows_of(8))
    assert there(small, *range(9)) == [6, 7, 8]


WORKER = """
import sys
import numpy as np
from kvpool.tiers.file import FileTier
from tests.helpers.page_files import RECORD_BYTES, key, rows_of
tier = FileTier(sys.argv[1], 20 * RECORD_BYTES)
rng = np.random.default_rng(int(sys.argv[2]))
wrong = 0
for _ in range(60):
    numbers = [int(n) for n in rng.integers(0, 60, 4)]
    keys = [key(n) for n in numbers]
    if rng.random() < 0.6:
        tier.write(keys, rows_of(*numbers))
    else:
        found = rows_of(0, 0, 0, 0)
        for n, row, is_there in zip(numbers, found, tier.read(keys, found)):
            wrong += is_there and bool((row != n).any())
print(wrong, tier.stats()["evicted_records"] > 0)
"""


def test_processes_keep_the_bound_together(make_file_tier, folder):
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", WORKER, folder, str(seed)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for seed in range(3)
    ]
    most = 0
    try:
        while any(worker.poll() is None for worker in workers):
            if (folder / "kvpool-tier").exists():
                with TierDirectory(str(folder), 10.0).locked():
                    most = max(most, len(pages(folder)))
            time.sleep(0.005)
        for worker in workers:
            assert worker.communicate(timeout=60) == ("0 True\n", "")
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    assert 10 <= most <= 20
    stats = make_file_tier(20).stats()
    assert stats["records"] == len(pages(folder)) <= 20
    assert stats["bytes"] == stats["records"] * RECORD_BYTES


# ---- clocks


def test_a_clock_that_goes_back_keeps_the_order(make_file_tier, monkeypatch):
    tier = make_file_tier(4)
    now = time.time_ns()
    for i, moment in enumerate([now, now - 10**18, now + 10**12, now - 5]):
        monkeypatch.setattr(time, "time_ns", lambda moment=moment: moment)
        tier.write([key(i)], rows_of(i))
    other = make_file_tier(4)  # it has not seen the clock in the future
    for i in range(4, 7):
        other.write([key(i)], rows_of(i))
        assert there(tier, *range(7)) == list(range(i - 3, i + 1))


@pytest.mark.parametrize("years", [-60, -1, 1, 60, 200, 400])
def test_files_of_times_that_cannot_be_keep_nobody_out(make_file_tier, folder, years):
    tier = make_file_tier(4)
    tier.write([*map(key, range(4))], rows_of(0, 1, 2, 3))
    strange = time.time_ns() + years * 365 * 86_400 * 10**9
    os.utime(path_of(folder, 2), ns=(strange, strange))
    other = make_file_tier(4)
    for i in range(4, 12):
        assert other.write([key(i)], rows_of(i)) == [True]
    assert there(other, *range(12)) == [8, 9, 10, 11]
    other.read([key(8)], rows_of(0))
    other.write([key(12)], rows_of(12))
    assert there(other, *range(13)) == [8, 10, 11, 12]


# ---- what is not ours


def test_a_directory_of_somebody_else_is_refused(folder):
    folder.mkdir()
    (folder / "thesis.txt").write_text("years of work")
    with pytest.raises(
        ValueError, match=r"not empty and no tier's directory: it has 'thesis.txt'"
    ):
        FileTier(folder, 1 << 20)
    assert [path.name for path in folder.iterdir()] == ["thesis.txt"]
    (folder / "thesis.txt").unlink()
    (folder / "lost+found").mkdir()
    FileTier(folder, 1 << 20).close()


def test_a_marker_of_another_version_is_refused(make_file_tier, folder):
    make_file_tier()
    (folder / "kvpool-tier").write_bytes(b"kvtier\x00\x02" + bytes(24))
    with pytest.raises(ValueError, match="another version"):
        make_file_tier()


def test_a_file_is_no_directory(folder):
    folder.write_text("")
    with pytest.raises(NotADirectoryError):
        FileTier(folder, 1 << 20)


def test_foreign_files_and_links_are_not_touched(make_file_tier, folder, tmp_path):
    tier = make_file_tier(2)
    tier.write([key(0)], rows_of(0))
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").write_bytes(bytes(RECORD_BYTES))
    linked = path_of(folder, 1)
    linked.parent.mkdir(parents=True)
    linked.symlink_to(outside / "file")
    below = path_of(folder, 2)
    below.parent.parent.symlink_to(outside)
    (path_of(folder, 0).parent / "note.txt").write_text("mine")
    directory = path_of(folder, 3)
    directory.mkdir(parents=True)
    pipe = path_of(folder, 4)
    pipe.parent.mkdir(parents=True)
    os.mkfifo(pipe)

    keys = [key(1), key(3), key(4)]
    assert tier.exists(keys) == tier.read(keys, rows_of(0, 0, 0)) == [False] * 3
    assert tier.write(keys, rows_of(1, 3, 4)) == [False] * 3
    with pytest.raises(NotADirectoryError):
        tier.write([key(2)], rows_of(2))
    for i in range(10, 16):
        tier.write([key(i)], rows_of(i))
    assert len(pages(folder)) == 2 + 3
    assert linked.is_symlink()
    assert below.parent.parent.is_symlink()
    assert [path.name for path in outside.iterdir()] == ["file"]
    assert (path_of(folder, 0).parent / "note.txt").read_text() == "mine"
    assert directory.is_dir()
    assert pipe.is_fifo()


def test_what_users_wrote_is_for_the_owner_of_a_new_directory(make_file_tier, folder):
    make_file_tier()
    assert folder.stat().st_mode & 0o777 == 0o700


def test_other_keys_are_refused(make_file_tier):
    tier = make_file_tier()
    for call in (lambda: tier.exists([b"short"]), lambda: tier.read([b"short"], rows_of(0))):
        with pytest.raises(ValueError, match="32 bytes, got 5"):
            call()


def test_a_close_waits_for_the_calls_inside(make_file_tier, monkeypatch):
    tier = make_file_tier()
    inside, go_on, answers = threading.Event(), threading.Event(), []
    write_all = page_files.write_all

    def wait(file, row):
        inside.set()
        go_on.wait(10)
        write_all(file, row)

    monkeypatch.setattr("kvpool.tiers.file.write_all", wait)
    writer = threading.Thread(target=lambda: answers.extend(tier.write([key(0)], rows_of(0))))
    writer.start()
    inside.wait(10)
    closer = threading.Thread(target=tier.close)
    closer.start()
    go_on.set()
    writer.join(10)
    closer.join(10)
    assert answers == [True]
    assert there(make_file_tier(), 0) == [0]
