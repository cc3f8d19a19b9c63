"""The file of a snapshot: any safetensors reader opens it, and it replaces another one whole."""

import errno
import os
import resource
import signal
import stat
import threading

import numpy as np
import pytest
import safetensors.numpy

from kvpool import KVCachePool, KVCacheStateError
from kvpool.snapshot.replacement import Replacement
from tests.helpers.pools import case_pool, serve, unchanged
from tests.helpers.stamps import cached, stamp
from tests.oracles.snapshot import DTYPES


@pytest.fixture
def pool(make_pool):
    pool = case_pool(make_pool, 2, 16)
    serve(pool, [1, 1, 2, 2, 3, 3], priority=4)
    serve(pool, range(20, 28), extra_key="tenant")
    stamp(pool)
    return pool


@pytest.mark.parametrize("dtype", DTYPES)
def test_plain_safetensors_reads_every_tensor(make_pool, tmp_path, dtype):
    pool = case_pool(make_pool, 2, 16, dtype=dtype)
    serve(pool, range(10))
    stamp(pool)
    pool.save(tmp_path / "x", model="name@revision")
    with safetensors.safe_open(tmp_path / "x", "numpy") as file:
        assert file.metadata()["model"] == "name@revision"
        assert file.metadata()["dtype"] == dtype
        assert file.get_tensor("tokens").tolist() == np.arange(10).reshape(5, 2).tolist()
        assert file.get_tensor("parents").tolist() == [-1, 0, 1, 2, 3]
        names = set(file.keys())
        if not dtype.startswith("float8"):  # no dtype of NumPy's own, nor of the library's NumPy
            page = file.get_slice("kv")[0:1]
            k, v = (np.asarray(part).view(np.uint8) for part in page[0])
    if dtype.startswith("float8"):
        entries = dict(safetensors.deserialize((tmp_path / "x").read_bytes()))
        assert set(entries) == names
        data = np.frombuffer(entries["kv"]["data"], np.uint8)
        k, v = data.reshape(5, 2, 2, 2, 2, 8)[0]
    assert k.tobytes() == np.ascontiguousarray(pool.key_cache[:, _slots(pool)]).tobytes()
    assert v.tobytes() == np.ascontiguousarray(pool.value_cache[:, _slots(pool)]).tobytes()


def _slots(pool):
    """Slots of the first cached page."""
    page = int(pool.radix.match_prefix([0, 1]).pages[0])
    return slice(page * pool.page_size, (page + 1) * pool.page_size)


def test_file_of_the_library_is_refused(tmp_path):
    safetensors.numpy.save_file({"kv": np.zeros((2, 2))}, tmp_path / "x", {"format": "pt"})
    with pytest.raises(ValueError, match="not a snapshot: expected format 'kvpool-snapshot'"):
        KVCachePool.load(tmp_path / "x")


def test_save_replaces_and_leaves_nothing_beside(pool, tmp_path):
    path = tmp_path / "pool"
    path.write_bytes(b"old")
    pool.save(path)
    assert os.listdir(tmp_path) == ["pool"]
    assert KVCachePool.load(path).load_report.pages_loaded == pool.stats()["pages_tree"]


def test_path_may_be_text_and_the_name_as_long_as_names_get(pool, tmp_path):
    path = os.path.join(tmp_path, "n" * 255)
    assert pool.save(path).path == path
    assert KVCachePool.load(path).load_report.path == path


def test_relative_path_and_link_reach_the_file(pool, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    os.mkdir("volume")
    os.symlink("volume/pool", "link")
    pool.save("link")
    assert os.path.islink("link")
    assert os.listdir("volume") == ["pool"]
    pool.save("plain")
    assert cached(KVCachePool.load("link")) == cached(KVCachePool.load("plain")) == cached(pool)


def test_permissions_are_what_the_umask_says(pool, tmp_path):
    before = os.umask(0o027)
    try:
        pool.save(tmp_path / "x")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "x").stat().st_mode) == 0o640


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o664, 0o000])
def test_mode_of_the_replaced_file_is_kept(pool, tmp_path, monkeypatch, mode):
    """The file holds prompts: nobody reads the new one, or a part of it, who could not before."""
    path, modes = tmp_path / "x", []
    path.write_bytes(b"old")
    path.chmod(mode)
    write = os.write

    def looking(file, data):
        modes.append(stat.S_IMODE(os.fstat(file).st_mode))
        return write(file, data)

    monkeypatch.setattr(os, "write", looking)
    before = os.umask(0o022)
    try:
        pool.save(path)
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == mode
    assert set(modes) == {0o600}
    assert os.listdir(tmp_path) == ["x"]


def test_mode_that_changes_during_a_save_counts(pool, tmp_path, monkeypatch):
    path = tmp_path / "x"
    path.write_bytes(b"old")
    lseek = os.lseek

    def changing(*arguments):
        path.chmod(0o600)
        return lseek(*arguments)

    monkeypatch.setattr(os, "lseek", changing)
    pool.save(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
@pytest.mark.parametrize("permitted", [True, False])
def test_owner_and_group_are_kept_where_permitted(pool, tmp_path, monkeypatch, permitted):
    path = tmp_path / "x"
    path.write_bytes(b"old")
    os.chown(path, 12345, 12346)
    path.chmod(0o664)

    def refused(*_):
        raise PermissionError(errno.EPERM, "not yours")

    if not permitted:
        monkeypatch.setattr(os, "fchown", refused)
    pool.save(path)
    found = path.stat()
    kept = (12345, 12346, 0o664) if permitted else (os.geteuid(), os.getegid(), 0o604)
    assert (found.st_uid, found.st_gid, stat.S_IMODE(found.st_mode)) == kept


@pytest.mark.parametrize("call", ["open", "write", "lseek", "fsync", "rename"])
def test_failing_disk_leaves_the_old_file_and_no_other(pool, tmp_path, monkeypatch, call):
    path = tmp_path / "pool"
    pool.save(path)
    before = path.read_bytes()
    serve(pool, [7, 7])

    def full(*arguments):
        raise OSError(errno.ENOSPC, "no space left", *arguments[:1] * (call in ("open", "rename")))

    monkeypatch.setattr(os, call, full)
    with unchanged(pool), pytest.raises(OSError, match="no space left") as caught:
        pool.save(path)
    monkeypatch.undo()
    assert caught.value.errno == errno.ENOSPC
    assert caught.value.filename == str(path)
    assert os.listdir(tmp_path) == ["pool"]
    assert path.read_bytes() == before


def test_limit_of_file_sizes_names_the_file(pool, tmp_path):
    path = tmp_path / "pool"
    path.write_bytes(b"old")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, hard))
    try:
        with pytest.raises(OSError, match="too large") as caught:
            pool.save(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (caught.value.errno, caught.value.filename) == (errno.EFBIG, str(path))
    assert os.listdir(tmp_path) == ["pool"]
    assert path.read_bytes() == b"old"


def test_error_of_a_signal_handler_stays_its_own(pool, tmp_path, monkeypatch):
    for error in (TimeoutError("enough"), OSError(errno.EIO, "disk", "elsewhere")):

        def handler(*_, error=error):
            raise error

        monkeypatch.setattr(os, "lseek", handler)
        with pytest.raises(OSError, match=r"enough|elsewhere") as caught:
            pool.save(tmp_path / "pool")
        assert caught.value is error


def test_missing_directory_is_an_error_before_anything(pool, tmp_path):
    with unchanged(pool), pytest.raises(FileNotFoundError):
        pool.save(tmp_path / "no" / "pool")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may do anything")
def test_no_permission_is_an_error_before_anything(pool, tmp_path):
    tmp_path.chmod(0o500)
    try:
        with unchanged(pool), pytest.raises(PermissionError):
            pool.save(tmp_path / "pool")
    finally:
        tmp_path.chmod(0o700)


def test_short_writes_are_continued(pool, tmp_path, monkeypatch):
    write = os.write
    monkeypatch.setattr(os, "write", lambda file, data: write(file, data[:7]))
    pool.save(tmp_path / "x")
    monkeypatch.undo()
    pool.save(tmp_path / "y")
    assert (tmp_path / "x").read_bytes() == (tmp_path / "y").read_bytes()


def test_left_over_file_goes_and_one_being_written_stays(pool, tmp_path):
    path = tmp_path / "pool"
    with Replacement(str(path)) as live:
        live.write(b"whole")
        (part,) = os.listdir(tmp_path)
        # Of a save that was killed, and of one to another target.
        dead, other = part[:-9] + "0000.part", part.replace(".kvpool-", ".kvpool-0")
        for name in (dead, other, "unrelated.part"):
            (tmp_path / name).write_bytes(b"half")
        pool.save(path)
        assert sorted(os.listdir(tmp_path)) == sorted([part, other, "unrelated.part", "pool"])
    assert sorted(os.listdir(tmp_path)) == sorted([other, "unrelated.part", "pool"])
    assert path.read_bytes() == b"whole", "the last one wins"


def test_save_from_a_second_thread_is_refused(pool, tmp_path, monkeypatch):
    writing, go_on = threading.Event(), threading.Event()
    write = os.write

    def slow(file, data):
        writing.set()
        assert go_on.wait(10)
        return write(file, data)

    monkeypatch.setattr(os, "write", slow)
    scheduler = threading.Thread(target=pool.save, args=(tmp_path / "pool",))
    scheduler.start()
    assert writing.wait(10)
    for call in (lambda: pool.save(tmp_path / "other"), lambda: pool.bind_request([1], 1)):
        with pytest.raises(KVCacheStateError):
            call()
    go_on.set()
    scheduler.join()
    assert os.listdir(tmp_path) == ["pool"]


def test_pages_that_go_while_they_are_saved_fail_the_save(pool, tmp_path, monkeypatch):
    lseek = os.lseek

    def handler(*arguments):
        pool.reset_prefix_cache()
        return lseek(*arguments)

    monkeypatch.setattr(os, "lseek", handler)
    with pytest.raises(KVCacheStateError, match="changed while it was saved"):
        pool.save(tmp_path / "pool")
    assert os.listdir(tmp_path) == []


def test_save_in_a_signal_handler_works(pool, tmp_path):
    before = signal.signal(signal.SIGUSR1, lambda *_: pool.save(tmp_path / "pool"))
    try:
        os.kill(os.getpid(), signal.SIGUSR1)
        serve(pool, [9, 9])
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert KVCachePool.load(tmp_path / "pool").load_report.pages_loaded == 7


def test_closed_pool_does_not_save(pool, tmp_path):
    pool.close()
    with pytest.raises(KVCacheStateError, match="closed"):
        pool.save(tmp_path / "pool")
