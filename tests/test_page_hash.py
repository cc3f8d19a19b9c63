"""The hash of a page is keyed: as defined, and nothing but time follows from the key."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool import RadixCache
from kvpool_ext.arena import NodeArena
from tests.helpers.pools import case_pool, serve

PAGE_SIZES = (1, 2, 3, 4, 5, 7, 8, 16, 17, 64, 512)
INT32 = st.integers(-(2**31), 2**31 - 1)


def twin(key, parent, tokens):
    """NH over tokens and parent, then pair-multiply-shift, in whole numbers."""
    fold = [int.from_bytes(key[8 * i : 8 * i + 8], "little") for i in range(3)]
    keys = [int.from_bytes(key[i : i + 4], "little") for i in range(24, len(key), 4)]
    words = [int(token) % 2**32 for token in tokens]
    if len(words) % 2 == 0:
        words.append(0)
    words.append(parent)
    sums = [(word + k) % 2**32 for word, k in zip(words, keys, strict=False)]
    total = sum(a * b for a, b in zip(sums[::2], sums[1::2], strict=True)) % 2**64
    high, low = divmod(total, 2**32)
    return ((high + fold[0]) * (low + fold[1]) + fold[2]) % 2**64 >> 32


@given(data=st.data(), page_size=st.sampled_from(PAGE_SIZES), parent=st.integers(0, 2**31 - 1))
def test_a_hash_is_what_its_definition_says(data, page_size, parent):
    few = data.draw(st.lists(INT32, min_size=1, max_size=8))
    tokens = np.resize(np.array(few, np.int32), page_size)
    arena = NodeArena(page_size)
    assert len(arena.hash_key) == 24 + 4 * (page_size + 2)
    assert arena.hash_of(parent, tokens) == twin(arena.hash_key, parent, tokens)


def test_a_hash_takes_whole_pages():
    with pytest.raises(ValueError, match="expected 4 tokens, got 3"):
        NodeArena(4).hash_of(0, np.zeros(3, np.int32))


def cancelling_pages(page_size):
    """Pairs of pages that agree in a multiply-xor hash, or in a sum, whatever its seed."""
    base = np.arange(page_size, dtype=np.int32)
    swapped = base.copy()
    swapped[[0, -1]] = swapped[[-1, 0]]
    signs = base.copy()
    signs ^= np.int32(-(2**31))
    one_bit = base.copy()
    one_bit[0] ^= np.int32(-(2**31))
    return [(base, swapped), (base, signs), (base, one_bit), (signs, one_bit)]


@pytest.mark.parametrize("page_size", [2, 3, 8, 16, 64])
def test_no_two_pages_agree_under_many_keys(page_size):
    num_keys = 500
    for one, other in cancelling_pages(page_size):
        found = 0
        for _ in range(num_keys):
            arena = NodeArena(page_size)
            # Of 10 bits, as a table of 1,024 buckets takes them: half of one in 500 keys is fair.
            found += (arena.hash_of(3, one) ^ arena.hash_of(3, other)) & 1023 == 0
        assert found <= 8  # of a binomial with a mean of 0.5: one run in 10^7 has more


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_pages_that_differ_in_a_counter_spread_over_the_buckets(page_size):
    num_pages = 4_096
    arena = NodeArena(page_size)
    for column in {0, page_size - 1}:
        for step in (1, 1 << 8, 1 << 19):
            page = np.zeros(page_size, np.int32)
            buckets = np.zeros(num_pages, np.int64)
            for n in range(num_pages):
                page[column] = np.int64(n * step).astype(np.int32)
                buckets[n] = arena.hash_of(7, page) & (2 * num_pages - 1)
            longest = np.bincount(buckets).max()
            assert longest <= 64, (column, step)


def test_every_tree_draws_keys_of_its_own():
    keys = {NodeArena(16).hash_key for _ in range(20)}
    assert len(keys) == 20


def test_two_trees_of_two_keys_give_the_same_pages_in_the_same_order(make_pool):
    rng = np.random.default_rng(5)
    pools = [case_pool(make_pool, 4, 48) for _ in range(2)]
    trees = [RadixCache(2) for _ in range(2)]
    for n in range(300):
        prompt = rng.integers(0, 3, int(rng.integers(1, 25))).astype(np.int32)
        assert len({serve(pool, prompt, priority=n % 2) for pool in pools}) == 1
        pages = np.arange(100 * n, 100 * n + prompt.size // 2, dtype=np.int32)
        assert len({tree.insert(prompt, pages).prefix_len for tree in trees}) == 1
        if n % 10 == 9:
            assert pools[0].stats() == pools[1].stats()
            assert pools[0].radix.format_tree() == pools[1].radix.format_tree()
            assert [str(node) for node in pools[0].radix.nodes()] == [
                str(node) for node in pools[1].radix.nodes()
            ]
            gone = [tree.evict(30) for tree in trees]
            np.testing.assert_array_equal(*gone)
            matches = [tree.match_prefix(prompt) for tree in trees]
            assert matches[0].node == matches[1].node
            np.testing.assert_array_equal(matches[0].pages, matches[1].pages)
    allocs = [pool.alloc(40) for pool in pools]
    np.testing.assert_array_equal(*allocs)
