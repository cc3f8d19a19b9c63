"""A replay of tiers finds what real pools with real tiers find, request by request."""

import pytest

from kvpool.replay import Cell, Fleet, replay
from kvpool.replay.reader import TraceReader
from kvpool.replay.token_ids import TokenWriter
from kvpool.tiers.settings import TierSettings
from tests.helpers.real_fleet import RealFleet
from tests.helpers.traces import random_lines, write_trace

BLOCK = 4


@pytest.fixture
def page_by_page(monkeypatch):
    """Staging buffers of one page each, and enough of them.

    A tier is asked for a buffer full at a time, so that what lies behind the first gap is an
    access too, as far as the buffer goes; a replay knows no buffers. Pages that a store had go to
    the host tier only while a buffer is free.
    """
    monkeypatch.setattr(TierSettings, "staging", lambda self, num_tiers, record_bytes: (200, 1))


def both(make_pool, folder, cell, window, lines):
    """The replay's result, and real pools after the same trace; they matched the same."""
    path = write_trace(folder, lines)
    how = {"block_size": BLOCK, "window": window, "keep_matches": True, "bound": False}
    result = replay(path, [cell], **how).results[0]
    assert result.waited == result.too_large == 0
    assert result.evicted_pages > 0
    assert result.fleet.host_hit_tokens + result.fleet.remote_hit_tokens > 0
    real, writer = RealFleet(make_pool, cell, window), TokenWriter(BLOCK)
    for index, request in enumerate(TraceReader(path, block_size=BLOCK)):
        real.serve(request, writer.tokens(index, request, False)[:-1].tolist())
    real.drain()
    assert result.matched_lens.tolist() == real.matched
    return result, real


@pytest.mark.usefixtures("page_by_page")
@pytest.mark.parametrize("window", [1, 3])
@pytest.mark.parametrize("instances", [1, 2])
@pytest.mark.parametrize(
    ("host", "remote"), [(None, 0), (0, None), (60, None), (200, 0), (0, 240), (90, 240)]
)
def test_real_pools_with_real_tiers_find_the_same(
    make_pool, tmp_path, window, instances, host, remote
):
    # 120 tokens hold three of the longest requests: nobody waits for room.
    cell = Cell(120, 4, "lru", Fleet(instances, host_tier=host, remote_tier=remote))
    result, real = both(make_pool, tmp_path, cell, window, random_lines(31, 90, BLOCK, num_keys=3))
    found = result.fleet
    records, evicted = real.stats(tier for host in real.hosts for tier in host)
    assert found.host_peak_pages == max(records, default=0)
    assert found.host_evicted_pages == evicted
    records, evicted = real.stats(real.remote)
    assert found.remote_peak_pages == sum(records)
    assert found.remote_evicted_pages == evicted


@pytest.mark.parametrize("window", [1, 3])
@pytest.mark.parametrize("instances", [1, 2])
@pytest.mark.parametrize("write", ["insert", "evict"])
def test_buffers_and_times_of_writing_do_not_matter_where_nothing_is_let_go(
    make_pool, tmp_path, window, instances, write
):
    # What is written when it is evicted, real pools write ahead of that. Each has its own tier:
    # a shared one would have what the other pool still has.
    cell = Cell(120, 4, "lru", Fleet(instances, host_tier=None, write=write))
    both(make_pool, tmp_path, cell, window, random_lines(32, 90, BLOCK))
