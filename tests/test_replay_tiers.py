"""A replay through tiers and several instances counts right: against brute force, page by page."""

import json
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.replay.trace import find_trace
from kvpool.replay import Cell, Fleet, Replay, ReplayOptions, TraceError, fleets, grid, replay
from kvpool.replay.driver import CellReplay
from kvpool.replay.reader import TraceReader
from kvpool.replay.token_ids import TokenWriter
from tests.helpers.traces import hashed, random_lines, write_trace
from tests.oracles.fleet import SlowFleet

BLOCK = 4


def slow_fleet(path, cell, num_pages, window, checkpoint):
    """The same trace through the slow twin."""
    slow = SlowFleet(num_pages, cell.page_size, window, checkpoint, cell.fleet)
    writer = TokenWriter(BLOCK)
    for index, request in enumerate(TraceReader(path, block_size=BLOCK)):
        tokens = writer.tokens(index, request, False)[:-1].tolist()
        slow.serve(tokens, request.prompt_len, request.extra_key)
    slow.drain()
    return slow


def agrees(path, cell, window, checkpoint=True):
    """Replay a cell, compare all that the slow twin knows, and return the result."""
    report = replay(
        path,
        [cell],
        block_size=BLOCK,
        window=window,
        checkpoint=checkpoint,
        keep_matches=True,
        bound=False,
    )
    result = report.results[0]
    slow = slow_fleet(path, cell, result.num_pages, window, checkpoint)
    assert result.matched_lens.tolist() == slow.matched
    assert result.waited == slow.waited
    assert result.evicted_pages == sum(each.evicted for each in slow.instances)
    matched, uncut = np.array(slow.matched), np.array(slow.uncut)
    assert result.hit_tokens == matched[matched >= 0].sum()
    assert result.cut_tokens == (uncut - matched)[matched >= 0].sum()
    found = result.fleet
    assert (found.host_hit_tokens, found.remote_hit_tokens) == (slow.host_hits, slow.remote_hits)
    hosts = [each.tiers["host"] for each in slow.instances if each.tiers["host"] is not None]
    assert found.host_peak_pages == max((len(host.names) for host in hosts), default=0)
    assert found.host_evicted_pages == sum(host.evicted for host in hosts)
    if slow.remote is not None:
        assert found.remote_peak_pages == len(slow.remote.names)
        assert found.remote_evicted_pages == slow.remote.evicted
    assert found.instance_requests == [each.served for each in slow.instances]
    assert found.instance_prompt_tokens == [each.served_tokens for each in slow.instances]
    return result


@st.composite
def traces(draw):
    """Requests of few blocks, so that they meet often."""
    lines = []
    for _ in range(draw(st.integers(1, 24))):
        ids = draw(st.lists(st.integers(0, 2), min_size=1, max_size=5))
        cut = draw(st.integers(0, BLOCK - 1))
        line = hashed(len(ids) * BLOCK - cut, ids, draw(st.integers(0, 5)))
        if draw(st.booleans()):
            line["extra_key"] = "tenant"
        lines.append(line)
    return lines


tiers = st.sampled_from([0, 8, 16, 40, None])


@given(
    lines=traces(),
    page_size=st.sampled_from([1, 2, 4, 8]),
    capacity=st.sampled_from([16, 24, 60]),
    window=st.integers(1, 3),
    checkpoint=st.booleans(),
    instances=st.integers(1, 3),
    route=st.sampled_from(["round-robin", "prefix"]),
    host=tiers,
    remote=tiers,
    write=st.sampled_from(["insert", "evict"]),
)
def test_every_match_is_the_slow_twins(
    lines, page_size, capacity, window, checkpoint, instances, route, host, remote, write
):
    fleet = fleets([instances], [route], [host], [remote], [write])[0]
    with tempfile.TemporaryDirectory() as folder:
        path = write_trace(Path(folder), lines)
        agrees(path, Cell(capacity, page_size, "lru", fleet), window, checkpoint)


# ---- what a store that is large enough gives


@pytest.mark.parametrize("route", ["round-robin", "prefix"])
@pytest.mark.parametrize(("window", "page_size"), [(1, 1), (4, 4), (4, 3)])
def test_a_store_without_bound_reaches_the_bound_to_the_token(tmp_path, route, window, page_size):
    path = write_trace(tmp_path, random_lines(21, 60, BLOCK, num_keys=2))
    stores = fleets([1, 2, 3], [route], remote_tiers=[None])
    cells = grid([60], [page_size], fleets=stores)
    report = replay(path, cells, block_size=BLOCK, window=window, keep_matches=True)
    bound = report.bounds[page_size]
    for result in report.results:
        assert result.evicted_pages > 0
        assert result.too_large == 0
        assert result.fleet.remote_hit_tokens > 0
        assert result.matched_lens.tolist() == bound.matched_lens.tolist()
        assert result.hit_tokens == bound.hit_tokens
        assert result.cut_tokens == bound.cut_tokens


def test_what_is_written_when_it_is_evicted_reaches_the_bound_of_one_instance(tmp_path):
    path = write_trace(tmp_path, random_lines(22, 60, BLOCK))
    one, two = fleets([1, 2], host_tiers=[None], writes=["evict"])
    report = replay(path, grid([60], [4], fleets=[one, two]), block_size=BLOCK)
    assert report.results[0].hit_tokens == report.bounds[4].hit_tokens
    # What the other instance has is out of reach.
    assert report.results[1].hit_tokens < report.bounds[4].hit_tokens


def test_prompts_that_are_shared_late_find_less_in_a_fleet(tmp_path):
    path = write_trace(tmp_path, random_lines(23, 80, BLOCK))
    cells = grid([400], [1], fleets=fleets([1, 3], remote_tiers=[None]))
    how = {"block_size": BLOCK, "window": 4, "checkpoint": False}
    one, three = replay(path, cells, **how).results
    # Three instances have three times as many in flight, whose prompts nobody knows yet.
    assert three.hit_tokens < one.hit_tokens


def test_no_tier_has_more_than_fits(tmp_path):
    path = write_trace(tmp_path, random_lines(24, 80, BLOCK))
    cells = grid([60], [4], fleets=fleets([2], host_tiers=[30], remote_tiers=[50]))
    found = replay(path, cells, block_size=BLOCK).results[0].fleet
    # 7 = 30 // 4 and 12 = 50 // 4
    assert (found.host_peak_pages, found.remote_peak_pages) == (7, 12)
    assert found.host_evicted_pages > 0
    assert found.remote_evicted_pages > 0


# ---- the pools behind it


def test_the_pools_are_in_order_in_the_middle_and_at_the_end(tmp_path):
    path = write_trace(tmp_path, random_lines(25, 40, BLOCK))
    fleet = Fleet(2, "prefix", 40, None, "insert")
    running = CellReplay(Cell(80, 4, "lru", fleet), 20, window=3, checkpoint=True)
    writer = TokenWriter(BLOCK)
    for index, request in enumerate(TraceReader(path, block_size=BLOCK)):
        running.serve(index, request, writer.tokens(index, request, False))
        for table in running.tables:
            table.check()
    assert sum(map(len, running.tables)) == 6
    running.drain()
    running.close()
    for table in running.tables:
        table.check()
        assert len(table) == 0
    assert running.result().fleet.remote_hit_tokens > 0


@pytest.mark.parametrize("policy", ["fifo", "lfu"])
def test_other_orders_of_eviction_go_with_tiers(tmp_path, policy):
    path = write_trace(tmp_path, random_lines(26, 80, BLOCK))
    fleet = Fleet(remote_tier=None)
    report = replay(path, [Cell(60, 4, policy, fleet)], block_size=BLOCK, window=3)
    assert report.results[0].hit_tokens == report.bounds[4].hit_tokens


def test_one_instance_without_tiers_has_the_figures_that_it_had(tmp_path):
    path = write_trace(tmp_path, random_lines(27, 40, BLOCK))
    plain, named = Cell(60, 4), Cell(60, 4, "lru", Fleet())
    assert plain == named
    assert "fleet" not in replay(path, [plain], block_size=BLOCK).results[0].as_dict()


def test_an_interrupt_leaves_what_there_is(tmp_path, monkeypatch):
    monkeypatch.setattr("kvpool.replay.session.NEWS_EVERY_S", 0.0)
    path = write_trace(tmp_path, random_lines(28, 40, BLOCK))
    cells = grid([80], [4], fleets=fleets([1, 2], host_tiers=[None]))
    running = Replay(path, cells, ReplayOptions(block_size=BLOCK))

    def interrupt(news):
        if news.cell == cells[1] and news.num_requests == 20:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        running.run(interrupt)
    report = running.report()
    assert [result.complete for result in report.results] == [True, False]
    assert sum(report.results[1].fleet.instance_requests) == 20
    assert report.results[1].as_dict()["fleet"]["host_peak_pages"] > 0


def test_tiers_that_missed_something_end_the_replay(tmp_path, monkeypatch):
    path = write_trace(tmp_path, random_lines(30, 20, BLOCK))

    def fail(self, keys):
        raise OSError("no room")

    monkeypatch.setattr("kvpool.replay.tiers.TierModel.write", fail)
    with pytest.raises(AssertionError, match=r"tiers missed changes .*'dropped_subscribers': 1"):
        replay(path, [Cell(60, 4, "lru", Fleet(remote_tier=None))], block_size=BLOCK)


# ---- what cannot be


def test_what_is_wrong_with_a_fleet_is_said():
    with pytest.raises(ValueError, match=r"instances must be in 1 \.\. 1024, got 2000"):
        Fleet(2000)
    with pytest.raises(ValueError, match=r"route must be one of round-robin, prefix, got 'lot'"):
        fleets([1], ["lot"])
    with pytest.raises(ValueError, match=r"write must be one of insert, evict, got 'never'"):
        fleets(writes=["never"])
    with pytest.raises(ValueError, match=r"one instance needs no route: .* got 'prefix'"):
        Fleet(1, "prefix")
    with pytest.raises(ValueError, match=r"nothing is written without a tier"):
        Fleet(2, write="evict")
    with pytest.raises(ValueError, match=r"a host tier of 8 tokens holds no page of 16"):
        Cell(100, 16, "lru", Fleet(host_tier=8))
    with pytest.raises(ValueError, match=r"explain asks one pool"):
        Replay("trace.jsonl", [Cell(100, 16, "lru", Fleet(2))], ReplayOptions(explain=1))


def test_tiers_that_no_machine_holds_are_refused_before_the_replay(tmp_path, monkeypatch):
    path = write_trace(tmp_path, [hashed(16, [1, 2, 3, 4])])
    monkeypatch.setattr("os.sysconf", lambda name: 50)
    cells = [Cell(20, 4, "lru", Fleet(3, host_tier=None, remote_tier=None))]
    # 4 pages of the prompt, and 4 of the one request in flight, in three tiers and the store.
    with pytest.raises(
        TraceError, match=r"5 pages in each of 3 pools and 32 in tiers take .* GiB"
    ):
        replay(path, cells, block_size=BLOCK, bound=False)


def test_figures_in_bytes_are_those_of_the_pages(tmp_path):
    path = write_trace(tmp_path, random_lines(29, 40, BLOCK))
    cells = [Cell(60, 4, "lru", Fleet(2, host_tier=40, remote_tier=None))]
    result = replay(path, cells, block_size=BLOCK, bytes_per_token=10).results[0]
    found = json.loads(json.dumps(result.as_dict()))["fleet"]
    assert found["host_peak_bytes"] == result.fleet.host_peak_pages * 40 == 400
    assert found["remote_peak_bytes"] == result.fleet.remote_peak_pages * 40
    assert found["local_peak_bytes"] == result.peak_pages * 40
    places = ("local", "host", "remote")
    assert sum(found[f"{place}_hit_tokens"] for place in places) == result.hit_tokens
    assert sum(found[f"{place}_hit_rate"] for place in places) == pytest.approx(result.hit_rate)
    shares = found["request_shares"]
    assert (shares["least"], shares["most"]) == (0.5, 0.5)


@pytest.mark.slow
def test_a_real_trace_gives_the_known_rates():
    try:
        path = find_trace("conversation")
    except FileNotFoundError as error:
        pytest.skip(str(error))
    routes = ["round-robin", "prefix"]
    cells = grid([10**6], [512], fleets=fleets([4], routes, remote_tiers=[0, None]))
    report = replay(path, cells)
    local, shared = report.results[:2], report.results[2:]
    assert [round(result.hit_rate, 4) for result in local] == [0.0795, 0.1754]
    assert [result.hit_tokens for result in shared] == [report.bounds[512].hit_tokens] * 2
