"""The journal of a tree: its buffer, beside clean-ups of the collector and other threads."""

import contextlib
import itertools
import sys
import threading
import time

import numpy as np
import pytest

from kvpool import KVCacheError, KVCacheExhaustedError
from kvpool_ext.journal import TreeJournal
from kvpool_ext.listing import follow_tree, take_changes, unfollow_tree
from tests.helpers.following import follower_of, keys_of
from tests.helpers.pools import R, cache_prompt, case_pool
from tests.oracles.following import RecordsTwin, ToldTwin, told_of
from tests.test_collector import CALLS as COLLECTED_CALLS
from tests.test_collector import CLEAN_UPS, _little_to_collect, at_collection  # noqa: F401
from tests.test_collector import scene as collected_scene

# ---- the buffer


def test_records_own_their_memory_and_hand_it_back(make_pool):
    pool = case_pool(make_pool, 4, 64)
    journal = follow_tree(pool._requests.ledger, 1 << 20)
    twin, kept = RecordsTwin(4), []
    take_changes(pool.radix)
    for i in range(8):
        cache_prompt(pool, R(20 * i, 20 * i + 11), extra_key=i % 3)
        words, names, listing, _ = take_changes(pool.radix)
        assert (listing, journal.num_words) == (None, 0)
        kept.append((words, words.copy(), names))
    for words, copied, names in kept:
        assert words.tolist() == copied.tolist()
        twin.read(words, names)
    assert twin.pages == told_of(pool)
    unfollow_tree(pool.radix, journal)
    del journal
    assert [words.tolist() for words, _, _ in kept] == [copy.tolist() for _, copy, _ in kept]


def test_evictions_in_a_row_are_one_record(make_pool):
    pool = case_pool(make_pool, 4, 64)
    journal = follow_tree(pool._requests.ledger, 1 << 20)
    for i in range(8):
        cache_prompt(pool, R(20 * i, 20 * i + 11))
    take_changes(pool.radix)
    expected = [pool.radix.evict(4).tolist() for _ in range(24)]
    words = take_changes(pool.radix)[0].tolist()
    assert words == [2, 24, -1, *itertools.chain.from_iterable(expected)]
    assert journal.num_losses == 0


def test_full_journal_drops_all_and_goes_on_from_the_listing(make_pool):
    pool = case_pool(make_pool, 4, 64)
    record = 4 * (3 + 3 * (2 + 4))
    journal = follow_tree(pool._requests.ledger, 2 * record)
    take_changes(pool.radix)
    for i in range(3):
        assert (journal.lost, journal.num_words) == (False, i * record // 4)
        cache_prompt(pool, R(20 * i, 20 * i + 11))
    assert (journal.lost, journal.num_words, journal.num_losses) == (True, 0, 1)
    pool.reset_prefix_cache()
    cache_prompt(pool, R(1, 12))
    assert (journal.lost, journal.num_losses) == (True, 1)
    twin = RecordsTwin(4)
    words, names, listing, _ = take_changes(pool.radix)
    assert words is listing
    twin.read(words, names)
    assert twin.pages == told_of(pool)
    assert not journal.lost
    journal.forget()
    journal.forget()
    assert (journal.lost, journal.num_losses) == (True, 2)


def test_check_of_a_followed_tree_looks_at_the_journal(make_pool):
    pool = case_pool(make_pool, 4, 64)
    cache_prompt(pool, R(1, 12))
    journal = follow_tree(pool._requests.ledger, 1 << 20)
    cache_prompt(pool, R(20, 27))
    pool.radix.evict(8)
    pool.check()
    cached = [page for view in pool.radix.nodes() for page in view.pages.tolist()]
    journal.check(cached)
    with pytest.raises(RuntimeError, match=f"page {cached[-1]} is not in the tree"):
        journal.check(cached[:-1])
    with pytest.raises(RuntimeError, match="page 63 is in the tree"):
        journal.check([*cached, 63])


def test_journal_that_holds_no_record_is_refused():
    with pytest.raises(ValueError, match="max_bytes must be at least 36"):
        TreeJournal(8, 4, 35)


# ---- the collector


@pytest.mark.usefixtures("_little_to_collect")
@pytest.mark.parametrize("clean_up", ["finishes", "caches in a new namespace", "resets"])
@pytest.mark.parametrize("call", ["bind", "finish", "insert", "evict", "reset", "drain"])
def test_clean_up_at_any_collection_is_told_in_its_place(make_pool, call, clean_up):
    for number in range(1, 8):
        pool, a, b = collected_scene(make_pool)
        follower, told = follower_of(pool), ToldTwin(keys_of(pool))
        follower.subscribe(told)
        act = COLLECTED_CALLS.get(call, lambda *_: follower.drain())  # noqa: B023
        with (
            at_collection(number, lambda: CLEAN_UPS[clean_up](pool, a, b)) as came,  # noqa: B023
            contextlib.suppress(KVCacheError, ValueError, RuntimeError),
        ):
            act(pool, a, b)
        follower.drain()
        told.compare(pool, follower)
        follower.close()
        pool.close()
        if not came:
            return


# ---- threads


@pytest.mark.parametrize("max_bytes", [1 << 20, 200])
def test_scheduler_follower_and_a_third_thread_agree_in_the_end(make_pool, max_bytes):
    pool = case_pool(make_pool, 4, 64)
    follower = follower_of(pool, max_bytes=max_bytes, interval_s=1e-4)
    told = ToldTwin(keys_of(pool))
    follower.subscribe(told)
    errors, ended, asked = [], threading.Event(), [0]

    def ask():
        everything = np.arange(64, dtype=np.int32)
        try:
            while not ended.is_set():
                lives = np.array(sorted(told.lives.copy())[-200:], np.int64).reshape(-1, 2)
                pages, generations = lives[:, 0].astype(np.int32), lives[:, 1].astype(np.uint32)
                stay = follower.still_cached(pages, generations)
                # One page has one life at most.
                assert len(np.unique(pages[stay])) == stay.sum()
                victims = follower.next_victims(64)
                assert len(np.unique(victims)) == len(victims)
                follower.describe(everything)
                asked[0] += 1
        except BaseException as error:
            errors.append(error)

    third = threading.Thread(target=ask)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    follower.start()
    third.start()
    try:
        rng = np.random.default_rng(0)
        end, rounds = time.monotonic() + 0.5, 0
        while time.monotonic() < end or rounds < 100:
            rounds += 1
            prompt = rng.integers(0, 3, rng.integers(1, 60)).tolist()
            with contextlib.suppress(KVCacheExhaustedError):
                cache_prompt(pool, prompt, extra_key=[None, "a"][rounds % 2])
            if rounds % 50 == 0:
                pool.reset_prefix_cache()
            if rounds % 7 == 0:
                pool.radix.match_prefix(prompt)
                time.sleep(1e-4)
    finally:
        ended.set()
        third.join(60)
        sys.setswitchinterval(interval)
    assert errors == []
    assert asked[0] > 0
    follower.drain()
    told.compare(pool, follower)
    assert follower.stats()["dropped_subscribers"] == follower.stats()["failed_drains"] == 0
    assert (follower.stats()["losses"] > 0) == (max_bytes == 200)
    follower.close()
