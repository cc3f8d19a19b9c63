"""Page keys: equal for equal prefixes of equal pools, different where anything differs."""

import json
from dataclasses import replace
from hashlib import sha256

import numpy as np
import pytest

from kvpool.page_keys import PageKeys, Partition
from kvpool.snapshot.fingerprint import Fingerprint

FINGERPRINT = Fingerprint("llama", 2, 4, 8, 4, "float32", "float32", 1.0, 1.0)
TOKENS = np.arange(18, dtype=np.int32)


def keys_of(fingerprint=FINGERPRINT, partition=None, tokens=TOKENS, extra_key=None, **more):
    return PageKeys(fingerprint, partition).of_tokens(tokens, extra_key, **more)


def test_keys_are_a_chain_of_sha256_over_the_tokens():
    described = [1, FINGERPRINT.to_metadata(), [0, 0], ["none"]]
    above = sha256(json.dumps(described, sort_keys=True).encode()).digest()
    expected = []
    for begin in (0, 4, 8, 12):
        above = sha256(above + TOKENS[begin : begin + 4].astype("<i4").tobytes()).digest()
        expected.append(above)
    assert keys_of() == expected


def test_keys_below_a_key_go_on_with_the_chain():
    keys = PageKeys(FINGERPRINT)
    whole = keys.of_tokens(TOKENS, "a")
    assert keys.below(whole[1], TOKENS[8:16].reshape(2, 4)) == whole[2:]
    assert keys.below(keys.root("a"), TOKENS[:8].reshape(2, 4)) == whole[:2]


def test_no_whole_page_has_no_key():
    assert keys_of(tokens=TOKENS[:3]) == []


def test_pauses_change_no_key():
    tokens = np.arange(4 * 200, dtype=np.int32)
    assert keys_of(tokens=tokens, pause=True) == keys_of(tokens=tokens)


@pytest.mark.parametrize(
    "other",
    [
        {"fingerprint": replace(FINGERPRINT, model="qwen")},
        {"fingerprint": replace(FINGERPRINT, num_layers=3)},
        {"fingerprint": replace(FINGERPRINT, num_kv_heads=2)},
        {"fingerprint": replace(FINGERPRINT, head_dim=16)},
        {"fingerprint": replace(FINGERPRINT, dtype="float16", compute_dtype="float16")},
        {"partition": Partition(first_layer=2)},
        {"partition": Partition(first_kv_head=4)},
        {"extra_key": "tenant"},
        {"extra_key": 0},
        {"extra_key": "0"},
        {"extra_key": b"0"},
    ],
    ids=str,
)
def test_what_differs_in_anything_has_no_key_in_common(other):
    assert not set(keys_of(**other)) & set(keys_of())


def test_scales_and_page_size_are_in_the_key():
    fp8 = replace(FINGERPRINT, dtype="float8_e4m3fn", compute_dtype="bfloat16")
    assert keys_of(replace(fp8, k_scale=2.0)) != keys_of(fp8)
    assert keys_of(replace(fp8, k_scale=(1.0, 2.0))) != keys_of(fp8)
    assert not set(keys_of(replace(FINGERPRINT, page_size=2))) & set(keys_of())


def test_one_token_changes_its_page_and_all_below():
    other = TOKENS.copy()
    other[5] = 99
    same = [a == b for a, b in zip(keys_of(tokens=other), keys_of(), strict=True)]
    assert same == [True, False, False, False]


@pytest.mark.parametrize("part", [{"first_layer": -1}, {"first_kv_head": -2}])
def test_partition_is_checked(part):
    with pytest.raises(ValueError, match="got -"):
        Partition(**part)
