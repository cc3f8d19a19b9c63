"""Page records: what was written comes back, and whatever was changed does not verify."""

import numpy as np
import pytest

from kvpool.snapshot.fingerprint import Fingerprint
from kvpool.tiers.records import PageRecords

FINGERPRINT = Fingerprint("llama", 2, 3, 8, 4, "float16", "float16", 1.0, 1.0)
KEYS = [bytes([i]) * 32 for i in range(3)]
TOKENS = np.arange(12, dtype=np.int32).reshape(3, 4)


@pytest.fixture
def records():
    return PageRecords(FINGERPRINT)


@pytest.fixture
def rows(records):
    rows = records.empty(3)
    kv = records.kv(rows)
    kv[...] = np.random.default_rng(0).standard_normal(kv.shape)
    records.seal(rows, KEYS, TOKENS)
    return rows


def test_records_hold_kv_where_it_is_aligned(records, rows):
    assert records.record_bytes % 64 == 0
    kv = records.kv(rows)
    assert kv.shape == (3, *FINGERPRINT.page_shape)
    assert kv.dtype == np.float16
    assert np.shares_memory(kv, rows)
    assert (kv.__array_interface__["data"][0] - rows.__array_interface__["data"][0]) % 64 == 0


def test_sealed_records_verify(records, rows):
    assert records.verify(rows, KEYS, TOKENS) == [True, True, True]


def test_every_flipped_byte_but_padding_is_found(records, rows):
    end_of_tokens = 80 + 4 * 4
    meaning = [*range(end_of_tokens), *range(128, 128 + FINGERPRINT.page_bytes)]
    for place in meaning:
        rows[1, place] ^= 0x40
        assert records.verify(rows, KEYS, TOKENS) == [True, False, True], place
        rows[1, place] ^= 0x40


def test_a_whole_record_of_another_page_does_not_verify(records, rows):
    swapped = rows[[1, 0, 2]]
    assert records.verify(swapped, KEYS, TOKENS) == [False, False, True]


def test_equal_keys_of_other_tokens_do_not_verify(records, rows):
    other = TOKENS.copy()
    other[2, 3] += 1
    assert records.verify(rows, KEYS, other) == [True, True, False]


def test_torn_records_do_not_verify(records, rows):
    rows[0, records.record_bytes // 2 :] = 0
    rows[1] = 0
    assert records.verify(rows, KEYS, TOKENS) == [False, False, True]
