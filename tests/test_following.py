"""The follower of a tree: who is told what, when, and what happens where somebody fails."""

import numpy as np
import pytest

from kvpool import RadixCache
from kvpool.following import TreeFollower
from kvpool.page_keys import PageKeys
from tests.helpers.following import Heard, follower_of, keys_of
from tests.helpers.pools import R, cache_prompt, case_pool
from tests.oracles.following import ToldTwin


@pytest.fixture
def pool(make_pool):
    return case_pool(make_pool, 4, 16)


@pytest.fixture
def follower(pool):
    follower = follower_of(pool)
    yield follower
    follower.close()


# ---- what is told


def test_subscriber_is_told_what_is_there_and_then_what_changes(pool, follower):
    cache_prompt(pool, R(1, 8))
    heard = Heard()
    follower.subscribe(heard)
    assert heard.lines == []
    follower.drain()
    assert heard.take() == [("stored", [0, 1], None), ("caught up",)]
    cache_prompt(pool, R(1, 12))
    cache_prompt(pool, R(1, 4), extra_key="a")
    pool.radix.evict(8)
    follower.drain()
    assert heard.take() == [
        ("stored", [2], None),
        ("stored", [3], "a"),
        ("removed", [2, 1]),
        ("caught up",),
    ]
    pool.reset_prefix_cache()
    cache_prompt(pool, R(1, 4))
    follower.drain()
    assert [line[0] for line in heard.take()] == ["cleared", "stored", "caught up"]


def test_drain_without_changes_tells_nothing(pool, follower):
    heard = Heard()
    follower.subscribe(heard)
    follower.drain()
    assert heard.take() == [("caught up",)]
    pool.radix.match_prefix(R(1, 8))
    follower.drain()
    assert heard.take() == []


def test_later_subscriber_is_told_the_tree_and_others_only_the_change(pool, follower):
    first, second = Heard(), Heard()
    follower.subscribe(first)
    cache_prompt(pool, R(1, 8))
    follower.drain()
    first.take()
    cache_prompt(pool, [*R(1, 4), *R(50, 53)])
    follower.subscribe(second)
    follower.drain()
    assert first.take() == [("stored", [2], None), ("caught up",)]
    # A parent before its children, node by node.
    assert second.take()[0] == ("stored", [0], None)
    assert follower.stats()["cached_pages"] == 3


def test_unsubscribed_is_told_nothing_more(pool, follower):
    first, second, third = Heard(), Heard(), Heard()
    leave = follower.subscribe(first)
    follower.subscribe(second)
    follower.subscribe(third)()
    follower.drain()
    leave()
    leave()
    cache_prompt(pool, R(1, 4))
    follower.drain()
    assert first.take() == [("caught up",)]
    assert third.take() == []
    assert ("stored", [0], None) in second.lines
    assert follower.stats()["subscribers"] == 1


def test_keys_are_those_of_the_whole_prefix_in_its_namespace(pool, follower):
    runs = []
    heard = Heard()
    heard.on_stored = runs.append
    follower.subscribe(heard)
    follower.drain()
    for key in (None, "a", b"a", 7):
        cache_prompt(pool, R(1, 8), extra_key=key)
        cache_prompt(pool, R(1, 13), extra_key=key)
    follower.drain()
    for above, below, key in zip(runs[::2], runs[1::2], (None, "a", b"a", 7), strict=True):
        expected = keys_of(pool).of_tokens(np.array(R(1, 12), np.int32), key)
        assert above.keys + below.keys == expected
        assert (above.parent_key, below.parent_key) == (None, expected[1])
        assert above.extra_key == below.extra_key == key
        assert below.tokens.tolist() == [R(9, 12)]
        assert (below.tokens.dtype, below.page_ids.dtype) == (np.int32, np.int32)
        assert below.generations.dtype == np.uint32


def test_what_a_run_holds_is_the_subscribers_own(pool, follower):
    runs = []
    heard = Heard()
    heard.on_stored = runs.append
    follower.subscribe(heard)
    for i in range(20):
        cache_prompt(pool, R(10 * i, 10 * i + 7))
        follower.drain()
    assert [run.tokens.ravel().tolist() for run in runs] == [
        R(10 * i, 10 * i + 7) for i in range(20)
    ]


# ---- pages that stay


def test_still_cached_is_true_for_one_life_of_a_page(pool, follower):
    cache_prompt(pool, R(1, 8))
    follower.drain()
    pages = np.array([0, 1, 2], np.int32)
    _, _, generations = follower.describe(pages)
    assert follower.still_cached(pages, generations).tolist() == [True, True, False]
    pool.radix.evict(4)
    assert follower.still_cached(pages, generations).tolist() == [True, False, False]
    pool.free(pool.radix.match_prefix([]).pages.astype(np.int64))
    taken = np.array([1], np.int32)
    pool.radix.insert(R(1, 8), np.array([0, 1], np.int32))
    assert follower.still_cached(taken, generations[1:2]).tolist() == [False]
    assert follower.still_cached(taken, generations[1:2] + np.uint32(1)).tolist() == [True]
    pool.reset_prefix_cache()
    for later in range(4):
        assert not follower.still_cached(pages, generations + np.uint32(later)).any()


def test_reset_ends_the_life_of_pages_that_are_held(pool, follower):
    heard = Heard()
    follower.subscribe(heard)
    cache_prompt(pool, R(1, 8))
    request = pool.bind_request(R(1, 9), 12)
    follower.drain()
    heard.take()
    pages = np.array([0, 1], np.int32)
    assert follower.still_cached(pages, np.zeros(2, np.uint32)).all()
    pool.reset_prefix_cache()
    assert not follower.still_cached(pages, np.zeros(2, np.uint32)).any()
    pool.unbind_request(request)  # their end is told no more
    follower.drain()
    assert heard.take() == [("cleared",), ("caught up",)]
    assert not follower.still_cached(pages, np.ones(2, np.uint32)).any()


def test_still_cached_refuses_what_makes_no_sense(pool, follower):
    with pytest.raises(ValueError, match="page 99 at position 1 is not one of the 16 pages"):
        follower.still_cached(np.array([0, 99], np.int32), np.zeros(2, np.uint32))
    with pytest.raises(ValueError, match="2 page ids need as many generations"):
        follower.still_cached(np.array([0, 1], np.int32), np.zeros(3, np.uint32))
    with pytest.raises(TypeError, match="generations must be a uint32 array"):
        follower.still_cached(np.array([0, 1], np.int32), np.zeros(2, np.int64))
    with pytest.raises(ValueError, match="num_pages"):
        follower.next_victims(-1)


# ---- changes that are lost


def test_lost_changes_are_made_up_for_by_all_that_is_there(make_pool):
    pool = case_pool(make_pool, 4, 16)
    follower = follower_of(pool, max_bytes=100)
    told = ToldTwin(keys_of(pool))
    follower.subscribe(told)
    cache_prompt(pool, R(1, 8))
    follower.drain()
    assert (follower.stats()["losses"], follower.stats()["resyncs"]) == (0, 0)
    cache_prompt(pool, R(11, 18))
    cache_prompt(pool, R(21, 28))
    pool.radix.evict(4)
    assert follower.stats()["losses"] == 1
    follower.drain()
    told.compare(pool, follower)
    assert follower.stats()["resyncs"] == 1
    assert (told.clears, follower.stats()["resets"]) == (1, 0)
    follower.close()


def test_keys_of_pages_that_stayed_are_not_computed_again(make_pool, monkeypatch):
    pool = case_pool(make_pool, 4, 16)
    follower = follower_of(pool, max_bytes=50)  # one record of one page
    told = ToldTwin(keys_of(pool))
    follower.subscribe(told)
    cache_prompt(pool, R(1, 16))
    follower.drain()
    hashed = []
    below = PageKeys.below

    def counted(keys, above, tokens, **more):
        if keys is follower.keys:
            hashed.append(len(tokens))
        return below(keys, above, tokens, **more)

    monkeypatch.setattr(PageKeys, "below", counted)
    cache_prompt(pool, [*R(1, 16), *R(20, 27)])
    pool.radix.evict(4)
    follower.drain()
    told.compare(pool, follower)
    assert follower.stats()["resyncs"] == 1
    assert sum(hashed) == 1
    follower.close()


def test_failed_drain_is_made_up_for_by_the_next(pool, follower, monkeypatch):
    told = ToldTwin(keys_of(pool))
    follower.subscribe(told)
    cache_prompt(pool, R(1, 8))

    def fail(*_, **__):
        raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr(PageKeys, "below", fail)
        with pytest.raises(MemoryError):
            follower.drain()
    cache_prompt(pool, R(11, 18))
    follower.drain()
    told.compare(pool, follower)
    assert follower.stats()["failed_drains"] == 1


# ---- making one


def test_follower_refuses_bad_arguments(pool, follower):
    ledger = pool._requests.ledger
    with pytest.raises(ValueError, match="followed already"):
        TreeFollower(ledger, keys_of(pool))
    follower.close()
    for options in ({"interval_s": 0}, {"interval_s": float("nan")}, {"max_bytes": 35}):
        with pytest.raises(ValueError, match=next(iter(options))):
            TreeFollower(ledger, keys_of(pool), **options)
    keys = keys_of(pool)
    keys.page_size = 8
    with pytest.raises(ValueError, match="pages of 8 tokens, the tree has 4"):
        TreeFollower(ledger, keys)
    assert pool.radix.journal is None


def test_tree_on_its_own_has_no_journal():
    assert RadixCache(4).journal is None


def test_loaded_pool_is_told_as_it_was(make_pool, tmp_path):
    pool = case_pool(make_pool, 4, 16)
    for key in (None, "a"):
        cache_prompt(pool, R(1, 12), extra_key=key)
        cache_prompt(pool, [*R(1, 4), *R(30, 37)], extra_key=key)
    pool.save(tmp_path / "pool", model="m")
    loaded = type(pool).load(tmp_path / "pool", model="m")
    told = ToldTwin(keys_of(loaded))
    follower = follower_of(loaded)
    follower.subscribe(told)
    follower.drain()
    told.compare(loaded, follower)
    other = ToldTwin(keys_of(pool))
    with_pool = follower_of(pool)
    with_pool.subscribe(other)
    with_pool.drain()
    assert {page[:3] for page in other.pages.values()} == {
        page[:3] for page in told.pages.values()
    }
    for each in (follower, with_pool):
        each.close()
    loaded.close()
