"""Where two features meet: a caller's locks, resets, forks, checkpoints, changed capacities."""

import ml_dtypes
import numpy as np
import pytest

from kvpool import KVCacheExhaustedError
from tests.helpers.pools import (
    R,
    assert_ledger,
    cache_prompt,
    case_pool,
    read,
    st,
    unchanged,
    values,
    window,
    write,
)


def test_exclusive_binds_leave_what_a_caller_has_locked(make_pool):
    pool = case_pool(make_pool, 4, 8)
    cache_prompt(pool, R(1, 8))
    node = pool.radix.match_prefix(R(1, 8)).node
    pool.radix.inc_lock_ref(node)
    assert pool.bind_with_prefix(R(50, 53), 100) == 0
    assert pool.request_capacity == 24  # six pages: two are locked
    assert st(pool) == (0, 8, 0, 8)
    pool.bind_requests(4, 100)
    assert pool.request_capacity == 4  # 6 // 4 = 1 page each
    assert st(pool) == (2, 8, 0, 8)
    pool.unbind_requests()
    pool.radix.dec_lock_ref(node)
    assert st(pool) == (6, 8, 8, 0)


def test_reset_frees_what_a_caller_has_locked_at_its_unlock(make_pool):
    pool = case_pool(make_pool, 4, 8)
    cache_prompt(pool, R(1, 8))
    node = pool.radix.match_prefix(R(1, 8)).node
    pool.radix.inc_lock_ref(node)
    assert pool.reset_prefix_cache() == 0
    assert st(pool) == (6, 8, 0, 8)
    assert_ledger(pool)
    pool.radix.dec_lock_ref(node)
    assert st(pool) == (8, 0, 0, 0)


def test_reset_of_the_tree_itself_keeps_the_ledger(make_pool):
    pool = case_pool(make_pool, 4, 8)
    cache_prompt(pool, R(1, 8))
    cache_prompt(pool, R(50, 57))
    c = pool.bind_request(R(1, 9), 12)
    pool.radix.reset()
    assert_ledger(pool)
    assert pool.radix.match_prefix(R(50, 57)).length == 0
    assert read(pool, c, 8) == values(100, 0, 8)
    pool.unbind_request(c)
    assert pool.radix.protected_size == 0
    assert_ledger(pool)


def test_reset_between_checkpoint_and_fork_publishes_nothing_old(make_pool):
    pool = case_pool(make_pool, 4, 12)
    a = pool.bind_request(R(1, 8), 12)
    write(pool, a, 0, 8)
    assert pool.checkpoint_request(a, R(1, 8)) == 8
    assert pool.reset_prefix_cache() == 0  # locked by a
    assert st(pool) == (9, 8, 0, 8)
    write(pool, a, 8, 12)
    f = pool.fork_request(a, 16)
    assert pool.checkpoint_request(a, R(1, 12)) == 0
    assert pool.finish_request(a, R(1, 12)) == 0
    assert read(pool, f, 12) == values(100, 0, 12)
    assert_ledger(pool)
    assert pool.finish_request(f, R(1, 12)) == 0
    assert st(pool) == (12, 0, 0, 0)


def test_finish_after_checkpoint_with_other_tokens_raises(make_pool):
    pool = case_pool(make_pool, 4, 8)
    a = pool.bind_request(R(1, 4), 12)
    write(pool, a, 0, 8)
    pool.checkpoint_request(a, R(1, 8))
    wrong = [*R(1, 4), *R(50, 57)]  # agrees with the prompt, not with what was published
    for call in (pool.finish_request, pool.checkpoint_request):
        with unchanged(pool, a), pytest.raises(ValueError, match="4"):
            call(a, wrong)
    assert pool.finish_request(a, R(1, 8)) == 0


def test_checkpoint_of_what_a_fork_has_cached_is_held_to_its_tokens(make_pool):
    pool = case_pool(make_pool, 4, 8)
    parent = pool.bind_request([1], 8)
    write(pool, parent, 0, 4)
    child = pool.fork_request(parent, 8)
    assert pool.finish_request(child, R(1, 4)) == 4
    assert pool.checkpoint_request(parent, R(1, 4)) == 0
    with pytest.raises(ValueError, match="token 9 at position 2 contradicts token 3"):
        pool.finish_request(parent, [1, 2, 9, 4])
    assert pool.finish_request(parent, R(1, 4)) == 0


def test_fork_with_tokens_that_contradict_the_parents_prompt_raises(make_pool):
    pool = case_pool(make_pool, 4, 8)
    a = pool.bind_request(R(1, 6), 8)
    write(pool, a, 0, 8)
    f = pool.fork_request(a, 8)
    with unchanged(pool, a, f), pytest.raises(ValueError, match="5"):
        pool.finish_request(f, [1, 2, 3, 4, 5, 66, 7, 8])


def test_fork_pages_cached_by_a_third_request_stay_readable(make_pool):
    pool = case_pool(make_pool, 4, 12)
    a = pool.bind_request(R(1, 8), 8)
    write(pool, a, 0, 8)
    f = pool.fork_request(a, 12)
    g = pool.bind_request(R(1, 8), 8)
    write(pool, g, 0, 8, 500)
    assert pool.finish_request(g, R(1, 8)) == 8
    assert pool.finish_request(f, R(1, 8)) == 0  # g's pages are the cached ones
    assert st(pool)[:2] == (8, 8)  # a still holds the two shared ones
    assert read(pool, a, 8) == values(100, 0, 8)
    assert_ledger(pool)
    assert pool.finish_request(a, R(1, 8)) == 0
    assert st(pool) == (10, 8, 8, 0)


def test_fork_child_that_publishes_a_part_leaves_the_rest_to_the_parent(make_pool):
    pool = case_pool(make_pool, 4, 8)
    a = pool.bind_request(R(1, 4), 8)
    write(pool, a, 0, 8)
    f = pool.fork_request(a, 12)
    assert pool.finish_request(f, R(1, 4)) == 4
    assert st(pool) == (6, 4, 0, 4)  # one page became the tree's, one is a's alone again
    assert_ledger(pool)
    assert pool.finish_request(a, R(1, 8)) == 4
    assert st(pool) == (6, 8, 8, 0)


def test_fork_after_a_seal_hides_what_the_parent_took_back(make_pool):
    pool = case_pool(make_pool, 4, 8)
    a = pool.bind_request(R(1, 6), 8)
    write(pool, a, 0, 8).seal_length(6)
    f = pool.fork_request(a, 8)
    k, _ = pool.activate_step(f).get(0, 8)
    assert k[0, :, 0, 0].tolist() == [*values(100, 0, 6), 0, 0]


def test_put_far_ahead_then_behind_keeps_both(make_pool):
    pool = case_pool(make_pool, 4, 8)
    pool.key_cache[...] = np.nan
    pool.value_cache[...] = np.nan
    a = pool.bind_request(R(1, 6), 16)
    step = write(pool, a, 9, 10)
    k, _ = step.get(0, 16)
    assert k[0, :, 0, 0].tolist() == [*[0.0] * 9, 109, *[0.0] * 6]
    write(pool, a, 5, 8)
    write(pool, a, 0, 5)  # enters page 1 from below: 5..7 must survive its clearing
    k, _ = step.get(1, 16)
    assert k[0, :8, 0, 0].tolist() == values(1100, 0, 8)
    assert k[0, 9, 0, 0] == 1109


def test_step_after_shrink_and_extend_uses_the_new_pages(make_pool):
    pool = case_pool(make_pool, 4, 8)
    a = pool.bind_request(R(1, 4), 12)
    step = pool.activate_step(a)
    step.window_slot_indices(8, 2)
    step.page_table(12)
    pool.shrink_request(a, 4)
    taken = pool.alloc(8)  # takes the pages that a gave back
    pool.extend_request(a, 12)
    own = np.asarray(pool.request(a).page_ids).tolist()
    assert step.window_slot_indices(8, 2).tolist() == [own[2] * 4, own[2] * 4 + 1]
    assert step.page_table(12).indices.tolist() == own
    assert not set(own) & {int(slot) // 4 for slot in taken}
    write(pool, a, 0, 12)
    assert read(pool, a, 12) == values(100, 0, 12)


def test_own_slots_of_another_window_are_refused(make_pool):
    pool = case_pool(make_pool, 4, 8)
    a = pool.bind_request(R(1, 4), 12)
    step = pool.activate_step(a)
    slots = step.window_slot_indices(0, 4)
    with unchanged(pool, a), pytest.raises(ValueError, match="8"):
        step.put(0, 8, *window(pool, 8, 12, 100), slots=slots)


@pytest.mark.parametrize("huge", [2**31, 2**40, 2**63 - 1, 2**63, 2**70])
def test_sizes_beyond_any_pool_are_refused_not_wrapped(make_pool, huge):
    pool = case_pool(make_pool, 4, 8)
    a = pool.bind_request(R(1, 4), 8)
    step = write(pool, a, 0, 4)
    for call in (
        lambda: pool.bind_request([1], huge),
        lambda: pool.extend_request(a, huge),
        lambda: pool.fork_request(a, huge),
        lambda: pool.alloc(huge),
        lambda: pool.bind_requests(huge, 4),
    ):
        with unchanged(pool, a), pytest.raises(KVCacheExhaustedError) as caught:
            call()
        assert not caught.value.can_ever_fit
    for call in (
        lambda: step.page_table(huge),
        lambda: step.get(0, huge),
        lambda: step.put(0, huge, *window(pool, 0, 1, 100)),
        lambda: step.window_slot_indices(0, huge),
        lambda: step.require(huge),
        lambda: step.seal_length(huge),
        lambda: step.invalidate_range(0, huge),
        lambda: step.truncate_to(0, huge),
        lambda: pool.mark_written(a, huge),
        lambda: pool.page_owner(huge),
        lambda: pool.key_layer(huge),
        lambda: pool.radix.insert(R(1, 4), [huge]),
    ):
        with unchanged(pool, a), pytest.raises((KVCacheExhaustedError, ValueError)):
            call()
    assert not pool.would_fit([1], huge)
    assert not pool.is_bound(huge)


def test_numpy_integers_are_integers(make_pool):
    pool = case_pool(make_pool, 4, 8)
    a = pool.bind_request(R(1, 4), np.int64(8))
    pool.extend_request(np.int32(a), np.int64(12))
    step = pool.activate_step(np.int64(a))
    step.put(np.int64(0), np.int32(0), *window(pool, 0, 4, 100))
    assert step.page_table(np.int64(4)) is step.page_table(4)
    assert pool.key_layer(np.int32(1)).shape == (32, 2, 8)
    pool.free(pool.alloc(np.int64(4)))
    pool.unbind_request(np.int64(a))


@pytest.mark.parametrize(
    ("dtype", "kind"), [("float16", np.float16), ("bfloat16", ml_dtypes.bfloat16)]
)
def test_put_rounds_special_values_as_ieee_does(make_pool, dtype, kind):
    special = [0.0, -0.0, np.inf, -np.inf, np.nan, 65504.0, 65519.9, 65520.0, 3.4e38, 1e-45]
    special += [6e-8, 5.96e-8, 2.9e-8, 6.1e-5, 1.0009765625, 1.00048828125, 1.0029296875, 1e-39]
    special += [1.00390625, 1.01171875, -1.00390625, 3.3961775292304957e38, 3.3895e38]
    pool = make_pool(1, 4, 1, len(special), page_size=1, dtype=dtype)
    a = pool.bind_request([1], 1)
    k = np.array(special, np.float32).reshape(1, 1, 1, -1)
    step = pool.activate_step(a)
    step.put(0, 0, k, -k)
    with np.errstate(over="ignore", under="ignore"):
        want = k.astype(kind)
    for got, expected in zip(step.get(0, 1), (want, -want), strict=True):
        known = ~np.isnan(expected)
        assert (np.isnan(got) == ~known).all()
        assert (got.view(np.uint16)[known] == expected.view(np.uint16)[known]).all()
