"""Multi-token prediction over a main pool and two draft pools side by side."""

import numpy as np
import pytest

from kvpool import KVCacheLayout, KVCachePool
from kvpool.attention import paged_attention
from tests.helpers.mtp import Decoder, Pools, guess, history_rows
from tests.helpers.pools import R, assert_ledger, case_pool, write
from tests.helpers.speculation import cached_tokens

PAGE_SIZES = [1, 4, 16, 64]
WINDOW, NUM_TOKENS = 4, 40
CAPACITY = 150  # tokens of a request, on top of two pages of prompt


def prompts(page_size):
    """Four: two share a prefix of two pages and part late, one is a single token."""
    common = R(1, 2 * page_size)
    return [[*common, 7, 8], [*common, 9], R(100, 100 + page_size), [3]]


def run(make_pool, page_size, dtype, window):
    """Texts, the pools, and the decoder, after at least NUM_TOKENS tokens a request."""
    capacity = CAPACITY + 2 * page_size
    pools = Pools.of(make_pool, page_size, dtype, batch_size=4, capacity=capacity, window=WINDOW)
    decoder = Decoder(pools, prompts(page_size), capacity)
    while min(len(row.tokens) - row.prompt_len for row in decoder.rows) < NUM_TOKENS:
        if window == 1:
            decoder.step()
        else:
            decoder.round(window)
    return decoder, pools


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_speculate_with_a_draft_pool_gives_the_tokens_of_a_plain_run(make_pool, page_size, dtype):
    plain, _ = run(make_pool, page_size, dtype, 1)
    decoder, pools = run(make_pool, page_size, dtype, WINDOW)
    assert decoder.finish(NUM_TOKENS) == plain.finish(NUM_TOKENS)
    accepted = sum(row.accepted for row in decoder.rows)
    proposed = sum(row.proposed for row in decoder.rows)
    assert 0 < accepted < proposed  # both ways were walked
    for pool in (pools.main, pools.history, pools.round):
        assert_ledger(pool)


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_finish_after_speculation_leaves_the_tree_of_a_plain_run(make_pool, page_size):
    """Rejected drafts behind the right tokens: nothing of them is cached, nothing else is lost."""
    plain, plain_pools = run(make_pool, page_size, "float32", 1)
    decoder, pools = run(make_pool, page_size, "float32", WINDOW)
    decoder.finish(NUM_TOKENS, rejected=[999] * WINDOW)
    for row in decoder.rows:  # rounds end at different lengths: so the plain run writes as many
        assert row.written >= row.prompt_len + NUM_TOKENS - 1
    longest = max(len(row.tokens) for row in decoder.rows)
    while min(len(row.tokens) for row in plain.rows) < longest:
        plain.step()
    for row, other in zip(plain.rows, decoder.rows, strict=True):
        assert row.tokens[: len(other.tokens)] == other.tokens
        # Only as far as the other run wrote: what is sealed is not cached.
        row.tokens = row.tokens[: len(other.tokens)]
        plain_pools.main.activate_step(row.request_id).seal_length(other.written)
    plain.finish(NUM_TOKENS)
    assert cached_tokens(pools.main) == cached_tokens(plain_pools.main)
    assert 999 not in cached_tokens(pools.main)
    assert cached_tokens(pools.history) == []  # prefix reuse is off there


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_draft_over_two_pools_guesses_as_it_would_without_pages(make_pool, page_size):
    decoder, _ = run(make_pool, page_size, "float32", WINDOW)
    decoder.draft(WINDOW)
    for row in decoder.rows:
        tokens = list(row.tokens)
        for _ in range(WINDOW - 1):
            k = history_rows(tokens, 0, len(tokens), 0)
            tokens.append(guess(k, -k))
        assert row.guesses == tokens[-(WINDOW - 1) :]


def test_draft_pools_have_the_dtype_and_the_page_size_of_the_main_pool(make_pool):
    pools = Pools.of(make_pool, 16, "bfloat16", batch_size=4, capacity=64, window=WINDOW)
    for pool in (pools.history, pools.round):
        assert (pool.dtype, pool.page_size) == (pools.main.dtype, pools.main.page_size)
    assert pools.round.num_pages == 4  # a window of 4 is a page of 16, four rows of it
    assert pools.history.num_slots == pools.main.num_slots
    assert pools.history.prefix_reuse_enabled is False


def test_history_pool_takes_at_most_half_of_the_free_memory(make_pool):
    layout = KVCacheLayout(1, 2, 8)
    per_page = 4 * layout.bytes_per_token("float32")
    free = 2 * 10 * per_page + per_page  # ten and a half pages are the half of it
    pool = make_pool.keep(
        KVCachePool.for_mtp_history(layout, "cpu", "float32", 4, 1000, memory=(10 * free, free))
    )
    assert pool.num_pages == 10


# ---- the scar: one decode call over two pools that differ

# "A production batched draft step (multiple concurrent requests' MTP rounds sharing one FlashInfer
# decode call) crashed with an illegal memory access until this matched the main pool's real
# dtype/page size": a page table says nothing without its page size and its number of pages.


def main_table(make_pool, page_size=16):
    """The page table of two requests on the last pages of a main pool of 40."""
    pool = case_pool(make_pool, page_size, 40)
    pool.alloc(30 * page_size)
    ids = [pool.bind_request(R(1, 4 * page_size), 4 * page_size) for _ in range(2)]
    for i in ids:
        write(pool, i, 0, 4 * page_size)
    return pool, pool.activate_step(*ids).page_table(4 * page_size)


def query():
    return np.ones((2, 2, 8), np.float32)


def test_share_a_table_with_a_draft_pool_of_test_defaults_is_refused(make_pool):
    """float32 and page size 1, which the factory for tests gives."""
    _, table = main_table(make_pool)
    draft = make_pool.keep(
        KVCachePool.for_testing(KVCacheLayout(1, 2, 8, max_batch_size=4, max_seq_len=256))
    )
    with pytest.raises(ValueError, match=r"page_size 16.*1\b"):
        paged_attention(query(), draft, 0, table)


def test_share_a_table_with_a_draft_pool_of_fewer_pages_is_refused(make_pool):
    """Same page size: then page ids of the main pool lie behind the draft pool's buffers."""
    _, table = main_table(make_pool)
    layout = KVCacheLayout(1, 2, 8, max_batch_size=2, max_seq_len=WINDOW)
    draft = make_pool.keep(KVCachePool.for_mtp(layout, "cpu", "float32", 16))
    assert draft.num_pages == 2
    with pytest.raises(ValueError, match=r"\b40\b.*\b2\b"):
        paged_attention(query(), draft, 0, table)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn"])
def test_share_a_table_with_a_history_pool_reads_it_in_its_own_dtype(make_pool, dtype):
    """A history as large as the main pool, its pages in step: one table serves both."""
    main, table = main_table(make_pool)
    layout = KVCacheLayout(1, 2, 8)
    draft = make_pool.keep(KVCachePool.for_mtp_history(layout, "cpu", dtype, 16, main.num_slots))
    draft.alloc(30 * 16)
    ids = [draft.bind_request(R(1, 64), 64) for _ in range(2)]
    step = draft.activate_step(*ids)
    assert np.array_equal(step.page_table(64).indices, table.indices)
    k = np.full((2, 64, 2, 8), 2.0, np.float32)  # 2.0 is exact in each of the dtypes
    step.put(0, 0, k, -k)
    np.testing.assert_array_equal(paged_attention(query(), draft, 0, table), -2 * query())
