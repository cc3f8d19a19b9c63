"""Damaged snapshots that load in part: what verifies is served, what does not is named."""

import pytest

from kvpool import KVCachePool
from tests.helpers.nine_pages import save_nine_pages
from tests.helpers.resealed import metadata, put, resealed, split
from tests.helpers.stamps import cached

PAGE_BYTES = 2 * 2 * 2 * 2 * 8 * 4  # K and V, 2 layers, 2 tokens, 2 heads of 8 float32


@pytest.fixture
def saved(make_pool, tmp_path):
    """A snapshot of nine pages in two namespaces, as bytes, and where it lies."""
    return save_nine_pages(make_pool, tmp_path / "pool")


def test_whole_pages_of_a_file_that_is_cut_off_are_loaded(saved, make_pool):
    data, path = saved
    path.write_bytes(data[: -3 * PAGE_BYTES - 1])
    loaded = make_pool.keep(KVCachePool.load(path, model="m"))
    report = loaded.load_report
    assert (report.pages_loaded, report.pages_dropped_corrupt) == (5, 4)
    assert {page.reason for page in report.dropped} <= {"cut off", "below"}
    assert f"the file has {path.stat().st_size:,} bytes, it was saved with {len(data):,}" in str(
        report
    )


def test_appended_bytes_are_told_and_harmless(saved, make_pool):
    data, path = saved
    path.write_bytes(data + b"more")
    loaded = make_pool.keep(KVCachePool.load(path, model="m"))
    assert loaded.load_report.pages_loaded == 9
    assert loaded.load_report.file_bytes == loaded.load_report.expected_bytes + 4


def test_page_that_does_not_verify_takes_those_below_along(saved, make_pool):
    data, path = saved
    _, entries, _ = split(data)
    # The most valuable page is the shared first one of the two prompts without a namespace.
    flipped = bytearray(data)
    flipped[len(data) - entries["kv"]["data_offsets"][1] + entries["kv"]["data_offsets"][0]] ^= 1
    path.write_bytes(flipped)
    loaded = make_pool.keep(KVCachePool.load(path, model="m"))
    report = loaded.load_report
    assert [(page.start, page.reason) for page in report.dropped] == [
        (0, "checksum"),
        (2, "below"),
        (4, "below"),
        (2, "below"),
        (4, "below"),
    ]
    assert report.pages_dropped_corrupt == 5
    assert {prefix[1] for prefix in cached(loaded)} == {"tenant"}
    assert "checksum: namespace None, tokens from 0" in str(report)


def test_room_that_corrupt_pages_leave_is_used(saved, make_pool):
    data, path = saved
    flipped = bytearray(data)
    flipped[-9 * PAGE_BYTES] ^= 1
    path.write_bytes(flipped)
    loaded = make_pool.keep(KVCachePool.load(path, model="m", num_slots=6))
    assert (loaded.load_report.pages_loaded, loaded.load_report.pages_dropped_room) == (3, 1)


def test_other_tokens_do_not_verify_even_if_they_were_sealed(saved, make_pool):
    data, path = saved
    path.write_bytes(resealed(data, tokens=put(_0=99)))
    loaded = make_pool.keep(KVCachePool.load(path, model="m"))
    assert loaded.load_report.dropped[0].reason == "checksum"
    assert {prefix[1] for prefix in cached(loaded)} == {"tenant"}


def test_other_namespace_does_not_verify_even_if_it_was_sealed(saved, make_pool):
    data, path = saved
    path.write_bytes(
        resealed(data, namespaces=lambda text: bytes(text).replace(b"tenant", b"client"))
    )
    loaded = make_pool.keep(KVCachePool.load(path, model="m"))
    assert {prefix[1] for prefix in cached(loaded)} == {None}


def test_other_model_does_not_verify_even_if_it_was_sealed(saved, make_pool):
    data, path = saved
    path.write_bytes(resealed(data, metadata(model="M")))
    loaded = make_pool.keep(KVCachePool.load(path, model="M"))
    assert loaded.load_report.pages_loaded == 0
