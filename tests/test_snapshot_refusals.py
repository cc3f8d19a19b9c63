"""What load refuses, and what it says; nothing but SnapshotError comes out of a file's content."""

import json
import os
import socket

import numpy as np
import pytest

from kvpool import KVCachePool, SnapshotError
from kvpool.snapshot.namespaces import decode_namespaces
from tests.helpers.nine_pages import save_nine_pages
from tests.helpers.pools import case_pool
from tests.helpers.resealed import metadata, put, resealed, split


@pytest.fixture
def saved(make_pool, tmp_path):
    """A snapshot of nine pages in two namespaces, as bytes, and where it lies."""
    return save_nine_pages(make_pool, tmp_path / "pool")


def refused(path, data, match, **options):
    path.write_bytes(data)
    with pytest.raises(SnapshotError, match=match):
        KVCachePool.load(path, model="m", **options)


def test_each_difference_of_the_fingerprint_is_listed(saved):
    _, path = saved
    expected = {
        "num_layers": 3,
        "num_kv_heads": 4,
        "head_dim": 16,
        "page_size": 8,
        "dtype": "bfloat16",
        "compute_dtype": "float16",
        "k_scale": 2.0,
        "v_scale": [1.0, 3.0],
    }
    with pytest.raises(SnapshotError) as caught:
        KVCachePool.load(path, model="other", **expected)
    for name, value in expected.items():
        assert f"{name}: expected {value!r}, got" in str(caught.value)
    assert "model: expected 'other', got 'm'" in str(caught.value)


def test_equal_expectations_are_met(saved, make_pool):
    _, path = saved
    expected = {"num_layers": 2, "dtype": np.float32, "k_scale": np.ones(2), "page_size": 2}
    make_pool.keep(KVCachePool.load(path, model="m", **expected))


def test_load_says_how_the_expected_model_is_called(saved):
    with pytest.raises(SnapshotError, match="model: expected '', got 'm'"):
        KVCachePool.load(saved[1])


@pytest.mark.parametrize("length", [0, 1, 7, 8, 9, 100])
def test_file_that_ends_in_the_header_is_refused(saved, length):
    data, path = saved
    refused(path, data[:length], "not a snapshot")


def test_file_that_ends_in_the_columns_is_refused(saved):
    data, path = saved
    header, _, _ = split(data)
    refused(path, data[: len(header) + 50], "cut off before the first page")


@pytest.mark.parametrize("name", ["seal", "page_checksums", "tokens", "parents", "namespaces"])
def test_column_that_does_not_verify_is_refused(saved, name):
    data, path = saved
    header, entries, _ = split(data)
    flipped = bytearray(data)
    flipped[len(header) + entries[name]["data_offsets"][0]] ^= 64
    refused(path, flipped, "do not verify")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        (name, value)
        for name in ("num_layers", "num_kv_heads", "head_dim", "page_size", "num_slots")
        for value in ("0", "-1", str(2**63), "9" * 5000, "1.5", "nan", "", " 2", "٣")
    ]
    + [("num_pages", str(2**62)), ("num_pages", "-1"), ("namespace_bytes", str(2**62))]
    + [("num_slots", "17"), ("version", "0"), ("version", "x")],
)
def test_number_out_of_range_is_refused_even_if_it_was_sealed(saved, name, value):
    data, path = saved
    refused(path, resealed(data, metadata(**{name: value})), f"{name} must be")


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"version": "2"}, "newer than 1"),
        ({"format": "pt"}, "not a snapshot: expected format"),
        ({"dtype": "int4"}, "dtype must be one of"),
        ({"compute_dtype": "float8_e5m2"}, "compute_dtype must be one of"),
        ({"k_scale": "nan"}, "k_scale must be"),
        ({"k_scale": "0x1p99999"}, "k_scale must be"),
        ({"k_scale": "0x1.8p+0"}, "1.0 for dtype float32"),
        ({"v_scale": "0x1p+0 0x1p+0 0x1p+0"}, "v_scale must be"),
        ({"eviction": "mru"}, "unknown eviction policy"),
        (
            {"head_dim": "65536", "num_kv_heads": "65536", "num_layers": "65536"},
            "a page must have",
        ),
        ({"num_slots": str(2**31)}, "slots was to be made"),
        ({"dtype": "bfloat16"}, "tensor 'kv'"),
        ({"num_pages": "8"}, "tensor '"),
    ],
)
def test_metadata_that_no_snapshot_has_are_refused(saved, changes, match):
    data, path = saved
    refused(path, resealed(data, metadata(**changes)), match)


@pytest.mark.parametrize(
    "change",
    [
        lambda entries: entries.pop("tokens"),
        lambda entries: entries.update(more=entries["tokens"]),
        lambda entries: entries["tokens"].update(dtype="I64"),
        lambda entries: entries["tokens"].update(shape=[2**62, 2**62]),
        lambda entries: entries["kv"].update(data_offsets=[0, 2**63]),
        lambda entries: entries["kv"].update(shape=[-1]),
        lambda entries: entries.update(kv=None),
        lambda entries: entries.update(kv=float("nan")),
    ],
)
def test_tensor_that_no_snapshot_has_is_refused(saved, change):
    data, path = saved
    refused(path, resealed(data, change), "tensor '")


@pytest.mark.parametrize(
    ("columns", "match"),
    [
        ({"parents": put(_0=0)}, "the parent of page 0"),
        ({"parents": put(_3=7)}, "the parent of page 3"),
        ({"parents": put(_3=-2)}, "the parent of page 3"),
        ({"parents": put(_3=-(2**31))}, "the parent of page 3"),
        ({"namespace_ids": put(_3=2)}, "the namespace of page 3"),
        ({"namespace_ids": put(_3=-1)}, "the namespace of page 3"),
        ({"namespace_ids": put(_1=1)}, "another namespace"),
        ({"priorities": put(_8=5)}, "page 8 has priority 5"),
        ({"namespaces": lambda data: b"[" * len(data)}, "no JSON"),
        ({"namespaces": lambda data: b'[["none"], ["none"]]'.ljust(len(data))}, "stands twice"),
        ({"namespaces": lambda data: b'[["none"], 1]'.ljust(len(data))}, "is no namespace"),
        ({"namespaces": lambda data: b'{"a": 1}'.ljust(len(data))}, "no list"),
    ],
)
def test_column_out_of_range_is_refused_even_if_it_was_sealed(saved, columns, match):
    data, path = saved
    refused(path, resealed(data, **columns), match)


def test_pages_of_one_prefix_are_refused(saved):
    data, path = saved
    _, entries, body = split(data)
    begin, end = entries["tokens"]["data_offsets"]
    parents = np.frombuffer(body[slice(*entries["parents"]["data_offsets"])], "<i4")
    # Two children of one page get the same tokens.
    twins = [i for i in range(1, 9) if parents[i] == parents[1]]
    tokens = np.frombuffer(body[begin:end], "<i4").reshape(9, 2).copy()
    tokens[twins[1]] = tokens[twins[0]]
    refused(path, resealed(data, tokens=lambda _: tokens.tobytes()), "stand for the same prefix")


@pytest.mark.parametrize(
    "text",
    [b"", b"[]]", b"[" * 100_000, b'{"a":' * 50_000, b"1" * 100_000, b"\xff\xfe", b"null", b"{}"]
    + [json.dumps({"__metadata__": value}).encode() for value in (None, [], {"a": 1}, "x")],
    ids=range(12),
)
def test_header_that_is_none_is_refused(tmp_path, text):
    refused(tmp_path / "x", len(text).to_bytes(8, "little") + text, "not a snapshot")


@pytest.mark.parametrize("length", [2**64 - 1, 2**63, 2**40, 2**21])
def test_length_of_a_header_beyond_the_bound_allocates_nothing(tmp_path, length):
    path = tmp_path / "x"
    with path.open("wb") as file:
        file.write(length.to_bytes(8, "little"))
        file.truncate(1 << 40)  # holes: nothing on the disk
    with pytest.raises(SnapshotError, match="not a snapshot: a header of"):
        KVCachePool.load(path)


@pytest.mark.parametrize(
    "entry",
    [
        *(None, [], True, {"int": "1"}, ["none", 1], ["str", 1], ["bytes", "0"], ["bytes", "zz"]),
        *(["int", ""], ["int", "-"], ["int", "1_0"], ["int", "0x1"], ["float", "1"]),
    ],
)
def test_namespace_of_another_form_is_refused(entry):
    with pytest.raises(SnapshotError):
        decode_namespaces(json.dumps([entry]).encode())


def test_what_is_no_regular_file_is_refused(tmp_path, make_pool):
    pool = case_pool(make_pool, 2, 4)
    with pytest.raises(FileNotFoundError):
        KVCachePool.load(tmp_path / "missing")
    for call in (KVCachePool.load, pool.save):
        with pytest.raises(IsADirectoryError):
            call(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(SnapshotError, match="no regular file"):
        KVCachePool.load(tmp_path / "pipe")
    for target in ("/dev/null", tmp_path / "pipe"):
        with pytest.raises(SnapshotError, match="no regular file"):
            pool.save(target)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(os.path.relpath(tmp_path / "socket"))
        with pytest.raises(OSError, match="socket"):
            KVCachePool.load(tmp_path / "socket")


def test_model_that_is_no_text_is_refused(tmp_path, make_pool):
    pool = case_pool(make_pool, 2, 4)
    for model in (1, None, b"m"):
        words = f"model must be a str, got {type(model).__name__}"
        for call in (pool.save, KVCachePool.load):
            with pytest.raises(TypeError, match=words):
                call(tmp_path / "x", model=model)
    for model in ("\ud800", "x" * 5000):
        with pytest.raises(SnapshotError, match="model must"):
            pool.save(tmp_path / "x", model=model)
    assert not os.listdir(tmp_path)


def test_long_name_of_a_model_is_shortened_and_a_hash_is_not(saved):
    digest, long = "0123456789abcdef" * 8, "x" * 50_000
    with pytest.raises(SnapshotError, match=f"expected '{digest}', got 'm'"):
        KVCachePool.load(saved[1], model=digest)
    for model in (long, "\ud800" * 1000):
        with pytest.raises(SnapshotError, match="model: expected") as caught:
            KVCachePool.load(saved[1], model=model)
        assert len(str(caught.value)) < 1000


def test_zero_byte_in_a_path_is_a_value_error(tmp_path, make_pool):
    for call in (KVCachePool.load, case_pool(make_pool, 2, 4).save):
        with pytest.raises(ValueError, match=r"null byte|null character"):
            call(f"{tmp_path}/a\0b")
