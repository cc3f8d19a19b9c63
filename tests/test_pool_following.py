"""The follower of a pool, which tiers and events share: its keys, and what it does for nobody."""

import time

import pytest

from kvpool.page_keys import Partition
from tests.helpers.following import Heard, keys_of
from tests.helpers.pools import R, cache_prompt, case_pool
from tests.helpers.tiers import MODEL, MemoryTier, attach, serve_prints, tier_pool

LOOPBACK = "tcp://127.0.0.1:0"


@pytest.fixture
def pool(make_pool):
    return case_pool(make_pool, 4, 8)


def test_pool_has_one_follower_for_all(pool):
    follower = pool._follow("m", Partition(0, 1))
    assert pool._follow("m", Partition(0, 1)) is follower
    assert follower.keys.fingerprint == keys_of(pool).fingerprint
    leave = follower.subscribe(Heard())
    assert pool._follow(None, None) is follower
    for model, partition in (("other", None), ("m", Partition(0, 2)), ("m", Partition())):
        with pytest.raises(ValueError, match="the same keys") as caught:
            pool._follow(model, partition)
        assert str(partition or Partition(0, 1)) in str(caught.value)
        assert "model 'm' and Partition(first_layer=0, first_kv_head=1)" in str(caught.value)
    leave()
    # Nobody listens any more: it makes way.
    before, follower = follower, pool._follow("other", None)
    assert before.closed
    assert follower.keys.partition == Partition()
    pool.close()
    assert follower.closed
    assert not follower._thread.is_alive()


def test_nobody_listens_and_nothing_is_told(pool):
    follower = pool._follow("m", None)
    leave = follower.subscribe(Heard())
    follower.drain()
    leave()
    cache_prompt(pool, R(1, 8))
    give_up = time.monotonic() + 20
    while not pool.radix.journal.lost:
        assert time.monotonic() < give_up
        time.sleep(0.001)
    assert follower.stats()["stored_pages"] == follower.stats()["unread_bytes"] == 0
    # Who comes now is told of it all the same.
    heard = Heard()
    follower.subscribe(heard)
    follower.drain()
    assert [each[:2] for each in heard.take() if each[0] == "stored"] == [("stored", [0, 1])]


def test_a_close_that_was_interrupted_is_ended_by_the_next(pool):
    follower = pool._follow("m", None)
    unfollow = follower._unfollow

    def interrupt():
        follower._unfollow = unfollow
        raise KeyboardInterrupt

    follower._unfollow = interrupt
    with pytest.raises(KeyboardInterrupt):
        follower.close()
    assert pool._follow("m", None) is not follower
    assert pool.radix.journal is not None


# ---- tiers and events of one pool


def publish(pool, **options):
    pytest.importorskip("zmq")
    pytest.importorskip("msgspec")
    return pool.publish_events(LOOPBACK, **options)


@pytest.mark.parametrize("write", ["insert", "none"])
def test_events_take_the_keys_of_tiers(make_pool, write):
    pool, tier = tier_pool(make_pool), MemoryTier()
    attach(pool, tier, partition=Partition(0, 1), write=write)
    with publish(pool) as publisher:
        publisher.flush()
        assert pool._follower.keys.fingerprint.model == MODEL
        assert pool._follower.keys.partition == Partition(0, 1)
    with pytest.raises(ValueError, match=r"model .weights-1. and .*, got model .other."):
        publish(pool, model="other")
    pool.tiers.close()
    publish(pool, model="other").close()


def test_tiers_and_events_agree_in_a_model(make_pool):
    pool, tier = tier_pool(make_pool), MemoryTier()
    publisher = publish(pool)
    with pytest.raises(ValueError, match="give both the same, or close the other one first"):
        attach(pool, tier)
    publisher.close()
    attach(pool, tier)
    serve_prints(pool, R(1, 9))
    assert pool.tiers.flush(20)
    assert len(tier.records) == 2
    pool.tiers.close()
    publisher = publish(pool, model="m")
    attach(pool, tier, model="m")
    assert pool.tiers.flush(20)
    assert len(tier.records) == 4
    publisher.close()
