"""Which instance serves a request: the rule of the router, case by case."""

from types import SimpleNamespace

import pytest

from kvpool.replay import Cell, Fleet, fleets, grid, replay
from kvpool.replay.routing import by_prefix, is_out_of_balance, least_loaded
from tests.helpers.traces import hashed, write_trace


def loads(*pairs):
    return [SimpleNamespace(requests_in_flight=r, tokens_in_flight=t) for r, t in pairs]


@pytest.mark.parametrize(
    ("pairs", "expected"),
    [
        ([(0, 0), (0, 0)], 0),
        ([(2, 10), (1, 90)], 1),  # requests go before tokens
        ([(1, 20), (1, 10), (1, 10)], 1),
    ],
)
def test_the_least_loaded_is_the_first_of_the_idlest(pairs, expected):
    assert least_loaded(loads(*pairs)) == expected


def test_the_longest_prefix_serves_and_ties_go_to_the_idlest():
    pairs = [(3, 30), (2, 20), (4, 40)]
    assert by_prefix(loads(*pairs), [1, 2, 3], window=4) == 2
    assert by_prefix(loads(*pairs), [3, 3, 3], window=4) == 1
    assert by_prefix(loads(*pairs), [3, 0, 3], window=4) == 0
    assert by_prefix(loads(*pairs), [0, 0, 0], window=4) == 1


def test_load_goes_first_where_it_is_uneven_in_number_and_in_proportion():
    assert is_out_of_balance(loads((7, 0), (2, 0)), window=4)
    assert by_prefix(loads((7, 0), (2, 0)), [9, 0], window=4) == 1
    # 4 more are not more than 4; and 15 are not more than 1.5 times 10.
    assert by_prefix(loads((6, 0), (2, 0)), [9, 0], window=4) == 0
    assert by_prefix(loads((15, 0), (10, 0)), [9, 0], window=4) == 0
    assert by_prefix(loads((16, 0), (10, 0)), [9, 0], window=4) == 1


def test_conversations_stay_where_they_began(tmp_path):
    # Two conversations whose turns are dealt out unevenly.
    turns = [[1], [2], [2, 3], [1, 4], [1, 4, 5], [2, 3, 6]]
    path = write_trace(tmp_path, [hashed(8 * len(ids), ids) for ids in turns])
    how = {"block_size": 8, "window": 4, "prompts_only": True, "keep_matches": True}
    dealt, routed = replay(
        path, grid([80], [4], fleets=fleets([2], ["round-robin", "prefix"])), **how
    ).results
    # In turn, 1 and 2 4 5 go to the first instance, 2 and 1 4 to the second, ...
    assert dealt.matched_lens.tolist() == [0, 0, 0, 0, 8, 8]
    assert routed.matched_lens.tolist() == [0, 0, 8, 8, 16, 16]
    assert routed.fleet.instance_requests == [3, 3]


def test_a_host_tier_counts_as_near(tmp_path):
    turns = [[1], [2], [3], [4], [5], [1, 6]]
    path = write_trace(tmp_path, [hashed(8 * len(ids), ids) for ids in turns])
    cell = Cell(16, 4, "lru", Fleet(2, "prefix", host_tier=None))
    how = {"block_size": 8, "window": 1, "prompts_only": True, "keep_matches": True}
    found = replay(path, [cell], **how).results[0]
    assert found.matched_lens[-1] == 8
    assert found.fleet.host_hit_tokens == 8
