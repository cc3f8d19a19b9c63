"""What speculation leaves in the tree: accepted tokens, and nothing of a tail that was rejected.

A driver may hand over whatever list it has: accepted tokens and drafts, or the tokens that
replaced them. Each test runs eagerly; `tests/test_graphs_speculative.py` shares the helpers.
"""

import numpy as np
import pytest

from tests.helpers.pools import LAYER_STEP, R, assert_ledger, case_pool, st, write
from tests.helpers.speculation import (
    BATCHES,
    COMMITTED,
    PAGE_SIZES,
    REJECTED,
    cached_tokens,
    prompt_of,
    rows_of,
    speculate,
    speculation_pool,
)

pytestmark = pytest.mark.parametrize("page_size", PAGE_SIZES)
batches = pytest.mark.parametrize("batch", BATCHES)

DRAFT = 9_000_000  # what a rejected token is, plus its position


def with_draft(row, i):
    """Accepted tokens of the row, then the rejected ones."""
    return prompt_of(i, row.sealed) + [DRAFT + p for p in range(row.sealed, row.end)]


def whole_pages(rows, page_size):
    """Accepted tokens that fill their page, of all rows."""
    lengths = [row.sealed // page_size * page_size for row in rows]
    return sorted(t for i, n in enumerate(lengths) for t in prompt_of(i, n))


def take_back(step, rows, verb):
    """One of the three ways to reject; all of them lower what counts as written."""
    sealed, ends = [row.sealed for row in rows], [row.end for row in rows]
    if verb == "seal_length":
        step.seal_length(sealed)
    else:
        getattr(step, verb)(sealed, ends)


@batches
@pytest.mark.parametrize("verb", ["seal_length", "truncate_to", "invalidate_range"])
@pytest.mark.parametrize("zero_rejected_kv", [True, False])
def test_finish_with_rejected_tokens_caches_the_accepted_pages_only(
    make_pool, page_size, batch, verb, zero_rejected_kv
):
    rows = rows_of(batch, page_size)
    pool, ids = speculation_pool(make_pool, page_size, rows, zero_rejected_kv=zero_rejected_kv)
    take_back(speculate(pool, ids, rows), rows, verb)
    for n, (i, row) in enumerate(zip(ids, rows, strict=True)):
        assert pool.finish_request(i, with_draft(row, n)) == row.sealed // page_size * page_size
    assert cached_tokens(pool) == whole_pages(rows, page_size)
    assert_ledger(pool)


@batches
def test_checkpoint_with_rejected_tokens_shares_the_accepted_pages_only(
    make_pool, page_size, batch
):
    rows = rows_of(batch, page_size)
    pool, ids = speculation_pool(make_pool, page_size, rows)
    take_back(speculate(pool, ids, rows), rows, "truncate_to")
    for n, (i, row) in enumerate(zip(ids, rows, strict=True)):
        pages = pool.request(i).page_ids.tolist()
        floor = row.sealed // page_size * page_size
        assert pool.checkpoint_request(i, with_draft(row, n)) == floor
        assert pool.request(i).shared_len == floor
        assert pool.request(i).page_ids.tolist() == pages
    assert cached_tokens(pool) == whole_pages(rows, page_size)
    assert_ledger(pool)


@batches
def test_finish_after_other_tokens_replaced_the_tail_caches_these(make_pool, page_size, batch):
    """A draft was rejected, the model's own tokens went there, then the request ended."""
    rows = rows_of(batch, page_size)
    pool, ids = speculation_pool(make_pool, page_size, rows)
    take_back(speculate(pool, ids, rows), rows, "truncate_to")
    total = 6 * page_size
    for n, (i, row) in enumerate(zip(ids, rows, strict=True)):
        write(pool, i, row.sealed, total, COMMITTED)
        assert pool.finish_request(i, prompt_of(n, total)) == total
        # The draft finds the accepted whole pages, and no page with a rejected token.
        match = pool.radix.match_prefix(with_draft(row, n))
        assert match.length == row.sealed // page_size * page_size
        match = pool.radix.match_prefix(prompt_of(n, total))
        slots = (match.pages[:, None] * page_size + np.arange(page_size)).ravel()
        for layer in range(pool.num_layers):
            expected = np.arange(total) + COMMITTED + layer * LAYER_STEP
            np.testing.assert_array_equal(pool.key_layer(layer)[slots][:, 0, 0], expected)
    assert_ledger(pool)


def test_checkpoint_between_windows_never_shares_what_the_next_reject_takes(make_pool, page_size):
    """Ten rounds of a window of 3 with one token accepted, a checkpoint after each."""
    pool = case_pool(make_pool, page_size, 24)
    start = page_size
    a = pool.bind_request(R(1, start), start + 12)
    write(pool, a, 0, start)
    for _ in range(10):
        step = write(pool, a, start, start + 3, REJECTED)
        write(pool, a, start, start + 1, COMMITTED)
        step.truncate_to(start + 1, start + 3)
        start += 1
        pool.checkpoint_request(a, [*R(1, start), DRAFT, DRAFT])
        assert pool.request(a).shared_len == start // page_size * page_size
        assert cached_tokens(pool) == R(1, start // page_size * page_size)
    pool.finish_request(a, [*R(1, start), DRAFT, DRAFT])
    assert cached_tokens(pool) == R(1, start // page_size * page_size)
    assert_ledger(pool)


def test_finish_without_a_reject_call_caches_the_window_as_written(make_pool, page_size):
    """Who takes nothing back has accepted everything: the tokens of the list decide no more."""
    pool = case_pool(make_pool, page_size, 6)
    a = pool.bind_request(R(1, page_size), 3 * page_size)
    write(pool, a, 0, 2 * page_size)
    assert pool.finish_request(a, R(1, page_size + 1)) == (page_size + 1) // page_size * page_size
    assert_ledger(pool)


def test_truncate_to_the_prompt_after_a_full_reject_caches_the_prompt(make_pool, page_size):
    pool = case_pool(make_pool, page_size, 6)
    prompt = R(1, 2 * page_size)
    a = pool.bind_request(prompt, 6 * page_size)
    write(pool, a, 0, 2 * page_size)
    write(pool, a, 2 * page_size, 6 * page_size, REJECTED).truncate_to(
        2 * page_size, 6 * page_size
    )
    assert pool.finish_request(a, prompt + R(DRAFT, DRAFT + 4 * page_size - 1)) == 2 * page_size
    assert st(pool) == (4, 2 * page_size, 2 * page_size, 0)


def test_fork_of_a_taken_back_row_does_not_see_the_tail(make_pool, page_size):
    """Both go on with other tokens; each finds its own in the tree."""
    pool = case_pool(make_pool, page_size, 14)
    start = page_size + 1
    a = pool.bind_request(R(1, start), 4 * page_size + 1)
    write(pool, a, 0, start)
    step = write(pool, a, start, start + page_size + 1, REJECTED)
    step.truncate_to(start, start + page_size + 1)
    f = pool.fork_request(a, 4 * page_size + 1)
    end = 3 * page_size
    for request_id, first in ((a, 100), (f, 200)):
        if end > start:
            write(pool, request_id, start, end, COMMITTED)
        tokens = R(1, start) + R(first, first + end - start - 1)
        pool.finish_request(request_id, tokens)
        assert pool.radix.match_prefix(tokens).length == max(start, end) // page_size * page_size
    assert not set(cached_tokens(pool)) & set(range(DRAFT, 2 * DRAFT))
    assert_ledger(pool)
