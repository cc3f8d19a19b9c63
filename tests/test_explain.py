"""What `explain` says: each reason with its numbers, in fields and in words."""

import dataclasses
import json

import numpy as np
import pytest

from kvpool import Explanation
from kvpool.errors import KVCacheStateError
from kvpool.explain import REASONS
from tests.helpers.pools import serve

SIZE = 16


@pytest.fixture
def pool(make_pool):
    """Ten pages of 16 tokens."""
    return make_pool(1, 10 * SIZE, 1, 1, page_size=SIZE)


def test_explain_all_that_can_matches_is_whole(pool):
    serve(pool, range(64))
    why = pool.explain(range(64))
    # 64 - 1 tokens fill 3 pages of 16
    assert (why.reason, why.matched_len, why.limit_len, why.prompt_len) == ("whole", 48, 48, 64)
    assert (why.nearest, why.evicted, why.other_namespace) == (None, (), None)
    assert str(why) == (
        "48 of 64 prompt tokens match, all that can: the last token is always computed, and pages "
        "of 16 match as a whole."
    )
    assert pool.explain(range(65)).matched_len == 64


def test_explain_nothing_known_is_cold(pool):
    why = pool.explain(range(100))
    assert (why.reason, why.matched_len, why.limit_len) == ("cold", 0, 96)
    assert why.nearest is None
    assert why.reach.complete
    assert str(why) == (
        "0 of 100 prompt tokens match: no cached sequence begins with its first token, and no "
        "page of it was evicted since the pool was made."
    )


def test_explain_prompt_that_goes_on_is_cold_behind_the_match(pool):
    serve(pool, range(64))
    why = pool.explain(range(100))
    assert (why.reason, why.matched_len, why.nearest) == ("cold", 64, None)
    assert str(why) == (
        "64 of 100 prompt tokens match: there the cached sequence ends, and no further page of it "
        "was evicted since the pool was made."
    )


def test_explain_other_tokens_inside_a_cached_run_has_diverged(pool):
    serve(pool, range(96))
    why = pool.explain([*range(52), *range(500, 580)])
    near = why.nearest
    # 52 = 3 * 16 + 4
    assert (why.reason, why.matched_len, near.common_len) == ("diverged", 48, 52)
    assert (near.sequence_len, near.num_branches, near.locked) == (96, 1, False)
    assert near.prompt_tokens == (500, 501, 502, 503)
    assert near.cached_tokens == (52, 53, 54, 55)
    assert str(why) == (
        "48 of 132 prompt tokens match: at position 52 the prompt has 500 501 502 503 instead of "
        "52 53 54 55 of the cached sequence (96 tokens); the 4 tokens in common before fill no "
        "page of 16. What changes from request to request (a date, an id) belongs behind what "
        "they share."
    )


def test_explain_among_branches_names_the_nearest_and_its_lock(pool):
    shared = list(range(32))
    serve(pool, [*shared, *range(100, 116)])
    far = pool.bind_request([*shared, 7, 8, 9, *range(200, 229)], 64)
    pool.mark_written(far, 64)
    pool.checkpoint_request(far, [*shared, 7, 8, 9, *range(200, 229)])
    why = pool.explain([*shared, 7, 8, *range(300, 330)])
    assert (why.reason, why.matched_len) == ("diverged", 32)
    assert (why.nearest.common_len, why.nearest.num_branches, why.nearest.locked) == (34, 2, True)
    assert "of the nearest of 2 cached sequences (64 tokens, locked)" in str(why)


def test_explain_less_than_a_page_in_common_is_page_floor(pool):
    serve(pool, range(64))
    why = pool.explain([*range(9), *range(100, 180)])
    assert (why.reason, why.matched_len, why.nearest.common_len) == ("page floor", 0, 9)
    assert str(why) == (
        "0 of 89 prompt tokens match: 9 tokens in common with the cached sequence (64 tokens) "
        "fill no page of 16; then the prompt has 100 101 102 103 instead of 9 10 11 12. A page "
        "size of 9 or less would let some of them match."
    )


def test_explain_prompt_shorter_than_a_page_is_page_floor(pool):
    assert str(pool.explain(range(10))) == (
        "0 of 10 prompt tokens match: the last token is always computed, and the 9 tokens before "
        "it fill no page of 16."
    )
    serve(pool, range(64))
    why = pool.explain(range(2))
    assert (why.reason, why.limit_len, why.nearest.common_len) == ("page floor", 0, 2)
    assert str(why).endswith("A page size of 1 would let some of them match.")
    assert str(pool.explain([5])).startswith("0 of 1 prompt token matches")


def test_explain_longer_in_another_namespace_names_it(pool):
    serve(pool, range(64), extra_key="a")
    serve(pool, range(32), extra_key=b"b")
    why = pool.explain(range(100), "c")
    assert (why.reason, why.extra_key, why.matched_len) == ("other namespace", "c", 0)
    assert (why.other_namespace.extra_key, why.other_namespace.match_len) == ("a", 64)
    assert str(why) == (
        "0 of 100 prompt tokens match under extra_key 'c', but 64 would under extra_key 'a'. "
        "Nothing is shared across namespaces: use one key for both if their K/V is the same."
    )


def test_explain_while_reuse_is_off_says_what_would_match(pool):
    serve(pool, range(64))
    pool.prefix_reuse_enabled = False
    why = pool.explain(range(100))
    assert (why.reason, why.matched_len, why.cached_len) == ("reuse off", 0, 64)
    assert str(why) == (
        "0 of 100 prompt tokens match: prefix reuse is off; with prefix_reuse_enabled = True, 64 "
        "would."
    )


def test_explain_of_a_request_in_flight_tells_how_to_share_it(pool):
    request = pool.bind_request(range(64), 64)
    why = pool.explain(range(100))
    assert (why.reason, why.bound.request_id, why.bound.match_len) == ("cold", request, 64)
    assert str(why).endswith(
        f" Request {request}, bound now, has 64 of these tokens and has not cached them yet: "
        "checkpoint_request after its prefill would share them."
    )
    assert pool.explain(range(100), "a").bound is None
    pool.mark_written(request, 64)
    pool.checkpoint_request(request, range(64))
    assert pool.explain(range(100)).bound is None


def test_explain_has_fields_for_programs(pool):
    serve(pool, range(64), extra_key=b"a")
    why = pool.explain(range(100))
    assert isinstance(why, Explanation)
    assert why.reason in REASONS
    found = json.loads(json.dumps(why.as_dict()))
    names = {field.name for field in dataclasses.fields(why)}
    assert set(found) == names | {"evicted_len", "text"}
    assert found["text"] == str(why)
    assert found["other_namespace"] == {"extra_key": "b'a'", "match_len": 64}
    assert json.dumps(pool.explain(range(100), np.int64(3)).as_dict()["extra_key"]) == "3"
    with pytest.raises(dataclasses.FrozenInstanceError):
        why.reason = "whole"


def test_explain_takes_what_bind_takes(pool):
    serve(pool, range(64))
    for prompt in (list(range(70)), tuple(range(70)), np.arange(70), np.arange(140)[::2] // 2):
        assert pool.explain(prompt).matched_len == 64
    with pytest.raises(ValueError, match="the prompt is empty, expected at least one token"):
        pool.explain([])
    with pytest.raises(TypeError, match="token at position 0 is str"):
        pool.explain(["a"])
    with pytest.raises(ValueError, match="does not fit int32"):
        pool.explain([1 << 40])
    with pytest.raises(TypeError, match="extra_key must be"):
        pool.explain([1], 1.5)
    pool.close()
    with pytest.raises(KVCacheStateError, match="closed"):
        pool.explain([1])
