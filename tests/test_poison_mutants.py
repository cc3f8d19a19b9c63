"""Faults planted in the pool: each is silent without poison mode, and found with it.

A mutant replaces one function of the pool. Its story runs twice: without poison to the end, where
a wrong answer is what somebody would have been served; with poison it must be stopped.
"""

import numpy as np
import pytest

from kvpool import KVCacheCorruptionError
from kvpool.attention import paged_attention
from kvpool.poison.books import PageBooks
from kvpool.requests import RequestTable
from kvpool.step import LatestTable
from kvpool.step import rows as step_rows
from kvpool.step.rows import StepBase
from kvpool.storage import KVStorage
from tests.helpers.pools import R, cache_prompt, case_pool, values, window, write


def silent_and_found(make_pool, story, message):
    """Run `story(pool)` both ways; what it returns without poison."""
    served = story(case_pool(make_pool, 4, 8, poison=False))
    poisoned = case_pool(make_pool, 4, 8, poison=True)
    with pytest.raises(KVCacheCorruptionError, match=message):
        story(poisoned)
    poisoned.close()  # its check would find the damage too
    return served


def keys(pool, request_id, length):
    """Keys of layer 0 that a request reads."""
    k, _ = pool.activate_step(request_id).get(0, length)
    return k[0, :, 0, 0].tolist()


# ---- the three


def test_stale_read_through_a_page_table_of_pages_given_back(make_pool, monkeypatch):
    """A table is taken for that of the same rows when only the number of pages is the same."""

    def lists(self, identity, indptr):
        return self.table is not None and np.array_equal(indptr, self.table.indptr_host)

    monkeypatch.setattr(LatestTable, "lists", lists)

    def story(pool):
        gone, kept = (pool.bind_request(R(n, n + 5), 8) for n in (1, 11))
        write(pool, kept, 0, 6, base=200)
        write(pool, gone, 0, 6, base=100).page_table(6)
        pool.unbind_request(gone)
        table = pool.activate_step(kept).page_table(6)
        return paged_attention(np.zeros((1, 2, 8), np.float32), pool, 0, table)

    served = silent_and_found(make_pool, story, r"freed or never written page.*owner: free")
    # V is minus K, all weights are equal: the mean over the positions of the request that left.
    assert np.allclose(served, -np.mean(values(100, 0, 6)))


def test_use_after_free_by_a_step_that_does_not_notice_the_end(make_pool, monkeypatch):
    monkeypatch.setattr(StepBase, "_recheck", lambda self: None)

    def story(pool):
        gone = pool.bind_request(R(1, 4), 8)
        step = write(pool, gone, 0, 4, base=100)
        pool.unbind_request(gone)
        new = pool.bind_request(R(11, 14), 8)
        write(pool, new, 0, 4, base=200)
        step.put(0, 3, *window(pool, 3, 4, 100))
        return keys(pool, new, 4)

    served = silent_and_found(make_pool, story, r"request 1 after its end, page \d.*request 2")
    assert served == [*values(200, 0, 3), *values(100, 3, 4)]


def test_unwritten_hit_of_a_finish_that_publishes_past_the_valid_length(make_pool, monkeypatch):
    finish = RequestTable.finish

    def publish_all(self, request, tokens, reuse):
        self.ledger.mark(request, min(len(tokens), self.capacity(request)))
        return finish(self, request, tokens, reuse)

    monkeypatch.setattr(RequestTable, "finish", publish_all)

    def story(pool):
        stale = pool.bind_request(R(91, 98), 8)
        write(pool, stale, 0, 8, base=900)
        pool.unbind_request(stale)
        short = pool.bind_request(R(1, 8), 8)
        write(pool, short, 0, 3)
        pool.finish_request(short, R(1, 8))
        hit = pool.bind_request(R(1, 9), 12)
        assert pool.matched_prefix_len(hit) == 8
        return keys(pool, hit, 8)

    served = silent_and_found(
        make_pool, story, r"publishing request 2: position 4 of layer 0 was declared written"
    )
    # Zeros where the page was entered, and then what the owner before had written.
    assert served[:4] == [*values(100, 0, 3), 0]
    assert served[4:] == values(900, 4, 8)


# ---- and more


def test_use_after_free_by_a_kernel_that_keeps_its_slots(make_pool):
    """No mutant: model code that writes past the pool. It is found when the page is handed out."""

    def story(pool):
        gone = pool.bind_request(R(1, 4), 4)
        slots = pool.step.window_slot_indices(0, 4)
        pool.unbind_request(gone)
        pool.key_layer(1)[slots] = 7
        pool.bind_request(R(11, 14), 4)
        return True

    assert silent_and_found(make_pool, story, "was written after it was given back")


class BlindRows:
    """`StepRows` that calls no page read-only."""

    def __init__(self, *arguments):
        self._rows = step_rows_of(*arguments)

    def __getattr__(self, name):
        return getattr(self._rows, name)

    def first_shared(self, window):
        return -1


step_rows_of = step_rows.StepRows


def test_put_into_a_cached_page_is_found_at_the_next_hit(make_pool, monkeypatch):
    def story(pool):
        cache_prompt(pool, R(1, 8))
        with monkeypatch.context() as patch:
            patch.setattr(step_rows, "StepRows", BlindRows)
            vandal = pool.bind_request(R(1, 9), 12)
            write(pool, vandal, 2, 3, base=900)
        return keys(pool, pool.bind_request(R(1, 9), 12), 8)

    served = silent_and_found(make_pool, story, r"page \d, which changed since it was cached")
    assert served == [*values(100, 0, 2), 902, *values(100, 3, 8)]


def test_fork_that_does_not_copy_the_partial_page(make_pool, monkeypatch):
    monkeypatch.setattr(KVStorage, "copy", lambda *_: None)

    def story(pool):
        parent = pool.bind_request(R(1, 6), 8)
        write(pool, parent, 0, 6)
        return keys(pool, pool.fork_request(parent, 8), 6)

    served = silent_and_found(make_pool, story, "position 4 of layer 0 is on page")
    assert served == [*values(100, 0, 4), 0, 0]


def test_put_that_forgets_that_it_enters_a_page(make_pool, monkeypatch):
    """The masked rest of the page holds what its last owner left; poison is found below it."""

    def story(pool):
        stale = pool.bind_request(R(91, 98), 8)
        write(pool, stale, 0, 8, base=900)
        pool.unbind_request(stale)
        request = pool.bind_request(R(1, 4), 8)
        with monkeypatch.context() as patch:
            patch.setattr(KVStorage, "zero_pages", lambda *_: None)
            write(pool, request, 0, 1)
        write(pool, request, 2, 4)  # a gap, which reads as zeros
        pool.mark_written(request, 4)
        return keys(pool, request, 4)

    served = silent_and_found(make_pool, story, "position 1 of layer 0 is on page")
    assert served[1] == 901


def test_pages_with_two_owners_are_found_when_they_are_handed_out(make_pool):
    pool = case_pool(make_pool, 4, 8, poison=True)
    request = pool.bind_request(R(1, 4), 8)
    books = PageBooks(pool._requests.ledger.allocator, pool._requests.ledger.books.stored)
    books.settle()
    books.hand_out(pool.request(request).page_ids, "request 1", pool.check)

    def out_of_sync():
        raise RuntimeError("page 0 is out of sync: claimed by two requests")

    with pytest.raises(KVCacheCorruptionError, match=r"neither free nor cached.*two requests"):
        books.hand_out(pool.request(request).page_ids, "request 2", out_of_sync)
