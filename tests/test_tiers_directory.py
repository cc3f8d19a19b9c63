"""A pool over a directory that is damaged, foreign, without rights or without space.

Answers are those without a tier, nothing of the pool is lost, and what can be mended is: the rows
of `serve_prints` tell which prefix they are of.
"""

import errno
import multiprocessing
import os
import stat

import pytest

from kvpool.tiers import FileTier
from tests.helpers.pools import R
from tests.helpers.tiers import (
    all_given_back,
    attach,
    expected_prints,
    fill_tiers,
    matches,
    serve_prints,
    tier_pool,
)

PROMPT = R(1, 41)
ROOM = 8 << 20
NOBODY = 65534


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "tier"


@pytest.fixture
def make(folder):
    """A function that opens tiers in `folder`, which are closed at the end."""
    made = []

    def open_tier():
        made.append(FileTier(folder, ROOM))
        return made[-1]

    yield open_tier
    for tier in made:
        tier.close()


def page_files(folder):
    return sorted(folder.rglob("*.page"))


def serves_right(pool):
    """Answers of prompts that share pages with what is in the directory, and of others."""
    for prompt in (PROMPT, [*PROMPT[:20], 7, 8, 9], R(200, 230)):
        pool.prefetch(prompt).wait(20)
        found, _ = serve_prints(pool, prompt)
        assert (found == expected_prints(prompt)).all()
        pool.check()
    pool.tiers.flush(20)
    pool.poll_tiers()
    all_given_back(pool)


def flip(path, whole):
    data = bytearray(whole[path])
    data[-100] ^= 1
    path.write_bytes(data)


def cut(path, whole):
    path.write_bytes(whole[path][:-100])


def hole(path, whole):
    path.write_bytes(bytes(len(whole[path])))


def neighbour(path, whole):
    path.write_bytes(next(data for other, data in whole.items() if other != path))


@pytest.mark.parametrize("damage", [flip, cut, hole, neighbour])
def test_damaged_files_are_misses_and_written_again(make_pool, make, folder, damage):
    fill_tiers(make_pool, [PROMPT], make())
    whole = {path: path.read_bytes() for path in page_files(folder)}
    assert len(whole) == 10
    for path in whole:
        damage(path, whole)
    pool = tier_pool(make_pool)
    attach(pool, make())
    assert pool.prefetch(PROMPT).wait(20) == 0
    serves_right(pool)
    assert {path: path.read_bytes() for path in whole} == whole
    other = tier_pool(make_pool)
    attach(other, make())
    other.prefetch(PROMPT).wait(20)
    assert matches(other, PROMPT) == 40


def test_pages_of_another_model_are_not_found_nor_believed(make_pool, make, folder):
    fill_tiers(make_pool, [PROMPT], make(), model="weights-0")
    theirs = [path.read_bytes() for path in page_files(folder)]
    pool = tier_pool(make_pool)
    attach(pool, make())
    assert pool.prefetch(PROMPT).wait(20) == 0
    assert pool.tiers.stats_by_tier()["file"]["bad_pages"] == 0
    serves_right(pool)
    for path in page_files(folder):
        if path.read_bytes() not in theirs:
            path.write_bytes(theirs[0])
    other = tier_pool(make_pool)
    attach(other, make())
    serves_right(other)
    assert other.tiers.stats_by_tier()["file"]["bad_pages"] > 0


def test_without_space_pages_are_refused_and_answers_right(make_pool, make, folder, monkeypatch):
    fill_tiers(make_pool, [PROMPT], make())

    def no_space(file, row):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("kvpool.tiers.file.write_all", no_space)
    pool = tier_pool(make_pool)
    attach(pool, make())
    serves_right(pool)
    found = pool.tiers.stats_by_tier()["file"]
    assert found["hit_pages"] >= 10
    assert found["unwritten_pages"] > 0
    assert found["failures"] == 0
    assert list((folder / "parts").iterdir()) == []


def _open_without_rights(folder, give_rights_up, answer):
    """In a process of its own, which may become a user without rights."""
    if give_rights_up:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
    try:
        tier = FileTier(folder, ROOM)
    except OSError as error:
        answer.send(("refused", error.errno))
        return
    except BaseException as error:
        answer.send(("error", repr(error)))
        raise
    answer.send(("opened", ""))
    tier.close()


@pytest.mark.skipif(not hasattr(os, "setuid"), reason="no users here")
def test_without_rights_the_directory_is_refused_with_its_path(make_pool, make, folder):
    """A real user without rights: the tests' own may have all."""
    fill_tiers(make_pool, [PROMPT], make())
    is_root = os.geteuid() == 0
    if not is_root:
        folder.chmod(0)
    try:
        context = multiprocessing.get_context("spawn")
        mine, theirs = context.Pipe()
        process = context.Process(
            target=_open_without_rights, args=(folder, is_root, theirs), daemon=True
        )
        process.start()
        try:
            assert mine.poll(60), "no answer"
            assert mine.recv() == ("refused", errno.EACCES)
        finally:
            process.join(20)
            if process.is_alive():
                process.kill()
                process.join()
    finally:
        if not is_root:
            folder.chmod(stat.S_IRWXU)


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS])
def test_rights_that_are_lost_meanwhile_cost_writes_only(
    make_pool, make, folder, monkeypatch, number
):
    fill_tiers(make_pool, [PROMPT], make())
    pool = tier_pool(make_pool)
    attach(pool, make(), retry_s=0.01)
    real_open = os.open

    def refuse(path, flags, *arguments, **options):
        if flags & os.O_ACCMODE != os.O_RDONLY:
            raise OSError(number, os.strerror(number), path)
        return real_open(path, flags, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refuse)
        serves_right(pool)
        found = pool.tiers.stats_by_tier()["file"]
        assert found["hit_pages"] >= 10
        assert found["failures"] > 0
        assert os.strerror(number) in pool.tiers.last_errors["file"]
