"""What waits to be written, and what is known of tiers: both bounded."""

import numpy as np
import pytest

from kvpool.tiers.known import KnownKeys
from kvpool.tiers.write_back import WriteBack
from kvpool.tiers.write_queue import CachedPage, WriteQueue


def page(i):
    return CachedPage(i, 0, bytes([i]) * 32, np.zeros(4, np.int32))


def test_a_queue_is_bounded_and_in_order():
    queue = WriteQueue(3)
    queue.add(map(page, range(5)))
    assert (len(queue), queue.num_dropped) == (3, 2)
    assert [each.page_id for each in queue.take(2)] == [2, 3]
    assert not queue.wait_until_idle(0.001)
    assert [each.page_id for each in queue.take(2)] == [4]
    queue.wake()
    assert queue.take(2) == []
    assert queue.take(2, 0.001) == []
    queue.close()
    queue.add([page(1)])
    assert queue.take(2) is None
    assert queue.wait_until_idle(0)


def test_a_removed_page_is_lost_unless_some_tier_has_it():
    known = [KnownKeys(10), KnownKeys(10)]
    choice = WriteBack("insert", WriteQueue(3), known, 0, lambda: 0)
    keys = [bytes([i]) * 32 for i in range(3)]
    known[0].add(keys[:1])
    known[1].add(keys[1:2])
    choice.on_removed(np.arange(3, dtype=np.int32), keys)
    choice.on_cleared()
    assert choice.num_lost == 1


@pytest.mark.parametrize("max_keys", [0, 1, 3])
def test_known_keys_are_bounded(max_keys):
    known = KnownKeys(max_keys)
    keys = [bytes([i]) * 32 for i in range(5)]
    known.add(keys)
    assert known.have(keys).tolist() == [i >= 5 - max_keys for i in range(5)]
    assert len(known) == max_keys
    known.discard(keys)
    assert len(known) == 0
