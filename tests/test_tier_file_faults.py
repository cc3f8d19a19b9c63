"""FileTier: torn files, killed writers, full disks, and directories that are taken away."""

import errno
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from kvpool.tiers import page_files
from kvpool.tiers.directory import TierDirectory
from kvpool.tiers.file import FileTier
from tests.helpers.page_files import RECORD_BYTES, key, pages, path_of, rows_of, there

ROOT = Path(__file__).resolve().parents[1]


# ---- damage and crashes


@pytest.mark.parametrize("length", [0, 1, RECORD_BYTES - 1, RECORD_BYTES + 1])
def test_a_torn_file_is_a_miss_and_goes(make_file_tier, folder, length):
    tier = make_file_tier()
    tier.write([key(0), key(1)], rows_of(0, 1))
    os.truncate(path_of(folder, 0), length)
    found = rows_of(9, 9)
    assert tier.read([key(0), key(1)], found) == [False, True]
    assert (found[1] == 1).all()
    assert there(tier, 0, 1) == [1]
    assert tier.stats()["torn_records"] == 1
    assert tier.write([key(0)], rows_of(5)) == [True]
    assert tier.read([key(0)], found[:1]) == [True]


def test_what_a_killed_writer_left_is_removed_by_the_next_tier(make_file_tier, folder):
    code = """
import os, sys
from kvpool.tiers import file
from kvpool.tiers.file import FileTier
from tests.helpers.page_files import RECORD_BYTES, key, rows_of
tier = FileTier(sys.argv[1], 4 * RECORD_BYTES)
tier.write([key(0)], rows_of(0))
steps = []
place = file.place
def stop(*arguments):
    steps.append(None)
    if len(steps) == 2:
        os._exit(9)
    place(*arguments)
file.place = stop
tier.write([key(1), key(2)], rows_of(1, 2))
"""
    run = subprocess.run(
        [sys.executable, "-c", code, folder], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert run.returncode == 9, run.stderr
    assert len(list((folder / "parts").iterdir())) == 1
    tier = make_file_tier()
    assert list((folder / "parts").iterdir()) == []
    assert tier.stats()["removed_parts"] == 1
    assert there(tier, 0, 1, 2) == [0, 1]
    # It is counted too high, and put right by the first eviction; the bound held all the time.
    assert tier.stats()["records"] == 3
    tier.write([key(3), key(4)], rows_of(3, 4))
    assert there(tier, 0, 1, 3, 4) == [0, 1, 3, 4]
    assert tier.stats()["records"] == 4


def test_files_that_others_write_now_are_left_alone(make_file_tier, folder, monkeypatch):
    tier = make_file_tier()
    seen = []
    write_all = page_files.write_all

    def write_beside(file, row):
        make_file_tier()
        seen.append(len(list((folder / "parts").iterdir())))
        write_all(file, row)

    monkeypatch.setattr("kvpool.tiers.file.write_all", write_beside)
    assert tier.write([key(0)], rows_of(0)) == [True]
    assert seen == [1]


KILLED = """
import sys
import numpy as np
from kvpool.tiers.file import FileTier
from tests.helpers.page_files import RECORD_BYTES, key, rows_of
tier = FileTier(sys.argv[1], 20 * RECORD_BYTES)
rng = np.random.default_rng(int(sys.argv[2]))
print("ready", flush=True)
while True:
    numbers = [int(n) for n in rng.integers(0, 60, 8)]
    tier.write([*map(key, numbers)], rows_of(*numbers))
"""


@pytest.mark.slow
def test_killed_writers_leave_whole_records_and_the_bound(make_file_tier, folder):
    rng = np.random.default_rng(5)
    for seed in range(6):
        workers = [
            subprocess.Popen(
                [sys.executable, "-c", KILLED, folder, str(10 * seed + i)],
                cwd=ROOT,
                stdout=subprocess.PIPE,
            )
            for i in range(2)
        ]
        try:
            for worker in workers:
                assert worker.stdout.readline() == b"ready\n"
            time.sleep(rng.uniform(0, 0.05))
        finally:
            for worker in workers:
                worker.kill()
                worker.wait()
                worker.stdout.close()
        tier = make_file_tier(20)
        assert list((folder / "parts").iterdir()) == []
        assert 10 <= len(pages(folder)) <= 20
        stats = tier.stats()
        assert stats["records"] >= len(pages(folder)), "never counted too low"
        rows = rows_of(*[0] * 60)
        for number, is_there in enumerate(tier.read([*map(key, range(60))], rows)):
            assert not is_there or (rows[number] == number).all()
        assert tier.stats()["torn_records"] == 0


# ---- no space, no rights, no directory


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_refuses_the_record_and_leaves_nothing(
    make_file_tier, folder, monkeypatch, number
):
    tier = make_file_tier()
    tier.write([key(0)], rows_of(0))
    write_all, done = page_files.write_all, []

    def fill_up(file, row):
        if len(done) == 2:
            os.write(file, b"half")
            raise OSError(number, os.strerror(number))
        done.append(None)
        write_all(file, row)

    monkeypatch.setattr("kvpool.tiers.file.write_all", fill_up)
    answers = tier.write([*map(key, range(1, 5))], rows_of(1, 2, 3, 4))
    assert answers == [True, True, False, False]
    assert there(tier, *range(5)) == [0, 1, 2]
    assert list((folder / "parts").iterdir()) == []
    assert tier.stats()["refused_records"] == 2


@pytest.fixture
def tiny_disk(tmp_path):
    """A file system of 1 MiB, where the system lets us mount one."""
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)]
    try:
        mounted = subprocess.run(command, capture_output=True, timeout=20).returncode == 0
    except OSError:
        mounted = False
    if not mounted:
        pytest.skip("no file system may be mounted here")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True, timeout=20)


def test_a_disk_that_is_really_full(tiny_disk):
    tier = FileTier(tiny_disk / "tier", 64 << 20)
    rows = np.ones((16, 128 << 10), np.uint8)
    answers = tier.write([*map(key, range(16))], rows)
    assert 4 <= sum(answers) < 16
    assert answers == sorted(answers, reverse=True)
    assert tier.exists([*map(key, range(16))]) == answers
    assert tier.read([*map(key, range(16))], rows) == answers
    assert list((tiny_disk / "tier" / "parts").iterdir()) == []
    # A smaller tier finds its room by eviction.
    small = FileTier(tiny_disk / "tier", 256 << 10)
    small.remove([key(0)])
    assert small.write([key(20)], rows[:1]) == [True]
    small.close()
    tier.close()


def test_a_directory_that_vanished_is_an_error_for_writes_and_no_record_for_reads(
    make_file_tier, folder
):
    tier = make_file_tier()
    tier.write([key(0)], rows_of(0))
    folder.rename(folder.with_name("away"))
    assert tier.read([key(0)], rows_of(0)) == [True]  # it is the same directory still
    subprocess.run(["rm", "-r", folder.with_name("away")], check=True)
    folder.mkdir()
    assert tier.exists([key(0)]) == tier.read([key(0)], rows_of(0)) == [False]
    assert tier.stats()["records"] == 0
    with pytest.raises(FileNotFoundError):
        tier.write([key(1)], rows_of(1))
    assert list(folder.iterdir()) == [], "nothing is written into the one in its place"


def test_an_emptied_directory_says_so(make_file_tier, folder):
    tier = make_file_tier()
    (folder / "kvpool-tier").unlink()
    with pytest.raises(FileNotFoundError, match="make the tier again"):
        tier.write([key(0)], rows_of(0))
    assert list((folder / "parts").iterdir()) == []


def test_directories_that_others_tidied_up_come_again(make_file_tier, folder):
    tier = make_file_tier()
    tier.write([key(0)], rows_of(0))
    path = path_of(folder, 0)
    path.unlink()
    path.parent.rmdir()
    path.parent.parent.rmdir()
    assert tier.write([key(0)], rows_of(3)) == [True]
    assert there(tier, 0) == [0]


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS])
def test_no_rights_are_an_error_for_writes(make_file_tier, monkeypatch, number):
    """Tests may run as a user who has all rights: so the system is made to refuse."""
    tier = make_file_tier()
    tier.write([key(0)], rows_of(0))
    real_open = os.open

    def refuse(path, flags, *arguments, **options):
        if flags & os.O_ACCMODE != os.O_RDONLY:
            raise OSError(number, os.strerror(number), path)
        return real_open(path, flags, *arguments, **options)

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(OSError, match=os.strerror(number)):
        tier.write([key(1)], rows_of(1))
    assert tier.read([key(0)], rows_of(0)) == [True]
    with pytest.raises(OSError, match=os.strerror(number)):
        make_file_tier()


@pytest.mark.skipif(os.geteuid() == 0, reason="runs as a user who has all rights")
def test_a_record_without_rights_is_a_miss(make_file_tier, folder):
    tier = make_file_tier()
    tier.write([key(0), key(1)], rows_of(0, 1))
    path_of(folder, 0).chmod(0)
    assert tier.read([key(0), key(1)], rows_of(0, 0)) == [False, True]
    folder.chmod(0o500)
    try:
        with pytest.raises(PermissionError):
            FileTier(folder / "below", 1 << 20)
    finally:
        folder.chmod(0o700)


def test_a_disk_that_fails_is_an_error(make_file_tier, monkeypatch):
    tier = make_file_tier()
    tier.write([key(0)], rows_of(0))

    def fail(*arguments):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "readv", fail)
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        tier.read([key(0)], rows_of(0))


def test_a_lock_that_does_not_come_is_an_error_in_time(make_file_tier, folder):
    tier = make_file_tier(timeout_s=0.05)
    with TierDirectory(str(folder), 1.0).locked():
        with pytest.raises(TimeoutError, match=re.escape("0.05 s")):
            tier.write([key(0)], rows_of(0))
        assert tier.read([key(0)], rows_of(0)) == [False]
    assert list((folder / "parts").iterdir()) == []
    assert tier.write([key(0)], rows_of(0)) == [True]
