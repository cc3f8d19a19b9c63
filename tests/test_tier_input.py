"""What the stores refuse, before anything is made, asked or written."""

from hashlib import sha256

import numpy as np
import pytest

from kvpool.tiers import FileTier, HostTier, MooncakeTier, ValkeyTier

ROOM = 1 << 16
KEY = sha256(b"a page").digest()
METADATA, MASTER = "http://127.0.0.1:1/metadata", "127.0.0.1:1"
URL = "valkey://127.0.0.1:1"


def rows(count=1):
    return np.ones((count, 64), np.uint8)


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: HostTier("64GB"), TypeError, "capacity_bytes must be an int, got str"),
        (lambda: HostTier(1e9), TypeError, "capacity_bytes must be an int, got float"),
        (lambda: HostTier(-1), ValueError, "capacity_bytes must be at least 0, got -1"),
        (lambda: HostTier(1 << 70), ValueError, "capacity_bytes must be in 0 .. 9223372036854"),
        (lambda: HostTier(ROOM, name=3), TypeError, "name must be a str, got int"),
        (lambda: HostTier(ROOM, name=""), ValueError, "name is empty"),
    ],
)
def test_a_host_tier_that_cannot_be(make, error, words):
    with pytest.raises(error, match=words):
        make()


@pytest.mark.parametrize(
    ("directory", "options", "error", "words"),
    [
        (None, {}, TypeError, "directory must be a str or a path, got NoneType"),
        ("", {}, ValueError, "directory must be a path, got ''"),
        ("a\0b", {}, ValueError, r"directory must be a path, got 'a\\x00b'"),
        ("tier", {"capacity_bytes": "1GB"}, TypeError, "capacity_bytes must be an int, got str"),
        ("tier", {"capacity_bytes": 1 << 63}, ValueError, "capacity_bytes must be in 0 .."),
        ("tier", {"name": None}, TypeError, "name must be a str, got NoneType"),
        ("tier", {"timeout_s": 0}, ValueError, "timeout_s must be finite and above 0, got 0"),
        ("tier", {"timeout_s": float("nan")}, ValueError, "timeout_s must be finite"),
        ("tier", {"timeout_s": float("inf")}, ValueError, "timeout_s must be finite"),
        ("tier", {"timeout_s": "1"}, TypeError, "timeout_s must be a number of seconds, got str"),
        ("tier", {"timeout_s": True}, TypeError, "timeout_s must be a number of seconds"),
    ],
)
def test_a_file_tier_that_cannot_be_leaves_no_directory(
    tmp_path, monkeypatch, directory, options, error, words
):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error, match=words):
        FileTier(directory, **{"capacity_bytes": ROOM} | options)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("directory", [b"tier", "tier"])
def test_a_path_may_be_bytes_or_relative(tmp_path, monkeypatch, directory):
    monkeypatch.chdir(tmp_path)
    tier = FileTier(directory, ROOM)
    assert tier.write([KEY], rows()) == [True]
    tier.close()
    assert (tmp_path / "tier" / "kvpool-tier").exists()


@pytest.mark.parametrize(
    ("arguments", "options", "error", "words"),
    [
        ((None, MASTER), {}, TypeError, "metadata must be a str, got NoneType"),
        ((METADATA, None), {}, TypeError, "master must be a str, got NoneType"),
        (("", MASTER), {}, ValueError, "metadata is empty"),
        (("127.0.0.1:8080", MASTER), {}, ValueError, "metadata must be a URL such as"),
        ((METADATA, "127.0.0.1"), {}, ValueError, "master must be 'host:port'"),
        ((METADATA, "127.0.0.1:99999"), {}, ValueError, r"a port in 1 \.\. 65535, got '127"),
        ((METADATA, "127.0.0.1:0"), {}, ValueError, r"a port in 1 \.\. 65535"),
        ((MASTER, METADATA), {}, ValueError, "metadata must be a URL such as"),
        ((METADATA, "http://127.0.0.1:80"), {}, ValueError, "master must be 'host:port'"),
        ((METADATA, MASTER), {"segment_bytes": -1}, ValueError, "segment_bytes must be at least"),
        ((METADATA, MASTER), {"segment_bytes": 1}, ValueError, "at least 16777216.*got 1"),
        ((METADATA, MASTER), {"segment_bytes": "1GB"}, TypeError, "segment_bytes must be an int"),
        ((METADATA, MASTER), {"buffer_bytes": 0}, ValueError, "buffer_bytes must be at least 1"),
        ((METADATA, MASTER), {"num_replicas": 0}, ValueError, "num_replicas must be at least 1"),
        ((METADATA, MASTER), {"local_hostname": ""}, ValueError, "local_hostname is empty"),
        ((METADATA, MASTER), {"protocol": None}, TypeError, "protocol must be a str"),
        ((METADATA, MASTER), {"timeout_s": -1}, ValueError, "timeout_s must be finite"),
        ((METADATA, MASTER), {"name": ""}, ValueError, "name is empty"),
    ],
)
def test_a_mooncake_tier_that_cannot_be(arguments, options, error, words):
    with pytest.raises(error, match=words):
        MooncakeTier(*arguments, **options)


@pytest.mark.parametrize(
    ("url", "options", "error", "words"),
    [
        (None, {}, TypeError, "url must be a str, got NoneType"),
        (URL, {"timeout_s": -1}, ValueError, "timeout_s must be finite and above 0, got -1"),
        (URL, {"timeout_s": "1"}, TypeError, "timeout_s must be a number of seconds"),
        (URL, {"name": 7}, TypeError, "name must be a str, got int"),
    ],
)
def test_a_valkey_tier_that_cannot_be(url, options, error, words):
    with pytest.raises(error, match=words):
        ValkeyTier(url, **options)


@pytest.fixture(params=["host", "file"])
def tier(request, tmp_path):
    made = HostTier(ROOM) if request.param == "host" else FileTier(tmp_path / "tier", ROOM)
    yield made
    made.close()


@pytest.mark.parametrize(
    ("keys", "error", "words"),
    [
        ([b"short"], ValueError, r"keys\[0\]: a page key has 32 bytes, got 5"),
        ([KEY, KEY + b"x"], ValueError, r"keys\[1\]: a page key has 32 bytes, got 33"),
        (["k" * 32], TypeError, r"keys\[0\] must be bytes, got str"),
        ([None], TypeError, r"keys\[0\] must be bytes, got NoneType"),
        (KEY, TypeError, r"keys\[0\] must be bytes, got int"),
    ],
)
def test_what_is_no_page_key_is_refused_by_every_verb(tier, keys, error, words):
    before = tier.stats()
    for call in (
        lambda: tier.exists(keys),
        lambda: tier.read(keys, rows(len(keys))),
        lambda: tier.write(keys, rows(len(keys))),
        lambda: tier.remove(keys),
    ):
        with pytest.raises(error, match=words):
            call()
    assert tier.stats() == before


def test_rows_that_are_no_array_or_cannot_be_filled_are_refused(tier):
    with pytest.raises(TypeError, match=r"rows must be a C-contiguous uint8 array.* got a list"):
        tier.write([KEY], [[1, 2]])
    fixed = rows()
    fixed.setflags(write=False)
    assert tier.write([KEY], fixed) == [True]
    with pytest.raises(ValueError, match="rows are read-only"):
        tier.read([KEY], fixed)
