"""Scenarios drawn from public bug reports: which bytes a request reads."""

import numpy as np
import pytest

from kvpool import UnknownRequestError
from tests.helpers.pools import (
    R,
    assert_ledger,
    cache_prompt,
    case_pool,
    pages,
    read,
    st,
    unchanged,
    values,
    window,
    write,
)


def test_a03_use_after_free_of_duplicates_never_happens(make_pool):
    """sgl-project/mini-sglang#142: duplicates were freed while a page table pointed at them."""
    pool = case_pool(make_pool, 4, 8)
    a = pool.bind_request(R(1, 9), 12)
    b = pool.bind_request(R(1, 9), 12)
    write(pool, a, 0, 9, 100)
    write(pool, b, 0, 9, 500)
    pool.finish_request(a, R(1, 9))
    assert read(pool, b, 9) == values(500, 0, 9)
    write(pool, b, 9, 10, 500)
    assert read(pool, b, 10) == values(500, 0, 10)
    d = pool.bind_request(R(60, 67), 8)
    write(pool, d, 0, 8, 900)
    assert read(pool, b, 10) == values(500, 0, 10)
    assert not set(pages(pool, b, 9)) & set(pages(pool, d, 8))
    assert not any("free" in pool.page_owner(page) for page in pages(pool, b, 9))
    assert pool.finish_request(b, R(1, 9)) == 0
    assert st(pool) == (4, 8, 8, 0)  # d holds two pages
    with pytest.raises(UnknownRequestError):
        read(pool, b, 9)


def test_a06_whole_prompt_hit_leaves_a_token_to_compute(make_pool):
    """GeeeekExplorer/nano-vllm#114, vllm-project/vllm#11186: zero tokens left for the model."""
    pool = case_pool(make_pool, 4, 8)
    cache_prompt(pool, R(1, 8))
    matched = []
    for length in (8, 9, 5, 4, 3, 1):
        i = pool.bind_request([*R(1, 8), 9][:length], 12)
        matched.append(pool.matched_prefix_len(i))
        pool.unbind_request(i)
    assert matched == [4, 8, 4, 0, 0, 0]  # (length - 1) floored to pages, at most 8
    assert st(pool) == (6, 8, 8, 0)


def test_a15_truncation_to_zero_takes_everything_back(make_pool):
    """huggingface/transformers#47433: cropping to 0 kept everything."""
    pool = case_pool(make_pool, 4, 4)
    a = pool.bind_request(R(1, 3), 8)
    step = write(pool, a, 0, 3)
    step.page_table(3)
    step.truncate_to(0, 3)
    own = np.asarray(step.slot_indices(3))
    for layer in range(2):
        assert not np.asarray(pool.key_layer(layer))[own].any()
        assert not np.asarray(pool.value_layer(layer))[own].any()
    assert pool.valid_len(a) == 0
    table = step.current_page_table
    assert np.asarray(table.indptr).tolist() == [0, 0]
    assert np.asarray(table.last_page_len).tolist() == [0]
    assert pool.request_capacity == 8


def test_a15_truncation_with_odd_ranges_is_refused_or_does_nothing(make_pool):
    """huggingface/transformers#47433: cropping by more than the length left a stale token."""
    pool = case_pool(make_pool, 4, 4)
    a = pool.bind_request(R(1, 3), 8)
    step = write(pool, a, 0, 3)
    for bad in ((-1, 3), (3, 2), (3, 9)):  # negative, reversed, past capacity 8
        with unchanged(pool, a), pytest.raises(ValueError, match=r"\d"):
            step.truncate_to(*bad)
    for bad in ((3, 1), (-1, 2), (0, 9)):
        with unchanged(pool, a), pytest.raises(ValueError, match=r"\d"):
            step.invalidate_range(*bad)
    with unchanged(pool, a):
        step.invalidate_range(2, 2)
        step.truncate_to(3, 3)
    assert read(pool, a, 3) == values(100, 0, 3)


@pytest.mark.parametrize(
    ("invalid", "inserted", "expected"),
    [
        ((0, 4), 0, (4, 0, 0, 0)),
        ((5, 6), 4, (3, 4, 4, 0)),  # written 0..4: one whole page
        ((8, 12), 8, (2, 8, 8, 0)),
        (None, 12, (1, 12, 12, 0)),
    ],
)
def test_a16_invalid_data_is_not_cached(make_pool, invalid, inserted, expected):
    """sgl-project/sglang#31486: K/V released from the window entered the tree at finish."""
    pool = case_pool(make_pool, 4, 4)
    a = pool.bind_request(R(1, 12), 12)
    step = write(pool, a, 0, 12)
    if invalid:
        step.invalidate_range(*invalid)
        assert pool.valid_len(a) == invalid[0]
    assert pool.finish_request(a, R(1, 12)) == inserted
    assert st(pool) == expected
    assert_ledger(pool)


def test_a16_rewritten_tail_is_cached_again(make_pool):
    """sgl-project/sglang#31486: after the gap is written again the whole prefix is good."""
    pool = case_pool(make_pool, 4, 4)
    a = pool.bind_request(R(1, 12), 12)
    write(pool, a, 0, 12).invalidate_range(5, 6)
    write(pool, a, 5, 12)
    assert pool.valid_len(a) == 12
    assert read(pool, a, 12) == values(100, 0, 12)
    assert pool.finish_request(a, R(1, 12)) == 12
    assert st(pool) == (1, 12, 12, 0)


def test_a17_uninitialised_rest_of_a_page_is_finite(make_pool):
    """flashinfer-ai/flashinfer#941, Dao-AILab/flash-attention#2374: 0 * NaN in the value sum."""
    pool = case_pool(make_pool, 4, 8)
    pool.key_cache[...] = np.nan
    pool.value_cache[...] = np.nan
    a = pool.bind_request(R(1, 13), 13)
    write(pool, a, 0, 13, 1)
    own = np.asarray(pool.activate_step(a).slot_indices(16))
    for layer in range(2):
        k = np.asarray(pool.key_layer(layer))[own]
        v = np.asarray(pool.value_layer(layer))[own]
        assert not k[13:].any()
        assert not v[13:].any()
        assert np.isfinite(k).all()
        scores = np.zeros(16, np.float32)  # q = 0
        scores[13:] = -np.inf
        weights = np.exp(scores) / np.exp(scores).sum()
        output = np.einsum("s,shd->hd", weights, v)
        # mean of -(1 + ... + 13) / 13 = -7, and 1000 less a layer
        np.testing.assert_allclose(output, -7.0 - 1000 * layer, rtol=1e-5)


def test_a17_padded_reads_are_finite(make_pool):
    """flashinfer-ai/flashinfer#941: a batch of rows of two capacities, read at the longest."""
    pool = case_pool(make_pool, 4, 8)
    pool.key_cache[...] = np.nan
    pool.value_cache[...] = np.nan
    a = pool.bind_request(R(1, 13), 13)  # capacity 16
    b = pool.bind_request(R(60, 64), 8)
    write(pool, a, 0, 13, 1)
    write(pool, b, 0, 5, 1)
    step = pool.activate_step(a, b)
    for layer in range(2):
        k, v = (np.asarray(x) for x in step.get(layer, 16, padded=True))
        assert np.isfinite(k).all()
        assert np.isfinite(v).all()
        want = [float(1 + p + 1000 * layer) for p in range(13)] + [0.0] * 3
        assert k[0, :, 0, 0].tolist() == want
        assert k[1, :, 0, 0].tolist() == want[:5] + [0.0] * 11  # slot 7 repeats, unwritten


def test_a20_graph_padding_slot_is_skipped_and_a_large_one_refused(make_pool):
    """vllm-project/vllm#43810: slot -1 of a padding row became the last slot of the cache."""
    pool = case_pool(make_pool, 4, 4)
    a = pool.bind_request(R(1, 16), 16)
    write(pool, a, 0, 16)
    step = pool.activate_step(a)
    k, v = window(pool, 15, 16, 7000)
    with unchanged(pool, a):
        step.put(0, [15], k, v, slots=np.array([-1], np.int64))
    with unchanged(pool, a), pytest.raises(ValueError, match="16"):
        step.put(0, [15], k, v, slots=np.array([16], np.int64))  # num_slots is 16
    real = np.asarray(step.slot_indices(16))[15:]
    step.put(0, [15], k, v, slots=real)
    assert (np.asarray(pool.key_layer(0))[real] == 7015).all()
    assert (np.asarray(pool.key_layer(1))[real] == 1115).all()


def test_a22_page_table_ends_at_the_length_not_at_the_reservation(make_pool):
    """pegainfer-project/pegainfer#291: one reserved page too many at page multiples."""
    pool = case_pool(make_pool, 16, 8)
    a = pool.bind_request(R(1, 16), 48)  # three pages reserved
    write(pool, a, 0, 16)
    expected = {16: (1, 16), 17: (2, 1), 15: (1, 15), 32: (2, 16), 33: (3, 1)}
    for length, (num_pages, last_page_len) in expected.items():
        step = pool.activate_step(a)
        table = step.build_page_table(length)
        assert np.asarray(table.indptr).tolist() == [0, num_pages]
        assert np.asarray(table.last_page_len).tolist() == [last_page_len]
        assert (num_pages - 1) * 16 + last_page_len == length
        assert np.asarray(table.indices).tolist() == pages(pool, a, length)
        for array in (table.indptr, table.indices, table.last_page_len):
            assert array.dtype == np.int32


def test_a23_namespaces_do_not_share_prefixes(make_pool):
    """vllm-project/vllm#30931, ggml-org/llama.cpp#26207: adapters shared one prefix."""
    pool = case_pool(make_pool, 4, 8)
    cache_prompt(pool, R(1, 8), extra_key="lora-a")
    matched = []
    for key in ("lora-b", None, "lora-a"):
        i = pool.bind_request(R(1, 9), 12, extra_key=key)
        matched.append(pool.matched_prefix_len(i))
        pool.unbind_request(i)
    assert matched == [0, 0, 8]
    assert st(pool) == (6, 8, 8, 0)
    cache_prompt(pool, R(1, 8), extra_key="lora-b")
    assert st(pool) == (4, 16, 16, 0)  # sizes count all namespaces together
    assert pool.bind_request(R(50, 73), 24)  # 6 pages: 2 evicted, of the oldest use
    assert st(pool) == (0, 8, 8, 0)
    assert pool.radix.match_prefix(R(1, 8), "lora-a").length == 0
    assert pool.radix.match_prefix(R(1, 8), "lora-b").length == 8


def test_a23_reuse_off_neither_matches_nor_inserts(make_pool):
    """vllm-project/vllm#30931: the coarse way to keep adapters apart."""
    pool = case_pool(make_pool, 4, 8)
    cache_prompt(pool, R(1, 8))
    before = st(pool)
    pool.prefix_reuse_enabled = False
    i = pool.bind_request(R(1, 9), 12)
    assert pool.matched_prefix_len(i) == 0
    write(pool, i, 0, 9, 700)
    assert pool.finish_request(i, R(1, 9)) == 0
    assert st(pool) == before == (6, 8, 8, 0)
    pool.prefix_reuse_enabled = True
    j = pool.bind_request(R(1, 9), 12)
    assert pool.matched_prefix_len(j) == 8
    assert read(pool, j, 8) == values(100, 0, 8)  # the base entries, never the adapter's


def test_a24_equal_hashes_do_not_match(make_pool):
    """vllm-project/vllm#12621, vllm-project/vllm#15297: keys were hashes that collide."""
    pool = case_pool(make_pool, 4, 8)
    assert hash((-1,) * 4) == hash((-2,) * 4)
    assert hash((0,) * 4) == hash((2**61 - 1,) * 4)
    for token in (-1, 0):
        assert cache_prompt(pool, [token] * 4) == 4
    matched = []
    for token in (-2, -1, 0):
        i = pool.bind_request([token] * 4 + [7], 8)
        matched.append(pool.matched_prefix_len(i))
        pool.unbind_request(i)
    assert matched == [0, 4, 4]
    with unchanged(pool), pytest.raises(ValueError, match=str(2**61 - 1)):
        pool.bind_request([2**61 - 1] * 4 + [7], 8)  # beyond int32: refused, never wrapped


def test_a25_token_width_is_kept_or_refused(make_pool):
    """LMCache/LMCache#3301, LMCache/LMCache#4086: image ids cut to 16 bits shared K/V."""
    pool = case_pool(make_pool, 4, 8)

    def prompt(media):
        return [5, 6, *[media] * 4, 7, 8]

    cache_prompt(pool, prompt(65536 + 5))
    for media, expected in ((5, 0), (65536 + 5, 8)):
        i = pool.bind_request([*prompt(media), 9], 12)
        assert pool.matched_prefix_len(i) == expected
        pool.unbind_request(i)
    for media in (2**31 + 5, 2**32 + 65536 + 5):
        with unchanged(pool), pytest.raises(ValueError, match=str(media)):
            pool.bind_request([*prompt(media), 9], 12)
        with unchanged(pool), pytest.raises(ValueError, match=str(media)):
            pool.bind_request(np.array([*prompt(media), 9], np.int64), 12)
