"""A replay counts right: every match against brute force, on small traces."""

import numpy as np
import pytest

from bench.replay.trace import find_trace
from kvpool.replay import Cell, Replay, ReplayOptions, TraceError, grid, replay
from kvpool.replay.driver import CellReplay
from kvpool.replay.reader import TraceReader
from kvpool.replay.token_ids import TokenWriter
from kvpool_ext.eviction import EVICTION_POLICIES
from tests.helpers.traces import hashed, random_lines, write_trace
from tests.oracles.replay import SlowReplay

BLOCK = 8


def slow_replay(path, cell, num_pages, *, window=1, checkpoint=True, prompts_only=False):
    """The same trace through the slow twin."""
    slow = SlowReplay(num_pages, cell.page_size, window, checkpoint)
    writer = TokenWriter(BLOCK)
    for index, request in enumerate(TraceReader(path, block_size=BLOCK)):
        tokens = writer.tokens(index, request, prompts_only)[:-1].tolist()
        slow.serve(tokens, request.prompt_len, request.extra_key)
    return slow


@pytest.mark.parametrize("page_size", [1, 4, 12])
@pytest.mark.parametrize(
    ("window", "checkpoint", "prompts_only"),
    [(1, True, False), (4, True, False), (4, False, False), (4, True, True), (1, True, True)],
)
def test_every_match_is_the_slow_twins(tmp_path, page_size, window, checkpoint, prompts_only):
    lines = random_lines(page_size + window, 40, BLOCK, num_keys=2)
    path = write_trace(tmp_path, lines)
    # 45 tokens hold most requests alone, so that some are too large, and some wait.
    cells = grid([45, 80, 150, 400, None], [page_size])
    how = {"window": window, "checkpoint": checkpoint, "prompts_only": prompts_only}
    report = replay(path, cells, block_size=BLOCK, keep_matches=True, **how)
    assert [result.cell for result in report.results] == cells
    for result in report.results:
        capacity = result.cell.capacity
        num_pages = 10**6 if capacity is None else capacity // page_size
        slow = slow_replay(path, result.cell, num_pages, **how)
        matched, served = np.array(slow.matched), np.array(slow.matched) >= 0
        assert result.matched_lens.tolist() == slow.matched
        assert result.evicted_pages == slow.evicted
        assert result.waited == slow.waited
        assert result.too_large == (~served).sum()
        prompt_lens = np.array([line["input_length"] for line in lines])
        shares = matched[served] / prompt_lens[served]
        assert result.hit_tokens == matched[served].sum()
        assert result.hit_rate == matched[served].sum() / prompt_lens[served].sum()
        assert result.mean_hit_rate == pytest.approx(shares.mean())
        uncut = np.array(slow.uncut)
        assert result.cut_requests == (uncut > matched).sum()
        assert result.cut_tokens == (uncut - matched)[served].sum()
        uncut_shares = uncut[served] / prompt_lens[served]
        assert result.uncut_mean_hit_rate == pytest.approx(uncut_shares.mean())
        assert result.complete
    assert report.results[0].too_large
    assert report.results[1].evicted_pages
    assert report.results[-1].cut_tokens or page_size == 12
    assert report.results[-1].evicted_pages == 0
    if window > 1:
        assert report.results[0].waited


def test_an_unbounded_pool_matches_all_that_came_before(tmp_path):
    path = write_trace(tmp_path, random_lines(3, 80, BLOCK))
    result = replay(path, [Cell(None, 1)], block_size=BLOCK, keep_matches=True).results[0]
    seen, writer = set(), TokenWriter(BLOCK)
    for index, request in enumerate(TraceReader(path, block_size=BLOCK)):
        tokens = writer.tokens(index, request, True)[: request.prompt_len].tolist()
        prefixes = [tuple(tokens[:end]) for end in range(1, len(tokens) + 1)]
        known = sum(prefix in seen for prefix in prefixes)
        assert result.matched_lens[index] == min(known, len(tokens) - 1)
        seen.update(prefixes)


def test_outputs_take_room_but_are_never_found(tmp_path):
    path = write_trace(tmp_path, random_lines(4, 60, BLOCK))
    cells = grid([200, None], [4])
    full = replay(path, cells, block_size=BLOCK)
    prompts = replay(path, cells, block_size=BLOCK, prompts_only=True)
    assert full.results[1].hit_tokens == prompts.results[1].hit_tokens
    assert full.results[0].evicted_pages > prompts.results[0].evicted_pages
    assert full.results[1].output_tokens == full.output_tokens > 0
    assert prompts.results[1].output_tokens == 0


def test_known_output_tokens_are_found_by_the_next_turn(tmp_path):
    lines = [
        {"tokens": [1, 2, 3], "output_tokens": [4, 5, 6]},
        {"tokens": [1, 2, 3, 4, 5, 6, 7], "output_length": 1},
        {"tokens": [1, 2, 3, 4, 5, 6, 7], "output_length": 1, "extra_key": "other"},
    ]
    path = write_trace(tmp_path, lines)
    result = replay(path, [Cell(None, 1)], window=1, keep_matches=True).results[0]
    assert result.matched_lens.tolist() == [0, 6, 0]


def test_the_bound_stands_beside_each_page_size_or_is_left_out(tmp_path):
    path = write_trace(tmp_path, random_lines(5, 30, BLOCK))
    with_it = replay(path, grid([100], [1, 4]), block_size=BLOCK)
    assert set(with_it.bounds) == {1, 4}
    assert [result.cell for result in with_it.results] == grid([100], [1, 4])
    for result in with_it.results:
        assert result.hit_tokens <= with_it.bounds[result.cell.page_size].hit_tokens
    without = replay(path, grid([100], [1, 4]), block_size=BLOCK, bound=False)
    assert without.bounds == {}
    figures = [result.hit_tokens for result in with_it.results]
    assert [result.hit_tokens for result in without.results] == figures


def test_a_pool_is_no_larger_than_the_trace_needs(tmp_path):
    path = write_trace(tmp_path, [hashed(16, [1, 2]) for _ in range(50)])
    report = replay(path, grid([10**12, None], [4]), block_size=BLOCK, window=2)
    # 4 pages of the one prompt, and 4 for each of two requests in flight.
    assert [result.num_pages for result in report.results] == [12, 12]
    # The n - 1 rule gives each request in flight a copy of the last page.
    assert [result.peak_pages for result in report.results] == [6, 6]


def test_cells_that_no_machine_holds_are_refused_before_the_replay(tmp_path, monkeypatch):
    path = write_trace(tmp_path, [hashed(16, [1, 2])])
    monkeypatch.setattr("os.sysconf", lambda name: 1)
    with pytest.raises(TraceError, match=r"unbounded, .* 8 pages take .* GiB, this machine has"):
        replay(path, grid([20, None], [4]), block_size=BLOCK)


def test_what_is_wrong_with_a_cell_or_an_option_is_said():
    with pytest.raises(ValueError, match=r"10 tokens holds no page of 16"):
        Cell(10, 16)
    with pytest.raises(ValueError, match=r"page_size must be in 1 \.\. 1,048,576, got 0"):
        Cell(10, 0)
    with pytest.raises(ValueError, match=r"policy must be one of lru.*got 'mru'"):
        Cell(10, 1, "mru")
    with pytest.raises(ValueError, match="at least one cell"):
        Replay("trace.jsonl", [])
    for wrong in ({"window": 0}, {"block_size": 0}, {"limit": 0}, {"explain": -1}):
        with pytest.raises(ValueError, match=f"{next(iter(wrong))} must be"):
            ReplayOptions(**wrong)


def test_progress_moves_over_all_passes(tmp_path, monkeypatch):
    monkeypatch.setattr("kvpool.replay.session.NEWS_EVERY_S", 0.0)
    path = write_trace(tmp_path, random_lines(6, 40, BLOCK))
    news = []
    replay(path, grid([100, 200], [4]), block_size=BLOCK, on_progress=news.append)
    # The first reading, the bound and two cells.
    assert {each.num_passes for each in news} == {4}
    assert news[-1].passes == 4
    done = [(each.passes, each.pass_bytes) for each in news]
    assert [each.passes for each in news] == sorted(each.passes for each in news)
    assert len(set(done)) > 4
    assert news[0].cell is None
    assert {each.cell for each in news[1:]} == {None, *grid([None, 100, 200], [4])}
    assert max(each.pass_bytes for each in news) == path.stat().st_size == news[-1].file_bytes
    assert news[-1].hit_rate is not None


def test_an_interrupt_leaves_what_there_is(tmp_path, monkeypatch):
    monkeypatch.setattr("kvpool.replay.session.NEWS_EVERY_S", 0.0)
    path = write_trace(tmp_path, random_lines(7, 40, BLOCK))
    running = Replay(path, grid([100, 200], [4]), ReplayOptions(block_size=BLOCK))

    def interrupt(news):
        if news.cell == Cell(200, 4) and news.num_requests == 20:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        running.run(interrupt)
    report = running.report()
    assert not report.complete
    assert [result.complete for result in report.results] == [True, False]
    assert report.results[1].num_requests + report.results[1].too_large == 20
    assert report.results[1].seconds > 0
    with pytest.raises(RuntimeError, match="once"):
        running.run()


def test_a_file_that_changes_meanwhile_is_noticed(tmp_path):
    path = write_trace(tmp_path, random_lines(8, 40, BLOCK))

    def shorten(news):
        if news.cell is None:
            path.write_text("".join(path.read_text().splitlines(True)[:30]))

    with pytest.raises(TraceError, match=r"changed while it was replayed: 30 requests, 40 when"):
        replay(path, [Cell(100, 4)], block_size=BLOCK, on_progress=shorten)

    def grow(news):
        with path.open("a") as file:
            file.write(path.read_text())

    path = write_trace(tmp_path, random_lines(8, 40, BLOCK))
    report = replay(path, [Cell(100, 4)], block_size=BLOCK, on_progress=grow)
    assert report.num_requests == report.results[0].num_requests + report.results[0].too_large


def test_the_pool_is_in_order_in_the_middle_and_at_the_end(tmp_path):
    path = write_trace(tmp_path, random_lines(9, 30, BLOCK))
    running = CellReplay(Cell(400, 4), 100, window=5, checkpoint=True)
    writer = TokenWriter(BLOCK)
    for index, request in enumerate(TraceReader(path, block_size=BLOCK)):
        running.serve(index, request, writer.tokens(index, request, False))
        running.table.check()
    assert len(running.table) == 5
    running.drain()
    running.table.check()
    assert len(running.table) == 0


@pytest.mark.parametrize("policy", EVICTION_POLICIES)
def test_each_policy_is_the_trees(tmp_path, policy):
    path = write_trace(tmp_path, random_lines(10, 60, BLOCK))
    running = CellReplay(Cell(90, 4, policy), 22, window=1, checkpoint=True)
    assert running.table.ledger.tree.eviction == policy
    report = replay(path, grid([90, 1000], [4], [policy]), block_size=BLOCK)
    few, many = report.results
    assert few.evicted_pages > many.evicted_pages
    assert few.hit_tokens < many.hit_tokens <= report.bounds[4].hit_tokens


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "whole", "partial"),
    [
        ("conversation", (0.37338, 0.40779), (0.37362, 0.40938)),
        ("synthetic", (0.65043, 0.42424), (0.65124, 0.43152)),
    ],
)
def test_real_traces_give_the_known_bounds(name, whole, partial):
    try:
        path = find_trace(name)
    except FileNotFoundError as error:
        pytest.skip(str(error))
    report = replay(path, grid([None], [512, 1]), prompts_only=True)
    pages, tokens = report.results
    assert (round(pages.hit_rate, 5), round(pages.mean_hit_rate, 5)) == whole
    assert pages.cut_tokens == 0
    # What is cached to its end loses its last token: one a request.
    assert (
        tokens.cut_tokens == tokens.cut_requests == {"conversation": 118, "synthetic": 213}[name]
    )
    assert (round(tokens.uncut_hit_rate, 5), round(tokens.uncut_mean_hit_rate, 5)) == partial
