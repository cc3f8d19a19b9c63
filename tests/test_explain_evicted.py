"""What `explain` says of what was evicted: who, when, how much, and as far as it is remembered."""

import numpy as np
import pytest

from tests.helpers.pools import serve

SIZE = 16


@pytest.fixture
def pool(make_pool):
    """Ten pages of 16 tokens."""
    return make_pool(1, 10 * SIZE, 1, 1, page_size=SIZE)


def test_explain_evicted_prompt_names_who_and_when(pool):
    serve(pool, range(64))
    serve(pool, range(1000, 1096))
    culprit = serve(pool, range(2000, 2096))
    why = pool.explain(range(100))
    assert (why.reason, why.matched_len, why.evicted_len) == ("evicted", 0, 64)
    (run,) = why.evicted
    assert (run.start, run.end, run.cause, run.request_id) == (0, 64, "bind", culprit)
    # 4 pages of the prompt, and the last 2 of the second one
    assert run.pages_since == 6
    assert 0 <= run.seconds_ago < 60
    head, tail = str(why).split(f"{run.seconds_ago * 1e3:.0f} ms")
    assert head == "0 of 100 prompt tokens match: tokens [0, 64) were cached and were evicted "
    assert tail == (
        f" ago by the bind of request {culprit} (lru). A pool of about 6 more pages (96 tokens) "
        "would still hold them."
    )


def test_explain_tail_evicted_by_two_requests_tells_both(pool):
    serve(pool, range(160))
    first = pool.bind_request([7], 32)
    second = pool.bind_request([8], 48)
    why = pool.explain(range(161))
    assert (why.reason, why.matched_len, why.evicted_len) == ("evicted", 80, 160)
    parts = [(run.start, run.end, run.request_id, run.pages_since) for run in why.evicted]
    # tail first: two pages for the first, three for the second
    assert parts == [(80, 128, second, 3), (128, 160, first, 5)]
    assert "tokens [80, 160) were cached and were evicted in 2 parts, the last" in str(why)
    assert "A pool of about 5 more pages (80 tokens) would still hold them." in str(why)


@pytest.mark.parametrize(
    ("call", "cause", "words"),
    [
        (lambda pool, held: pool.extend_request(held, 32), "extend", "to extend request 1"),
        (lambda pool, held: pool.fork_request(held, 16), "fork", "by the fork of request 3"),
        (lambda pool, held: pool.alloc(16), "alloc", "by alloc"),
        (lambda pool, held: pool.radix.evict(16), "radix.evict", "by radix.evict"),
    ],
)
def test_explain_tells_what_evicted(pool, call, cause, words):
    held = pool.bind_request([5], 16)
    serve(pool, range(144))
    call(pool, held)
    why = pool.explain(range(145))
    assert (why.reason, why.matched_len, why.evicted_len) == ("evicted", 128, 144)
    assert why.evicted[0].cause == cause
    assert f" {words} (lru)." in str(why)
    request_id = {"extend": held, "fork": 3}.get(cause)
    assert why.evicted[0].request_id == request_id


def test_explain_promises_a_pool_that_would_do(make_pool):
    """Replayed with as many pages more as it says, the same calls leave the prompt cached."""
    rng = np.random.default_rng(0)
    known = [rng.integers(0, 9, rng.integers(1, 8) * SIZE).tolist() for _ in range(30)]
    prompts = [known[i] for i in rng.integers(0, 30, 120)]

    def replayed(num_pages):
        pool = make_pool(1, num_pages * SIZE, 1, 1, page_size=SIZE, eviction_history=10_000)
        for prompt in prompts:
            serve(pool, prompt)
        return pool

    small, promised = replayed(20), 0
    for prompt in known:
        why = small.explain([*prompt, 1])
        if why.reason == "evicted":
            larger = replayed(20 + max(run.pages_since for run in why.evicted))
            assert larger.explain([*prompt, 1]).matched_len >= why.evicted_len
            promised += 1
    assert promised > 10


def test_explain_cached_again_is_not_evicted(pool):
    serve(pool, range(64))
    pool.free(slots_of(pool, pool.radix.evict(64)))
    assert pool.explain(range(65)).reason == "evicted"
    serve(pool, range(32))
    why = pool.explain(range(65))
    assert (why.matched_len, why.evicted[0].start, why.evicted_len) == (32, 32, 64)
    serve(pool, range(64))
    assert pool.explain(range(65)).reason == "whole"


def slots_of(pool, pages):
    return (pages[:, None] * pool.page_size + np.arange(pool.page_size)).ravel()


def test_explain_other_sequence_finds_what_went_below_a_prefix_that_came_back(pool):
    """The node of the prefix is another one by then."""
    ours, other = [*range(32), *range(100, 132)], [*range(32), *range(200, 232)]
    serve(pool, ours)
    serve(pool, other)
    pool.free(slots_of(pool, pool.radix.evict(96)))
    serve(pool, other)
    why = pool.explain([*ours, 1])
    assert (why.matched_len, why.evicted_len) == (32, 64)


def test_explain_namespace_that_was_evicted_whole_is_still_known(pool):
    serve(pool, range(64), extra_key="a")
    pool.free(slots_of(pool, pool.radix.evict(64)))
    assert pool.radix.namespaces == [None]
    assert pool.explain(range(65), "a").evicted_len == 64
    assert pool.explain(range(65), "b").reason == "cold"
    serve(pool, [9] * 32, extra_key="a")
    assert pool.explain(range(65), "a").evicted_len == 64


def test_explain_after_a_reset_knows_nothing_older(pool):
    serve(pool, range(64))
    pool.free(slots_of(pool, pool.radix.evict(32)))
    pool.reset_prefix_cache()
    why = pool.explain(range(65))
    assert (why.reason, why.evicted) == ("cold", ())
    assert why.reach.complete
    assert why.reach.reset_seconds_ago is not None
    assert "no page of it was evicted since the cache was reset" in str(why)
    assert pool.radix.memory()["history_bytes"] == 0


def test_explain_evicted_and_diverged_keeps_both(pool):
    """The principal reason is the one that would have given more."""
    shared = list(range(32))
    serve(pool, [*shared, *range(100, 132)])
    serve(pool, [*shared, *range(200, 232)])
    pool.bind_request([1], 6 * SIZE)  # four pages are free, two of the first go
    why = pool.explain([*shared, *range(100, 140)])
    assert (why.reason, why.matched_len, why.evicted_len) == ("evicted", 32, 64)
    assert (why.nearest.common_len, why.nearest.cached_tokens) == (32, (200, 201, 202, 203))


def test_explain_forgotten_evictions_reads_as_cold_and_says_so(make_pool):
    pool = make_pool(1, 10 * SIZE, 1, 1, page_size=SIZE, eviction_history=3 * SIZE)
    for start in range(0, 10_000, 1000):
        serve(pool, range(start, start + 64))
    why = pool.explain(range(100))
    assert (why.reason, why.evicted, why.reach.complete) == ("cold", (), False)
    assert why.reach.remembered_len <= why.reach.limit_len == 48
    first, second = str(why).split(". ")
    assert first.endswith("no page of it was evicted as far as is known")
    assert second.startswith(f"Known are the last {why.reach.remembered_len} evicted tokens (")
    assert second.endswith("a larger eviction_history than 48 reaches further back.")


def test_explain_without_a_history_says_so(make_pool):
    pool = make_pool(1, 4 * SIZE, 1, 1, page_size=SIZE, eviction_history=0)
    serve(pool, range(64))
    serve(pool, range(100, 164))
    why = pool.explain(range(64))
    assert (why.reason, why.reach.limit_len) == ("cold", 0)
    assert str(why).endswith("What was evicted before is not known: eviction_history is 0.")
    assert pool.radix.history is None


@pytest.mark.parametrize(
    ("history", "error", "text"),
    [
        (-1, ValueError, "eviction_history must be at least 0, got -1"),
        (1 << 31, ValueError, "got 2147483648"),
        (True, TypeError, "eviction_history must be an int, got bool"),
        (1.5, TypeError, "eviction_history must be an int, got float"),
    ],
)
def test_make_with_a_bad_history_says_what_is_expected(make_pool, history, error, text):
    with pytest.raises(error, match=text):
        make_pool(1, SIZE, 1, 1, page_size=SIZE, eviction_history=history)
